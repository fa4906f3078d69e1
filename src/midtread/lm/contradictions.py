"""Contradictions: keys of a config that cannot go together, and what to write instead.

Two keys may each have a value that its limits allow (config.py) and still mean nothing beside
one another: heads that the groups of keys and values do not divide, or a key for one kind of
data where another kind is asked for. No key is ever ignored, so that each such pair is refused
with a `UsageError` that names both.

    check_model(model)      what a model's keys say of one another
    check_config(config)    what data, optimizer and quantization say besides
"""

import pathlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from midtread.lm.usage import require

if TYPE_CHECKING:
    from midtread.lm.config import Config, Model

# Keys that are about a part that a model may not have: the key that adds the part, its value
# without it, what to write, and the keys.
PARTS = (
    ("attention_type", "gqa", "attention_type=mla", (
        "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
        "v_head_dim")),
    ("num_experts", 1, "num_experts=8, say", (
        "moe_mlp_dim", "shared_experts", "first_num_dense_layers", "routed_score_func",
        "norm_topk_prob", "routed_scaling_factor", "n_routing_groups",
        "topk_routing_group", "load_balance_loss_weight")),
    ("mtp_num_layers", 0, "mtp_num_layers=1", ("mtp_loss_scaling_factor",)),
    ("use_qk_norm", False, "use_qk_norm=true", ("qk_norm_scope",)),
)  # fmt: skip
# The same of keys that are not the model's.
OPTIONS = (
    ("temperature", 0, "temperature=0.8, say", ("top_k", "top_p")),
    ("quantize_kvcache", False, "quantize_kvcache=true", (
        "kv_quant_axis", "kv_quant_dtype")),
    ("weight_sparsity_n", None, "weight_sparsity_n=2 weight_sparsity_m=4, say", (
        "weight_sparsity_start_step", "weight_sparsity_update_step")),
    ("algorithm", "", "algorithm=gptq, say", ("calibration_batches",)),
)  # fmt: skip
# Keys that latent attention does not use.
NOT_MLA = ("use_qk_norm", "partial_rotary_factor", "attn_logits_soft_cap",
           "query_pre_attn_scalar", "attention_bias", "attention_sink",
           "sliding_window_size")  # fmt: skip
# Keys that are paths of this machine.
LOCAL = ("base_output_directory", "load_parameters_path", "save_quantized_params_path",
         "export_path", "tokenizer_path", "quant_cfg_path", "jax_cache_dir")  # fmt: skip
# Keys that only some kinds of data use, and these kinds.
READS = {
    "dataset_path": ("text", "jsonl", "parquet", "hf", "tfds"),
    "dataset_name": ("hf", "tfds"),
    "text_field": ("jsonl", "parquet", "hf", "tfds"),
    "dataset_memory_mb": ("text", "jsonl", "parquet"),
}


def is_default(config: Any, name: str) -> bool:
    """Whether a key has the value that it has when nobody gives it."""
    return getattr(config, name) == type(config).__dataclass_fields__[name].default


def _check_parts(config: Any, parts: tuple) -> None:
    """Refuses keys that are about a part that is not there."""
    for switch, without, write, names in parts:
        given = [
            f"{n}={getattr(config, n)}" for n in names if not is_default(config, n)
        ]
        is_named = isinstance(without, bool) or without == ""
        say = repr(without).lower() if is_named else without
        require(
            not given or getattr(config, switch) != without,
            f"{' and '.join(given)} mean{'s' * (len(given) == 1)} nothing with {switch}="
            f"{say}: write {write}, or drop {'it' if len(given) == 1 else 'them'}.",
        )


# --- the verbs --------------------------------------------------------------------------------

