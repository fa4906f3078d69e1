"""Architectures: what Hugging Face folders can hold, as keys and names of our own model.

One table of names leads from the arrays of `lm/model.py` to those of a folder, and one row
per architecture says what is different in it:

    model_type     as config.json has it
    keys           what our model's keys are in every model of the kind
    also           keys that are read from config.json besides those that all have; a name
                   that changed is written as both: "new|old"
    only           entries of config.json that must have one of these values
    names          arrays with other names than in `NAMES`, and tensors that hold several

`table(m, kind)` makes the rows that `interop/huggingface.py` reads and writes weights by: a
row for every array that the model really has, so a bias is read where the model has one, and
refused where not. What config.json says as keys of ours is lm/config_json.py. Adding an
architecture is adding a row, when the model can do it.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

import flax
import jax
from flax import nnx

from midtread.interop.huggingface import Row
from midtread.lm import model as models
from midtread.lm.config import Model
from midtread.lm.usage import UsageError, require

# --- names ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Part:
    """Some of a tensor that several arrays share: the slice of its axis `axis`."""

    name: str
    rows: Callable[[Model], slice]
    axis: int = 0


ATTENTION = "model.layers.{layer}.self_attn"
MLP = "model.layers.{layer}.mlp"
EXPERT = f"{MLP}.experts.{{expert}}"
NORM = "model.layers.{layer}"
# our array, inside a layer or outside -> the tensor; those that a model lacks do not count
Name = str | Part | Callable[[Model], str]
NAMES: dict[str, Name] = {
    "token_embedder/embedding": "model.embed_tokens.weight",
    "decoder/decoder_norm/scale": "model.norm.weight",
    "decoder/logits_dense/kernel": "lm_head.weight",
    "pre_self_attention_layer_norm/scale": f"{NORM}.input_layernorm.weight",
    "post_self_attention_layer_norm/scale": f"{NORM}.post_attention_layernorm.weight",
    "self_attention/query/kernel": f"{ATTENTION}.q_proj.weight",
    "self_attention/key/kernel": f"{ATTENTION}.k_proj.weight",
    "self_attention/value/kernel": f"{ATTENTION}.v_proj.weight",
    "self_attention/out/kernel": f"{ATTENTION}.o_proj.weight",
    "self_attention/query/bias": f"{ATTENTION}.q_proj.bias",
    "self_attention/key/bias": f"{ATTENTION}.k_proj.bias",
    "self_attention/value/bias": f"{ATTENTION}.v_proj.bias",
    "self_attention/out/bias": f"{ATTENTION}.o_proj.bias",
    "self_attention/query_norm/scale": f"{ATTENTION}.q_norm.weight",
    "self_attention/key_norm/scale": f"{ATTENTION}.k_norm.weight",
    "self_attention/sinks": f"{ATTENTION}.sinks",
    "mlp/wi_0/kernel": f"{MLP}.gate_proj.weight",
    "mlp/wi_1/kernel": f"{MLP}.up_proj.weight",
    "mlp/wo/kernel": f"{MLP}.down_proj.weight",
    "mlp/wi_0/bias": f"{MLP}.gate_proj.bias",
    "mlp/wi_1/bias": f"{MLP}.up_proj.bias",
    "mlp/wo/bias": f"{MLP}.down_proj.bias",
    "MoeBlock_0/gate/kernel": f"{MLP}.gate.weight",
    "MoeBlock_0/wi_0": f"{EXPERT}.gate_proj.weight",
    "MoeBlock_0/wi_1": f"{EXPERT}.up_proj.weight",
    "MoeBlock_0/wo": f"{EXPERT}.down_proj.weight",
}

POST_NORMS = {  # Gemma: four norms to a layer
    "post_attention_norm/scale": f"{NORM}.post_attention_layernorm.weight",
    "post_self_attention_layer_norm/scale": f"{NORM}.pre_feedforward_layernorm.weight",
    "post_mlp_norm/scale": f"{NORM}.post_feedforward_layernorm.weight",
}
SPARSE = "model.layers.{layer}.block_sparse_moe"
MIXTRAL = {
    "MoeBlock_0/gate/kernel": f"{SPARSE}.gate.weight",
    "MoeBlock_0/wi_0": f"{SPARSE}.experts.{{expert}}.w1.weight",
    "MoeBlock_0/wi_1": f"{SPARSE}.experts.{{expert}}.w3.weight",
    "MoeBlock_0/wo": f"{SPARSE}.experts.{{expert}}.w2.weight",
}


def _of_qkv(number: int) -> Callable[[Model], slice]:
    """Returns queries, keys or values (0, 1, 2) among the rows of all three."""

    def rows(m: Model) -> slice:
        widths = (m.num_query_heads, m.num_kv_heads, m.num_kv_heads)
        ends = [sum(widths[:i]) * m.head_dim for i in range(4)]
        return slice(ends[number], ends[number + 1])

    return rows


FUSED = {  # Phi-3
    "self_attention/query/kernel": Part(f"{ATTENTION}.qkv_proj.weight", _of_qkv(0)),
    "self_attention/key/kernel": Part(f"{ATTENTION}.qkv_proj.weight", _of_qkv(1)),
    "self_attention/value/kernel": Part(f"{ATTENTION}.qkv_proj.weight", _of_qkv(2)),
    "mlp/wi_0/kernel": Part(
        f"{MLP}.gate_up_proj.weight", lambda m: slice(0, m.mlp_dim)
    ),
    "mlp/wi_1/kernel": Part(
        f"{MLP}.gate_up_proj.weight", lambda m: slice(m.mlp_dim, 2 * m.mlp_dim)
    ),
}
SHARED = f"{MLP}.shared_experts"
LATENT = {  # DeepSeek
    "self_attention/wq_a/kernel": f"{ATTENTION}.q_a_proj.weight",
    "self_attention/q_norm/scale": f"{ATTENTION}.q_a_layernorm.weight",
    "self_attention/wq_b/kernel": lambda m: (
        f"{ATTENTION}.q_{'b_' if m.q_lora_rank else ''}proj.weight"
    ),
    "self_attention/wkv_a/kernel": f"{ATTENTION}.kv_a_proj_with_mqa.weight",
    "self_attention/kv_norm/scale": f"{ATTENTION}.kv_a_layernorm.weight",
    "self_attention/wkv_b/kernel": f"{ATTENTION}.kv_b_proj.weight",
    "MoeBlock_0/routed_bias": f"{MLP}.gate.e_score_correction_bias",
    "shared_experts/wi_0/kernel": f"{SHARED}.gate_proj.weight",
    "shared_experts/wi_1/kernel": f"{SHARED}.up_proj.weight",
    "shared_experts/wo/kernel": f"{SHARED}.down_proj.weight",
}
_even, _odd = (lambda m: slice(0, None, 2)), (lambda m: slice(1, None, 2))
GPT_OSS = {  # gate and up take turns, and experts lie as [in, out] already
    "MoeBlock_0/gate/kernel": f"{MLP}.router.weight",
    "MoeBlock_0/gate/bias": f"{MLP}.router.bias",
    "MoeBlock_0/wi_0": Part(f"{MLP}.experts.gate_up_proj", _even, axis=2),
    "MoeBlock_0/wi_1": Part(f"{MLP}.experts.gate_up_proj", _odd, axis=2),
    "MoeBlock_0/wi_0_bias": Part(f"{MLP}.experts.gate_up_proj_bias", _even, axis=1),
    "MoeBlock_0/wi_1_bias": Part(f"{MLP}.experts.gate_up_proj_bias", _odd, axis=1),
    "MoeBlock_0/wo": f"{MLP}.experts.down_proj",
    "MoeBlock_0/wo_bias": f"{MLP}.experts.down_proj_bias",
}


# --- the table --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One kind of model; see the top of this file."""

    model_type: str
    models: str  # of that kind, in words
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    also: Mapping[str, tuple[str, Any]] = dataclasses.field(default_factory=dict)
    only: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    names: Mapping[str, Name] = dataclasses.field(default_factory=dict)
    is_tied: bool = False  # tie_word_embeddings, where config.json does not say
    base: float = 10000.0  # rope_theta, likewise
    act: str = "hidden_act"  # what config.json calls the activation
    windows: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    class_name: str = ""
    bias: bool = False  # attention_bias, where config.json does not say
    local_base: float | None = (
        None  # rope_theta of layers with a window; None: the same
    )
    rope_kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)  # old names
    can_turn_part: bool = False  # whether transformers reads partial_rotary_factor

    def __str__(self) -> str:
        return f"{self.model_type} ({self.models})"


