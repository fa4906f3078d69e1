"""Config: every key there is, with its meaning, its default and its limits.

Keys are flat (`steps=300`), and each belongs to one section, a record of its own, so that
a model can be built from `Model(...)` by someone who has no files or data:

    Config = Run + Data + Model + Training + Quantization + Decoding + Sharding

The records are frozen and check themselves: a value out of range, or two keys that cannot
go together (contradictions.py), is a `UsageError` that names them. Reading files and command
lines is `lm/settings.py`; this file needs the standard library alone. Names are MaxText's
where it has the key (docs/from-maxtext.md).
"""

import dataclasses
import functools
import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

from midtread.lm import contradictions
from midtread.lm.usage import UsageError, require  # noqa: F401  what a config raises


def key(
    default: Any, meaning: str, at_least=None, above=None, at_most=None, below=None
) -> Any:
    """Declares a key: its default, what it means, and the numbers it may be."""
    limits = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    metadata = {
        "meaning": meaning,
        **{k: v for k, v in limits.items() if v is not None},
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """the run: where it is kept and what it prints"""

    model_name: str = key(
        "", "a shipped config to start from: llama3-8b, deepseek-v3 ..."
    )
    run_name: str = key("run", "folder of this run inside base_output_directory")
    base_output_directory: str = key("runs", "where runs are kept")
    overwrite: bool = key(False, "start over in a folder that holds another run")
    seed: int = key(
        0, "of weights, data order and stochastic rounding", at_least=0, below=2**63
    )
    enable_tensorboard: bool = key(False, "also write TensorBoard event files")
    jax_cache_dir: str = key(
        "~/.cache/midtread/jax",
        "where the command line keeps compiled programs; '': nowhere",
    )
    check_memory: bool = key(
        True, "train, bench, generate: refuse what needs more memory than a device has"
    )


DATASETS = Literal["corpus", "synthetic", "text", "jsonl", "parquet", "hf", "tfds"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """the data"""

    dataset_type: DATASETS = key(  # noqa: RUF009
        "corpus",
        "corpus: the source code of Python's standard library; synthetic: one random "
        "batch, repeated; text, jsonl, parquet: files; hf, tfds: those libraries",
    )
    dataset_path: str = key(
        "", "file, folder or glob (files), folder or name (hf, tfds)"
    )
    dataset_name: str = key("", "hf: its configuration; tfds: 'c4/en:3.1.0'")
    text_field: str = key("text", "jsonl, parquet, hf, tfds: which field is the text")
    tokenizer_type: Literal["byte", "huggingface", "sentencepiece"] = key(
        "byte", "byte: 256 bytes and an end mark; else a file, tokenizer_path"
    )
    tokenizer_path: str = key("", "tokenizer.json or a sentencepiece .model")
    dataset_memory_mb: int = key(
        512,
        "text, jsonl, parquet: files of more are read as they are needed",
        at_least=0,
    )
    grain_worker_count: int = key(
        0, "processes that make batches; 0: a thread of this one", at_least=0
    )
    packing: bool = key(
        True, "several documents to a row, none seeing the others; else one, padded"
    )


ATTENTION = Literal["auto", "plain", "blockwise", "flash", "cudnn", "tokamax"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """the model"""

    vocab_size: int = key(264, "rows of the embedding", at_least=2)
    max_target_length: int = key(128, "tokens to a row", at_least=2)
    emb_dim: int = key(128, "width of the residual stream", at_least=1)
    num_decoder_layers: int = key(4, "layers", at_least=1)
    num_query_heads: int = key(4, "attention heads", at_least=1)
    num_kv_heads: int = key(2, "heads of keys and values (GQA)", at_least=1)
    head_dim: int = key(32, "width of a head", at_least=2)
    mlp_dim: int = key(384, "inner width of the MLP", at_least=1)
    rope_max_timescale: float = key(10000.0, "base of the rotary embedding", above=1)
    rope_scaling: str = key(
        "", "for longer texts than pretraining's: 'yarn,factor:40,...' or 'llama3,...'"
    )
    partial_rotary_factor: float = key(
        1.0, "share of a head that the rotary embedding turns", above=0, at_most=1
    )
    rope_interleave: bool = key(
        False, "pairs are neighbours, not halves of a head (DeepSeek)"
    )
    local_rope_max_timescale: float = key(
        0.0, "base in layers with a window, not stretched; 0: as in others", at_least=0
    )
    normalization_layer_epsilon: float = key(1e-6, "inside RMSNorm", above=0)
    norm_scale_offset: bool = key(False, "RMSNorm multiplies by 1 + scale (Gemma)")
    norm_placement: Literal["pre", "post", "both"] = key(
        "pre", "norms before attention and MLP, after (OLMo 2), or both (Gemma 2)"
    )
    use_qk_norm: bool = key(False, "RMSNorm of queries and keys")
    qk_norm_scope: Literal["head", "all"] = key(
        "head", "of every head by itself (Qwen3), or of all together (OLMo 2)"
    )
    embedding_gain: float | None = key(
        None, "times an embedded token; unset: sqrt(emb_dim)", above=0
    )
    logits_via_embedding: bool = key(True, "the head is the embedding, transposed")
    final_logits_soft_cap: float = key(
        0.0, "c: logits are c tanh(logit / c); 0: as they are", at_least=0
    )
    attn_logits_soft_cap: float = key(0.0, "the same, inside attention", at_least=0)
    query_pre_attn_scalar: float | None = key(
        None, "attention's logits over its root; unset: width of a head", above=0
    )
    attention_bias: Literal["none", "qkv", "all"] = key(
        "none", "projections with a bias: queries, keys, values (Qwen2); and the output"
    )
    attention_sink: bool = key(
        False, "every head has a logit that takes weight and gives nothing (gpt-oss)"
    )
    sliding_window_size: int = key(
        0, "tokens that a layer looks back on, itself included; 0: all", at_least=0
    )
    layer_pattern: str = key(
        "", "layers with the window, repeated: 'LLLLLG', L with, G without; '': all"
    )
    mlp_activation: Literal["silu", "gelu", "clipped_silu"] = key(
        "silu", "of the gate; gelu: by tanh (Gemma); clipped_silu: gpt-oss's"
    )
    mlp_bias: bool = key(False, "MLPs, experts and router have biases")
    attention_type: Literal["gqa", "mla"] = key(
        "gqa", "mla: DeepSeek's latent attention"
    )
    attention: ATTENTION = key(  # noqa: RUF009
        "auto", "how attention is computed; auto: the first that can (lm/attend.py)"
    )
    q_lora_rank: int = key(0, "mla: rank of queries; 0: no bottleneck", at_least=0)
    kv_lora_rank: int = key(64, "mla: rank of the latent that is cached", at_least=1)
    qk_nope_head_dim: int = key(32, "mla: width of a head without position", at_least=1)
    qk_rope_head_dim: int = key(16, "mla: width of a head with position", at_least=2)
    v_head_dim: int = key(32, "mla: width of a value head", at_least=1)
    num_experts: int = key(1, "routed experts; 1: a dense MLP", at_least=1)
    num_experts_per_tok: int = key(1, "experts that see a token", at_least=1)
    moe_mlp_dim: int = key(128, "inner width of one expert", at_least=1)
    shared_experts: int = key(0, "experts that see every token", at_least=0)
    first_num_dense_layers: int = key(0, "layers before the first MoE one", at_least=0)
    routed_score_func: Literal["softmax", "sigmoid"] = key(
        "softmax", "router's scores; sigmoid has a bias for choosing (DeepSeek-V3)"
    )
    norm_topk_prob: bool = key(
        True, "weights of a token's experts are made to sum to 1"
    )
    routed_scaling_factor: float = key(1.0, "times the weights of experts", above=0)
    n_routing_groups: int = key(1, "groups of experts (DeepSeek-V3: 8)", at_least=1)
    topk_routing_group: int = key(1, "groups a token may choose from", at_least=1)
    load_balance_loss_weight: float = key(0.01, "of the router's own loss", at_least=0)
    mtp_num_layers: int = key(0, "heads that predict further ahead", at_least=0)
    mtp_loss_scaling_factor: float = key(0.1, "weight of their loss", at_least=0)
    scan_layers: bool = key(True, "one trace for all layers; weights are stacked")
    scan_unroll: int = key(
        0,
        "layers of a scan that are compiled one by one: XLA copies less, and takes longer; 0: "
        "on a GPU all of up to 8, else 1",
        at_least=0,
    )
    remat_policy: Literal[
        "auto", "none", "full", "minimal", "minimal_with_quantization", "quantized"
    ] = key(
        "auto",
        "recompute in the backward: as little as the device has room for, nothing, all, all "
        "but results of matmuls, all but these and the codes that matmuls multiply, or all "
        "but the codes",
    )
    dtype: Literal["bfloat16", "float32"] = key("bfloat16", "computes in this")
    weight_dtype: Literal["float32", "bfloat16"] = key(
        "float32", "keeps weights in this"
    )

    def __post_init__(self):
        check_limits(self)
        contradictions.check_model(self)

    @property
    def has_window(self) -> tuple[bool, ...]:
        """Whether each layer has a window."""
        pattern = self.layer_pattern or ("L" if self.sliding_window_size else "G")
        return tuple(
            pattern[i % len(pattern)] == "L" for i in range(self.num_decoder_layers)
        )

    @property
    def keeps_all(self) -> bool:
        """Whether the backward recomputes nothing; `auto` does so until room.settle has put
        another policy in its place."""
        return self.remat_policy in ("auto", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """training"""

    steps: int = key(300, "optimizer steps", at_least=1)
    batch_size: int = key(16, "rows per step, over all devices", at_least=1)
    gradient_accumulation_steps: int = key(1, "parts a batch is cut into", at_least=1)
    learning_rate: float = key(3e-3, "at its peak", above=0)
    warmup_steps_fraction: float = key(0.1, "of the steps", at_least=0, at_most=1)
    learning_rate_final_fraction: float = key(
        0.1, "of the peak, reached on a cosine", at_least=0, at_most=1
    )
    opt_type: Literal["adamw", "lion", "adafactor"] = key("adamw", "optimizer")
    optimizer_states: Literal["float32", "int8", "fp8", "int4"] = key(
        "float32",
        "what it keeps moments in; int4: first ones, second ones 8 bits; embeddings and "
        "small tensors float32",
    )
    quantize_embedding_states: bool = key(
        False, "moments of embeddings in optimizer_states too, not in float32"
    )
    weight_rounding: Literal["nearest", "stochastic"] = key(
        "nearest", "of a step in weight_dtype=bfloat16; stochastic: its mean is exact"
    )
    adam_b1: float = key(0.9, "of first moments", at_least=0, below=1)
    adam_b2: float = key(
        0.95, "of second moments (adamw), of lion's", at_least=0, below=1
    )
    adam_weight_decay: float = key(0.1, "of matrices", at_least=0)
    gradient_clipping_threshold: float = key(1.0, "global norm; 0: off", at_least=0)
    z_loss_multiplier: float = key(
        0.0, "times log(Z)^2, keeps logits small", at_least=0
    )
    eval_interval: int = key(
        100, "steps between evaluations; 0: at the end", at_least=0
    )
    eval_steps: int = key(8, "batches of one evaluation", at_least=1)
    target_loss: float = key(
        0.0, "report steps and seconds to this eval loss", at_least=0
    )
    enable_checkpointing: bool = key(True, "write checkpoints, and resume from them")
    async_checkpointing: bool = key(True, "write them while training goes on")
    checkpoint_period: int = key(100, "steps between checkpoints", at_least=1)
    max_num_checkpoints_to_keep: int = key(2, "the newest ones", at_least=1)
    load_parameters_path: str = key(
        "", "start from the weights of this run or checkpoint"
    )


QUANTIZATIONS = Literal[
    "", "int4", "int8", "fp4", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_full", "fp8_gpu",
    "fp8_nanoo", "int8w", "int4w", "intmp", "nanoo_fp8", "aqt_fp8", "aqt_fp8_full",
    "te_fp8_delayedscaling", "te_fp8_currentscaling", "te_mxfp8", "te_nvfp4",
    "te_nvfp4_no_rht", "te_no_quant", "serve_fp8_weight",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
    """quantization"""

    quantization: QUANTIZATIONS = key("", "what to train, quantize or serve in")  # noqa: RUF009
    use_qwix_quantization: bool | None = key(
        None, "Qwix's numerics (true) or AQT's; unset: AQT's where both have the value"
    )
    quant: tuple[dict, ...] = key(
        (),
        "rules of your own instead of `quantization`: a list, as docs/everything.md has",
    )
    quant_reach: Literal["all", "maxtext"] = key(
        "all",
        "maxtext: only the sites MaxText reaches; all: experts too, both gradients",
    )
    quantization_calibration_method: str = key("", "of weights and activations (Qwix)")
    weight_quantization_calibration_method: str = key(
        "", "absmax, minmax, fixed,-a,a ..."
    )
    act_quantization_calibration_method: str = key("", "the same, of activations")
    bwd_quantization_calibration_method: str = key("", "the same, of gradients")
    drhs_grad_quantization_calibration_method: str = key(
        "", "the same, of gradients in the weights' gradient alone"
    )
    static: Literal["", "measure", "calibrated"] = key(
        "",
        "fp8_full, ranges per axis: measure and note them, or calibrated: use those that "
        "load_parameters_path has noted",
    )
    quantization_local_shard_count: int = key(
        1, "ranges of a weight gradient; -1: one per device of this host; 0: float (AQT)",
        at_least=-1,
    )  # fmt: skip
    constant_bound_config: str = key("", "aqt_fp8_full: six bounds, comma-separated")
    quant_cfg_path: str = key("", "intmp: its JSON file, or the name of a shipped one")
    group_size: int = key(
        0,
        "quantize, export: summed elements of a weight that share a scale; 0: as the value "
        "or the format has it",
        at_least=0,
    )
    replicate_quant_scale: bool = key(
        False, "generate, eval: every device of a mesh has all scales, one per channel"
    )
    weight_sparsity_n: int | None = key(None, "fp8_full: keep n of every m weights")
    weight_sparsity_m: int | None = key(None, "fp8_full: see weight_sparsity_n")
    weight_sparsity_start_step: int = key(50, "first step that prunes", at_least=0)
    weight_sparsity_update_step: int = key(10, "steps a mask is kept", at_least=1)
    quantize_router_proj: bool = key(True, "false: the router stays in float")
    quantize_logits_proj: bool = key(False, "true: the head too")
    quantize_mtp: bool = key(False, "true: the multi-token-prediction block too")
    quantize_kvcache: bool = key(False, "generate: few bits in the KV cache")
    kv_quant_axis: Literal["dkv", "heads_and_dkv"] = key(
        "heads_and_dkv", "what shares a scale: a head of a token, or all its heads"
    )
    kv_quant_dtype: Literal["int8", "int4", "fp8"] = key("int8", "format of the cache")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """generating and quantizing"""

    prompt: tuple[str, ...] = key(("import ",), "one or more beginnings")
    use_chat_template: bool = key(
        True, "generate: prompts as the model's own template has them, if it has one"
    )
    max_new_tokens: int = key(64, "tokens to generate", at_least=1)
    temperature: float = key(0.0, "0: always the likeliest", at_least=0)
    top_k: int = key(0, "sample from the k likeliest; 0: all", at_least=0)
    top_p: float = key(
        1.0, "sample from the likeliest p of probability", above=0, at_most=1
    )
    stop: tuple[str, ...] = key(
        (),
        "words that end a text, each one token; the tokenizer's end mark always does",
    )
    decode_slots: int = key(
        32, "prompts that are continued at once; others wait for a slot", at_least=1
    )
    format: str = key(
        "hf",
        "export: hf, a float folder; w4a16, fp8, gptq, awq, mlx4, q4_k ... quantized",
    )
    export_path: str = key(
        "", "export: where to; unset: beside the run, as <run>-<format>"
    )
    algorithm: str = key(
        "", "quantize: how codes are found, gptq or correct,gptq say; unset: rounded"
    )
    calibration_batches: int = key(
        32, "quantize: batches of the training split that `algorithm` sees", at_least=1
    )
    save_quantized_params_path: str = key(
        "", "quantize: where to; unset: beside the run, as <run_name>-<quantization>"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharding:
    """more than one device"""

    mesh: str = key(
        "", "devices along data, fsdp, tensor, expert: 'data:2,fsdp:-1' (-1: the rest)"
    )
    fp8_weight_gather: bool = key(
        False, "fp8_full: weights cut along fsdp travel as 8-bit codes"
    )
    expert_dispatch: Literal["xla", "ring", "ring_fp8"] = key(
        "xla", "tokens to experts: as XLA does it, by hand, by hand as 8-bit codes"
    )
    batch_split_factor: int = key(
        1, "parts of a batch that each layer works on in turn", at_least=1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Run, Data, Model, Training, Quantization, Decoding, Sharding):
    """Every key, checked together."""

    def __post_init__(self):
        super().__post_init__()
        contradictions.check_config(self)


SECTIONS = (Run, Data, Model, Training, Quantization, Decoding, Sharding)


@functools.cache
def keys(record: type = Config) -> dict[str, dataclasses.Field]:
    """Returns every key of a section, or of all, in order."""
    return {f.name: f for part in SECTIONS if issubclass(record, part) for f in
            dataclasses.fields(part)}  # fmt: skip


def section(config: Any, part: type) -> Any:
    """Returns one section of a config, e.g. its Model."""
    return part(**{f.name: getattr(config, f.name) for f in dataclasses.fields(part)})


@functools.cache
def kind(name: str) -> str:
    """Says in words what a key takes."""
    hint = get_type_hints(Config)[name]
    if get_origin(hint) is Literal:
        return " | ".join(repr(v) if v == "" else str(v) for v in get_args(hint))
    if get_origin(hint) is tuple:
        return "list"
    names = {int: "int", float: "float", bool: "bool", str: "str", type(None): "null"}
    return " | ".join(names[t] for t in (get_args(hint) or (hint,)))


def check_limits(config: Any) -> None:
    """Refuses numbers that are out of the range of their key."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        limits = field.metadata
        if value is None or isinstance(value, bool | str | tuple):
            continue
        require(
            math.isfinite(value),
            f"{field.name}={value} is out of range: it must be a number "
            f"({limits['meaning']}).",
        )
        for bound, holds, words in (
            ("at_least", lambda v, b: v >= b, "at least"),
            ("above", lambda v, b: v > b, "above"),
            ("at_most", lambda v, b: v <= b, "at most"),
            ("below", lambda v, b: v < b, "below"),
        ):
            if bound in limits:
                require(
                    holds(value, limits[bound]),
                    f"{field.name}={value} is out of range: it must be {words} "
                    f"{limits[bound]} ({limits['meaning']}).",
                )