# The verbs that use a key, where not all do. What train, quantize and import are given is kept
# in the config of what they make, for whoever reads that. Train, bench and explain take each
# other's words, so that a command can be explained before it is given.
TRAINS = ("train", "bench", "explain")
USED_BY = (
    (("enable_tensorboard", "remat_policy", "steps", "gradient_accumulation_steps",
      "learning_rate", "warmup_steps_fraction", "learning_rate_final_fraction", "opt_type",
      "optimizer_states", "quantize_embedding_states", "weight_rounding", "adam_b1",
      "adam_b2", "adam_weight_decay", "gradient_clipping_threshold", "z_loss_multiplier",
      "eval_interval", "enable_checkpointing", "async_checkpointing", "checkpoint_period",
      "max_num_checkpoints_to_keep", "bwd_quantization_calibration_method",
      "drhs_grad_quantization_calibration_method", "weight_sparsity_n",
      "weight_sparsity_m", "weight_sparsity_start_step", "weight_sparsity_update_step",
      "fp8_weight_gather", "expert_dispatch", "batch_split_factor"), TRAINS),
    (("run_name", "base_output_directory"), ("train", "import")),
    (("overwrite",), ("train", "import", "quantize")),
    (("jax_cache_dir",),
     ("train", "import", "quantize", "generate", "eval", "report")),
    (("grain_worker_count",), ("train", "import", "quantize")),
    (("dataset_type", "dataset_path", "dataset_name", "text_field", "dataset_memory_mb",
      "packing", "batch_size", "eval_steps"),
     (*TRAINS, "import", "quantize", "eval", "report")),
    (("target_loss",), ("train", "eval", "report")),
    (("prompt", "use_chat_template", "max_new_tokens", "temperature", "top_k", "top_p",
      "stop"), ("train", "import", "quantize", "generate", "report")),
    (("decode_slots",), ("train", "import", "quantize", "generate")),
    (("quantize_kvcache", "kv_quant_axis", "kv_quant_dtype"),
     ("train", "bench", "quantize", "generate", "report")),
    (("quantization", "use_qwix_quantization", "quant", "quant_reach",
      "quantization_calibration_method", "weight_quantization_calibration_method",
      "act_quantization_calibration_method", "static", "quantization_local_shard_count",
      "constant_bound_config", "quant_cfg_path", "quantize_router_proj",
      "quantize_logits_proj", "quantize_mtp"),
     (*TRAINS, "quantize", "generate", "eval", "report")),
    (("group_size",), ("quantize", "generate", "eval", "report", "export")),
    (("mesh",), (*TRAINS, "quantize", "generate", "eval", "report")),
    (("replicate_quant_scale",), ("generate", "eval", "report")),
    (("algorithm", "calibration_batches", "save_quantized_params_path"), ("quantize",)),
    (("format", "export_path"), ("export",)),
)  # fmt: skip


def check_verb(verb: str, names: Collection[str]) -> None:
    """Raises UsageError if a verb would ignore one of the keys that it was given."""
    for keys, verbs in USED_BY:
        ignored = [name for name in keys if name in names]
        require(
            verb in (*TRAINS, *verbs) or not ignored,
            f"{' and '.join(ignored)} mean{'s' * (len(ignored) == 1)} nothing to `midtread "
            f"{verb}`: {', '.join(verbs)} use{'s' * (len(verbs) == 1)} "
            f"{'it' if len(ignored) == 1 else 'them'}. Drop "
            f"{'it' if len(ignored) == 1 else 'them'}.",
        )


# --- the model --------------------------------------------------------------------------------


def check_model(model: "Model") -> None:
    """Raises UsageError if keys of a model contradict each other."""
    _check_parts(model, PARTS)
    _check_heads(model)
    _check_windows(model)
    _check_latent_attention(model)
    _check_experts(model)


def _check_heads(model: "Model") -> None:
    require(
        model.num_query_heads % model.num_kv_heads == 0,
        f"num_query_heads={model.num_query_heads} is not a multiple of "
        f"num_kv_heads={model.num_kv_heads}.",
    )
    for name in ("head_dim", "qk_rope_head_dim"):
        require(
            getattr(model, name) % 2 == 0,
            f"{name}={getattr(model, name)} is odd: the rotary embedding turns pairs.",
        )
    require(
        int(model.head_dim * model.partial_rotary_factor) % 2 == 0,
        f"partial_rotary_factor={model.partial_rotary_factor} turns "
        f"{int(model.head_dim * model.partial_rotary_factor)} of head_dim="
        f"{model.head_dim}: the rotary embedding turns pairs.",
    )


def _check_windows(model: "Model") -> None:
    pattern, window = model.layer_pattern, model.sliding_window_size
    require(
        set(pattern) <= {"L", "G"},
        f"layer_pattern={pattern} should be made of L (window) and G (none).",
    )
    require(
        window or "L" not in pattern,
        f"layer_pattern={pattern} has layers with a window: give sliding_window_size.",
    )
    require(
        window or not model.local_rope_max_timescale,
        "local_rope_max_timescale is for layers with a window: give "
        "sliding_window_size.",
    )
    require(
        not window or any(model.has_window),
        f"sliding_window_size={window} is used by no layer with layer_pattern="
        f"{pattern}: write an L in it, or drop one.",
    )
    require(
        not window or not model.mtp_num_layers,
        f"sliding_window_size={window} with mtp_num_layers={model.mtp_num_layers}: the "
        "layers that predict further ahead have no window. Drop one.",
    )


def _check_latent_attention(model: "Model") -> None:
    if model.attention_type != "mla":
        return
    for name in NOT_MLA:
        require(
            is_default(model, name),
            f"{name}={getattr(model, name)} means nothing with attention_type=mla: "
            "drop it, or write attention_type=gqa.",
        )