# what every config.json has -> our key, and its default there (None: it must be given)
COMMON = {
    "vocab_size": ("vocab_size", None),
    "hidden_size": ("emb_dim", None),
    "num_hidden_layers": ("num_decoder_layers", None),
    "num_attention_heads": ("num_query_heads", None),
    "rms_norm_eps": ("normalization_layer_epsilon", 1e-6),
}
MOST = 10_000  # layers, heads, experts: more is no model
DENSE = {"intermediate_size": ("mlp_dim", None)}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}


def _everywhere(config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads Mistral's windows: one in all layers, or none."""
    return {"sliding_window_size": config.get("sliding_window") or 0}


def _alternating(period: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Reads the windows of Gemma and gpt-oss: every so many layers one sees all, unless
    layer_types say which."""

    def windows(config: Mapping[str, Any]) -> dict[str, Any]:
        every = config.get("sliding_window_pattern") or period
        count = config["num_hidden_layers"]
        kinds = config.get("layer_types") or [
            "sliding_attention" if (i + 1) % every else "full_attention"
            for i in range(count)
        ]
        return _window(config, kinds)

    return windows


def _from_some_layer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads Qwen's windows: none unless asked for; then from max_window_layers on."""
    if not config.get("use_sliding_window"):
        return {}
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention"
        for i in range(config["num_hidden_layers"])
    ]
    return _window(config, kinds)


def _window(config: Mapping[str, Any], kinds: Any) -> dict[str, Any]:
    letters = {"sliding_attention": "L", "full_attention": "G"}
    count = config["num_hidden_layers"]
    right = isinstance(kinds, list) and len(kinds) == count
    require(
        right and all(isinstance(k, str) and k in letters for k in kinds),
        f"config.json: layer_types should have sliding_attention or full_attention for "
        f"each of {count} layers, not {kinds!r:.80}.",
    )
    pattern = "".join(letters[k] for k in kinds)
    size = config.get("sliding_window") or 0
    if "L" not in pattern or not size:
        return {}
    pattern = _shortest(pattern)
    return {
        "sliding_window_size": size,
        "layer_pattern": "" if pattern == "L" else pattern,
    }


def _shortest(pattern: str) -> str:
    """Returns the beginning of which a pattern is a repetition.

    >>> _shortest("LLGLLGLL")
    'LLG'
    """
    count = len(pattern)
    for size in range(1, count + 1):
        if all(pattern[i] == pattern[i % size] for i in range(count)):
            return pattern[:size]
    return pattern


LLAMA_LIKE: dict[str, Any] = {"embedding_gain": 1.0}
EXPERTS = {
    "num_experts_per_tok": ("num_experts_per_tok", None),
    "norm_topk_prob": ("norm_topk_prob", False),
}
GEMMA: dict[str, Any] = {
    "norm_scale_offset": True,
    "norm_placement": "both",
}
GEMMA_ALSO = {
    **DENSE,
    "query_pre_attn_scalar": ("query_pre_attn_scalar", 256.0),
    "final_logit_softcapping": ("final_logits_soft_cap", 0.0),
    "attn_logit_softcapping": ("attn_logits_soft_cap", 0.0),
}
NO_BIAS = {"attention_bias": (False,)}

ARCHITECTURES = [
    Architecture(
        "llama", "Llama 2, 3, 3.1, 3.2, SmolLM2",
        keys=LLAMA_LIKE,
        also={**DENSE, "mlp_bias": ("mlp_bias", False)},
        class_name="LlamaForCausalLM",
    ),
    Architecture(
        "mistral", "Mistral 7B",
        keys=LLAMA_LIKE, also=DENSE, windows=_everywhere,
        class_name="MistralForCausalLM",
    ),
    Architecture(
        "mixtral", "Mixtral 8x7B",
        keys=LLAMA_LIKE,
        also={
            "num_experts_per_tok": ("num_experts_per_tok", 2),
            "num_local_experts": ("num_experts", 8),
            "intermediate_size": ("moe_mlp_dim", None),
        },
        names=MIXTRAL, windows=_everywhere, class_name="MixtralForCausalLM",
    ),
    Architecture(
        "qwen2", "Qwen2, Qwen2.5",
        keys={**LLAMA_LIKE, "attention_bias": "qkv"}, also=DENSE,
        windows=_from_some_layer, class_name="Qwen2ForCausalLM",
    ),
    Architecture(
        "qwen3", "Qwen3",
        keys={**LLAMA_LIKE, "use_qk_norm": True}, also=DENSE,
        windows=_from_some_layer, class_name="Qwen3ForCausalLM",
    ),
    Architecture(
        "qwen3_moe", "Qwen3-MoE",
        keys={**LLAMA_LIKE, "use_qk_norm": True},
        also={
            **EXPERTS,
            "num_experts|num_local_experts": ("num_experts", 128),
            "moe_intermediate_size": ("moe_mlp_dim", None),
        },
        only={"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
        windows=lambda config: (
            _everywhere(config) if config.get("use_sliding_window") else {}
        ),
        class_name="Qwen3MoeForCausalLM",
    ),
    Architecture(
        "gemma2", "Gemma 2",
        keys=GEMMA,
        also={
            **GEMMA_ALSO,
            "final_logit_softcapping": ("final_logits_soft_cap", 30.0),
            "attn_logit_softcapping": ("attn_logits_soft_cap", 50.0),
        },
        only=NO_BIAS, names=POST_NORMS, is_tied=True, act="hidden_activation",
        windows=_alternating(2), class_name="Gemma2ForCausalLM",
    ),
    Architecture(
        "gemma3_text", "Gemma 3, text",
        keys={**GEMMA, "use_qk_norm": True},
        also=GEMMA_ALSO,
        only={**NO_BIAS, "use_bidirectional_attention": (False,)},
        names=POST_NORMS, is_tied=True, base=1e6, act="hidden_activation",
        windows=_alternating(6), class_name="Gemma3ForCausalLM", local_base=10000.0,
    ),
    Architecture(
        "phi3", "Phi-3, Phi-3.5, Phi-4",
        keys=LLAMA_LIKE, also=DENSE, only=NO_BIAS, names=FUSED, windows=_everywhere,
        class_name="Phi3ForCausalLM", can_turn_part=True,
        rope_kinds={"su": "longrope", "yarn": "longrope"},
    ),
    Architecture(
        "olmo2", "OLMo 2",
        keys={
            **LLAMA_LIKE,
            "use_qk_norm": True,
            "qk_norm_scope": "all",
            "norm_placement": "post",
        },
        also=DENSE, names=POST_NORMS, class_name="Olmo2ForCausalLM",
    ),
    Architecture(
        "deepseek_v3", "DeepSeek-V3, R1",
        keys={
            **LLAMA_LIKE,
            "attention_type": "mla",
            "routed_score_func": "sigmoid",
        },
        also={
            **DENSE,
            "q_lora_rank": ("q_lora_rank", 0),
            "kv_lora_rank": ("kv_lora_rank", None),
            "qk_nope_head_dim": ("qk_nope_head_dim", None),
            "qk_rope_head_dim": ("qk_rope_head_dim", None),
            "v_head_dim": ("v_head_dim", None),
            "n_routed_experts": ("num_experts", None),
            "num_experts_per_tok": ("num_experts_per_tok", None),
            "moe_intermediate_size": ("moe_mlp_dim", None),
            "n_shared_experts": ("shared_experts", 0),
            "first_k_dense_replace": ("first_num_dense_layers", 0),
            "routed_scaling_factor": ("routed_scaling_factor", 1.0),
            "n_group": ("n_routing_groups", 1),
            "topk_group": ("topk_routing_group", 1),
            "norm_topk_prob": ("norm_topk_prob", True),
            "rope_interleave": ("rope_interleave", True),
        },
        only={
            **NO_BIAS,
            "moe_layer_freq": (1,),
            "rms_norm_eps": (1e-6,),  # its latent norms have that, whatever others have
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
        },
        names=LATENT, class_name="DeepseekV3ForCausalLM",
    ),
    Architecture(
        "gpt_oss", "gpt-oss 20b and 120b",
        keys={
            **LLAMA_LIKE,
            "attention_sink": True,
            "mlp_activation": "clipped_silu",
            "mlp_bias": True,
        },
        also={
            "num_local_experts": ("num_experts", 128),
            "num_experts_per_tok": ("num_experts_per_tok", 4),
            "intermediate_size": ("moe_mlp_dim", None),
        },
        only={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        names=GPT_OSS, windows=_alternating(2), base=150000.0, bias=True,
        class_name="GptOssForCausalLM",
    ),
]  # fmt: skip
BY_TYPE = {a.model_type: a for a in ARCHITECTURES}
# tensors that may be there and say nothing new
IGNORED = (r".*\.rotary_emb\.inv_freq", r".*\.attention\.(masked_)?bias")


def architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """Returns the row of a config.json, or a refusal that names the nearest one."""
    kind = config.get("model_type")
    require(
        isinstance(kind, str),
        f"{where}: config.json has no model_type, which says what kind of model it is.",
    )
    assert isinstance(kind, str)
    if kind in BY_TYPE:
        return BY_TYPE[kind]
    begins = [k for k in BY_TYPE if k.startswith(kind) or kind.startswith(k)]
    near = begins[:1] or difflib.get_close_matches(kind, [*BY_TYPE], 1, 0.5)
    known = ", ".join(map(str, ARCHITECTURES))
    hint = f"The nearest is {BY_TYPE[near[0]]}." if near else f"There are: {known}."
    raise UsageError(
        f"{where}: model_type={kind!r:.60} is not among the architectures that can be read. "
        f"{hint}"
    )


# --- names as rows ----------------------------------------------------------------------------


def table(m: Model, arch: Architecture) -> list[Row]:
    """Returns a row for every array of the model.

    Raises:
        UsageError: the model has an array that this architecture has no tensor for.
    """
    named = {**NAMES, **arch.names}
    rows = []
    for path in shapes(m):
        inner, layers = _inside_layer(m, path)
        name = named.get(inner)
        name = name(m) if callable(name) else name
        require(
            name is not None,
            f"{path} has no name in {arch}: the model is not one of that architecture.",
        )
        counts: dict[str, range] = {}
        part = name if isinstance(name, Part) else None
        text = part.name if part else name
        assert isinstance(text, str)
        if isinstance(layers, range):
            counts["layer"] = layers
        elif layers is not None:
            text = text.replace("{layer}", str(layers))
        if "{expert}" in text:
            counts["expert"] = range(m.num_experts)
        is_expert = inner.split("/")[-1] in ("wi_0", "wi_1", "wo")
        turned = inner.endswith("kernel") or (is_expert and "{expert}" in text)
        cut = {"part": part.rows(m), "axis": part.axis} if part else {}
        rows.append(Row(text, path, counts, turned, **cut))
    return rows


def shapes(m: Model) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns every array of the model by its path, as shapes."""
    params = nnx.to_pure_dict(nnx.state(models.abstract(m), nnx.Param))
    flat = flax.traverse_util.flatten_dict(params)
    return {"/".join(map(str, path)): x for path, x in flat.items()}


def _inside_layer(m: Model, path: str) -> tuple[str, range | int | None]:
    """Returns a path as it is inside a layer, and the layers (one, or all of a stack) it is
    of."""
    parts = path.split("/")
    first = m.first_num_dense_layers if m.num_experts > 1 else 0
    ranges = {
        "layers": range(m.num_decoder_layers),
        "dense_layers": range(first),
        "moe_layers": range(first, m.num_decoder_layers),
    }
    if parts[0] != "decoder" or parts[1] not in ranges:
        return path, None
    layers = ranges[parts[1]]
    if m.scan_layers:
        return "/".join(parts[2:]), layers
    return "/".join(parts[3:]), layers[int(parts[2])]