def _check_experts(model: "Model") -> None:
    require(
        model.num_experts_per_tok <= model.num_experts,
        f"num_experts_per_tok={model.num_experts_per_tok} is more than "
        f"num_experts={model.num_experts}.",
    )
    require(
        model.first_num_dense_layers <= model.num_decoder_layers,
        f"first_num_dense_layers={model.first_num_dense_layers} is more than "
        f"num_decoder_layers={model.num_decoder_layers}.",
    )
    groups = model.n_routing_groups
    require(
        model.num_experts % groups == 0,
        f"n_routing_groups={groups} does not divide num_experts={model.num_experts}.",
    )
    require(
        model.topk_routing_group <= groups,
        f"topk_routing_group={model.topk_routing_group} is more than "
        f"n_routing_groups={groups}.",
    )
    open_to_a_token = model.num_experts // groups * model.topk_routing_group
    require(
        model.num_experts_per_tok <= open_to_a_token,
        f"num_experts_per_tok={model.num_experts_per_tok}, but topk_routing_group="
        f"{model.topk_routing_group} leaves {open_to_a_token} experts to choose from.",
    )


# --- everything else --------------------------------------------------------------------------


def check_config(config: "Config") -> None:
    """Raises UsageError if keys that are not the model's alone contradict each other."""
    parts = config.gradient_accumulation_steps
    require(
        config.batch_size % parts == 0,
        f"gradient_accumulation_steps={parts} does not divide "
        f"batch_size={config.batch_size}.",
    )
    if config.dataset_type in ("text", "jsonl", "parquet"):
        require(
            config.dataset_path,
            f"dataset_type={config.dataset_type} needs dataset_path: a file, a folder "
            "or a glob.",
        )
    _check_parts(config, OPTIONS)
    _check_run(config)
    _check_data(config)
    _check_optimizer(config)
    require(
        "quant" not in config.remat_policy or config.quant or config.quantization,
        f"remat_policy={config.remat_policy} keeps the codes that matmuls multiply, and "
        "nothing is quantized: write quantization=fp8_full or another, or "
        "remat_policy=minimal.",
    )
    require(
        not (config.quant and config.quantization),
        f"quant (rules of your own) and quantization={config.quantization} are both "
        "given: drop one.",
    )
    require(
        not (config.mlp_bias and config.expert_dispatch != "xla"),
        f"expert_dispatch={config.expert_dispatch} has no place for experts' biases "
        "(mlp_bias): write expert_dispatch=xla.",
    )
    require(
        (config.weight_sparsity_n is None) == (config.weight_sparsity_m is None),
        "weight_sparsity_n and weight_sparsity_m go together.",
    )


def _check_run(config: "Config") -> None:
    name = config.run_name
    path = pathlib.PurePath(name)
    require(
        name and not path.is_absolute() and ".." not in path.parts,
        f"run_name={name} is no folder inside base_output_directory="
        f"{config.base_output_directory}: write a name, and base_output_directory=<folder> "
        "for another place.",
    )
    require(config.prompt, "prompt=[] has no beginning: write prompt=<text>.")


def _check_data(config: "Config") -> None:
    """Refuses keys that this kind of data or tokenizer would ignore."""
    for name in LOCAL:
        given = getattr(config, name)
        require(
            "://" not in given,
            f"{name}={given} is not a path of this machine: mount the bucket, and "
            "give the path it has here.",
        )
    path, kind = config.tokenizer_path, config.tokenizer_type
    require(path or kind == "byte", f"tokenizer_type={kind} needs tokenizer_path.")
    require(
        not path or kind != "byte",
        f"tokenizer_path={path} means nothing with tokenizer_type=byte: write "
        "tokenizer_type=huggingface or sentencepiece.",
    )
    for name, kinds in READS.items():
        given = getattr(config, name)
        require(
            is_default(config, name) or config.dataset_type in kinds,
            f"{name}={given} means nothing with dataset_type={config.dataset_type}: it "
            f"is for {', '.join(kinds)}.",
        )


def _check_optimizer(config: "Config") -> None:
    require(
        config.weight_rounding == "nearest" or config.weight_dtype == "bfloat16",
        f"weight_rounding={config.weight_rounding} means nothing with weight_dtype="
        f"{config.weight_dtype}, whose steps are not rounded: write "
        "weight_dtype=bfloat16, or drop it.",
    )
    require(
        not config.quantize_embedding_states or config.optimizer_states != "float32",
        "quantize_embedding_states=true means nothing with optimizer_states=float32: "
        "write optimizer_states=int8, fp8 or int4.",
    )
    require(
        config.opt_type != "adafactor" or is_default(config, "adam_b2"),
        f"adam_b2={config.adam_b2} means nothing with opt_type=adafactor, whose second "
        "moments decay by the step: drop it, or write opt_type=adamw.",
    )
    require(
        config.opt_type != "adafactor"
        or config.optimizer_states == "float32"
        or config.adam_b1,
        f"optimizer_states={config.optimizer_states} means nothing with adam_b1=0 and "
        "opt_type=adafactor, which then has no moments: drop one.",
    )
