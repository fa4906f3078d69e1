"""Architectures: what Hugging Face folders can hold, as keys and names of our own model.

One table of names leads from the arrays of `lm/model.py` to those of a folder, and one row
per architecture says what is different in it:

    model_type     as config.json has it
    keys           what our model's keys are in every model of the kind
    also           keys that are read from config.json besides those that all have; a name
                   that changed is written as both: "new|old"
    only           entries of config.json that must have one of these values
    names          arrays with other names than in `NAMES`, and tensors that hold several

`settings_of(config)` is a folder's config.json as keys of ours, `table(m, kind)` the rows
that `interop/huggingface.py` reads and writes weights by: a row for every array that the
model really has, so a bias is read where the model has one, and refused where not. Adding
an architecture is adding a row, when the model can do it.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax
import jax
from flax import nnx

from midtread.interop.huggingface import Row
from midtread.lm import model as models
from midtread.lm import rope
from midtread.lm.config import Model, UsageError, keys, require

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
    """Queries, keys or values (0, 1, 2) among the rows of all three."""

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
    """Mistral: a window in all layers, or none."""
    return {"sliding_window_size": config.get("sliding_window") or 0}


def _alternating(period: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Gemma, gpt-oss: every so many layers one sees all, unless layer_types say which."""

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
    """Qwen: none unless asked for; then from max_window_layers on."""
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
    """The beginning of which a pattern is a repetition.

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
        windows=_alternating(6), class_name="Gemma3ForCausalLM",
    ),
    Architecture(
        "phi3", "Phi-3, Phi-3.5, Phi-4",
        keys=LLAMA_LIKE, also=DENSE, only=NO_BIAS, names=FUSED, windows=_everywhere,
        class_name="Phi3ForCausalLM",
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
        names=GPT_OSS, windows=_alternating(2), base=150000.0,
        class_name="GptOssForCausalLM",
    ),
]  # fmt: skip
BY_TYPE = {a.model_type: a for a in ARCHITECTURES}
# tensors that may be there and say nothing new
IGNORED = (r".*\.rotary_emb\.inv_freq", r".*\.attention\.(masked_)?bias")


def architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """The row of a config.json, or a refusal that names the nearest one."""
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


# --- config.json as keys ----------------------------------------------------------------------


def settings_of(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A folder's config.json as keys of the model.

    Args:
        where: what to call the folder, in errors.

    Raises:
        UsageError: the architecture, or something in the config, is not one that the model
            can do, or it lacks what it must have.

    >>> tiny = {"model_type": "qwen2", "vocab_size": 64, "hidden_size": 32,
    ...         "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    >>> settings_of(tiny, "tiny")["attention_bias"]
    'qkv'
    """
    arch = architecture(config, where)
    read = _Reader(config, where)
    for name, allowed in arch.only.items():
        given = config.get(name)
        require(
            given is None or any(given == v and type(given) is type(v) for v in allowed)
            or (type(given) in (int, float) and given in allowed),
            f"{where}: config.json has {name}={given!r}, but {arch.models} can be read "
            f"with {' or '.join(map(repr, allowed))} alone.",
        )  # fmt: skip
    out: dict[str, Any] = dict(arch.keys)
    for name, (key, default) in {**COMMON, **arch.also}.items():
        out[key] = read(name, key, default)
    for key in ("num_decoder_layers", "num_query_heads", "num_experts"):
        count = out.get(key, 1)
        require(1 <= count <= MOST, f"{where}: config.json has {count} for {key}.")
    heads = out["num_query_heads"]
    if out.get("attention_type") != "mla":
        out["num_kv_heads"] = read("num_key_value_heads", "num_kv_heads", heads)
        out["head_dim"] = read("head_dim", "head_dim", out["emb_dim"] // heads)
        if (
            "attention_bias" not in arch.keys
            and arch.only.get("attention_bias") is None
        ):
            bias = read("attention_bias", "mlp_bias", arch.model_type == "gpt_oss")
            out["attention_bias"] = "all" if bias else "none"
    else:
        out["num_kv_heads"] = heads
    out["logits_via_embedding"] = read(
        "tie_word_embeddings", "logits_via_embedding", arch.is_tied
    )
    out |= _activation(arch, config, where)
    out |= _rope(arch, config, where)
    try:
        out |= arch.windows(config)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    if out.get("num_experts", 2) == 1:
        raise UsageError(f"{where}: a single expert is not supported: it is an MLP.")
    return _checked(out, where)


class _Reader:
    """Entries of a config.json, of the type that our key has."""

    def __init__(self, config: Mapping[str, Any], where: str):
        self.config, self.where = config, where

    def __call__(self, name: str, key: str, default: Any) -> Any:
        given = [self.config.get(n) for n in name.split("|")]
        value = next((x for x in given if x is not None), None)
        if value is None:
            require(default is not None, f"{self.where}: config.json has no {name}.")
            return default
        kind = type(keys(Model)[key].default)
        kind = float if keys(Model)[key].default is None else kind
        fits = isinstance(value, bool) == (kind is bool) and isinstance(
            value, (int, float) if kind is float else kind
        )
        require(
            fits and (kind is not float or math.isfinite(value)),
            f"{self.where}: config.json has {name}={value!r:.80}, which should be a "
            f"{kind.__name__}.",
        )
        return kind(value)


def _checked(out: dict[str, Any], where: str) -> dict[str, Any]:
    """The keys, when the model takes them together."""
    try:
        rope.of(Model(**out))
    except UsageError as error:
        raise UsageError(f"{where}: config.json asks for {error}") from None
    return out


def _activation(arch: Architecture, config: Mapping[str, Any], where: str):
    if "mlp_activation" in arch.keys:
        return {}
    default = "silu" if arch.act == "hidden_act" else "gelu_pytorch_tanh"
    given = config.get(arch.act) or config.get("hidden_act") or default
    require(
        isinstance(given, str) and given in ACTIVATIONS,
        f"{where}: config.json has {arch.act}={given!r:.80}; known are "
        f"{', '.join(ACTIVATIONS)}.",
    )
    return {"mlp_activation": ACTIVATIONS[given]}


YARN = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings",
        "attention_factor")  # fmt: skip
TAKES = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": YARN,
    "longrope": (
        "factor",
        "short_factor",
        "long_factor",
        "original_max_position_embeddings",
        "attention_factor",
    ),
}


def _rope(arch: Architecture, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Base, stretch and share of the rotary embedding, in the old spelling (rope_theta and
    rope_scaling) or the new one (rope_parameters, by kind of layer in Gemma 3)."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    require(
        isinstance(given, Mapping),
        f"{where}: config.json has rope parameters {given!r:.80}, not an object.",
    )
    local = None
    if "full_attention" in given or "sliding_attention" in given:
        local = given.get("sliding_attention") or {}
        given = given.get("full_attention") or {}
        plain = isinstance(local, Mapping) and isinstance(given, Mapping)
        require(plain, f"{where}: config.json has rope_parameters that are no objects.")
        require(
            local.get("rope_type", "default") == "default",
            f"{where}: config.json stretches the rotary embedding of layers with a window "
            f"({local.get('rope_type')!r:.40}), which is not supported.",
        )
    number = _Reader({**config, **given}, where)
    out = {"rope_max_timescale": number("rope_theta", "rope_max_timescale", arch.base)}
    if arch.model_type == "gemma3_text":
        near = config.get("rope_local_base_freq", 10000.0)
        near = {"rope_theta": (local or {}).get("rope_theta", near)}
        name = "local_rope_max_timescale"
        out[name] = _Reader(near, where)("rope_theta", name, None)
    share = number("partial_rotary_factor", "partial_rotary_factor", 1.0)
    if share != 1:
        out["partial_rotary_factor"] = share
    kind = given.get("rope_type", given.get("type", "default"))
    if arch.model_type == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"
    if kind == "default" or kind is None:
        return out
    require(
        isinstance(kind, str) and kind in TAKES,
        f"{where}: config.json has rope_type={kind!r:.40}; known are default, "
        f"{', '.join(TAKES)}.",
    )
    return {**out, "rope_scaling": _stretch(arch, kind, {**config, **given}, where)}


def _stretch(arch: Architecture, kind: str, config: Mapping[str, Any], where: str):
    """`rope_scaling` as one text."""
    given = {k: config[k] for k in TAKES[kind] if config.get(k) is not None}
    longest = config.get("max_position_embeddings")
    original = "original_max_position_embeddings"
    if original in TAKES[kind] and original not in given and longest is not None:
        given[original] = longest
    if kind == "longrope" and "factor" not in given and longest is not None:
        given["factor"] = max(
            _as_number(longest, where) / _as_number(given[original], where), 1.0
        )
    if kind == "yarn":
        if not config.get("truncate", True):
            given["truncate"] = False
        both = [config.get(k) for k in ("mscale", "mscale_all_dim")]
        if arch.keys.get("attention_type") == "mla":
            given |= {k: v for k, v in zip(("mscale", "mscale_all_dim"), both) if v}
        elif all(both) and "attention_factor" not in given:
            factor = _as_number(given.get("factor"), where)
            grown = [0.1 * _as_number(x, where) * math.log(factor) + 1 for x in both]
            given["attention_factor"] = grown[0] / grown[1]

    def text(value: Any) -> str:
        if value is False:
            return "0"
        listed = value if isinstance(value, list) else [value]
        return "/".join(repr(float(_as_number(x, where))) for x in listed)

    return ",".join([kind, *(f"{k}:{text(v)}" for k, v in given.items())])


def _as_number(value: Any, where: str) -> float:
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    require(
        fits and math.isfinite(value) and value > 0,
        f"{where}: config.json has {value!r:.40} among its rope parameters, which should "
        "be a number above 0.",
    )
    return float(value)


# --- keys as config.json ----------------------------------------------------------------------

# keys that say nothing about what a model computes
FREE = ("max_target_length", "remat_policy", "attention", "dtype", "weight_dtype",
        "scan_layers", "load_balance_loss_weight", "mtp_loss_scaling_factor")  # fmt: skip


def config_of(m: Model) -> tuple[Architecture, dict[str, Any]]:
    """The architecture that a model of ours is one of, and the config.json it would have.

    Raises:
        UsageError: it is none of them; what keeps it from the nearest is named.
    """
    require(not m.mtp_num_layers, "heads that predict further ahead are not exported.")
    nearest: tuple[int, str] | None = None
    for arch in ARCHITECTURES:
        config = _config(m, arch)
        try:
            other = Model(**settings_of(config, arch.model_type))
        except UsageError as error:
            missing = (99, f"{arch}: {error}")
        else:
            wrong = [k for k in _compared(m) if _value(other, k) != _value(m, k)]
            if not wrong:
                return arch, config
            both = (f"{wrong[0]}={getattr(x, wrong[0])}" for x in (other, m))
            missing = (len(wrong), f"{arch} has {', the model has '.join(both)}")
        nearest = min(nearest or missing, missing, key=lambda x: x[0])
    assert nearest is not None
    raise UsageError(f"no architecture of transformers is this model; {nearest[1]}.")


def _compared(m: Model) -> list[str]:
    """Keys that must be the same; widths of parts that a model lacks need not."""
    unused = set(FREE)
    if m.num_experts > 1 and not m.first_num_dense_layers:
        unused.add("mlp_dim")
    if m.num_experts == 1:
        unused.add("moe_mlp_dim")
    if m.attention_type == "mla":
        unused |= {"head_dim", "num_kv_heads"}
    return [key for key in keys(Model) if key not in unused]


def _value(m: Model, key: str) -> Any:
    """A key to compare by: not how it is written."""
    return dict(rope.of(m).numbers) if key == "rope_scaling" else getattr(m, key)


def _config(m: Model, arch: Architecture) -> dict[str, Any]:
    """config.json with everything of the model that an architecture has a name for."""
    out: dict[str, Any] = {
        "architectures": [arch.class_name],
        "model_type": arch.model_type,
        "num_key_value_heads": m.num_kv_heads,
        "tie_word_embeddings": m.logits_via_embedding,
        "max_position_embeddings": m.max_target_length,
    }
    for name, (key, _) in {**COMMON, **arch.also}.items():
        value = getattr(m, key)
        if key == "q_lora_rank" or "soft_cap" in key:
            value = value or None
        out[name.split("|")[0]] = value
    is_mla = m.attention_type == "mla"
    out["head_dim"] = m.qk_rope_head_dim if is_mla else m.head_dim
    if "attention_bias" not in arch.keys:
        out["attention_bias"] = m.attention_bias == "all"
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    if m.mlp_activation in names:
        out[arch.act] = names[m.mlp_activation]
    if m.sliding_window_size:
        kinds = {True: "sliding_attention", False: "full_attention"}
        out |= {"sliding_window": m.sliding_window_size, "use_sliding_window": True}
        if len(set(m.has_window)) > 1:
            out["layer_types"] = [kinds[x] for x in m.has_window]
    return {**out, **_rope_parameters(m)}


def _rope_parameters(m: Model) -> dict[str, Any]:
    turns = rope.of(m)
    given = {k: list(v) if isinstance(v, tuple) else v for k, v in turns.numbers}
    given = {k: v for k, v in given.items() if v or k == "truncate"}
    if "truncate" in given:
        given["truncate"] = bool(given["truncate"])
    far = {"rope_type": turns.kind or "default", "rope_theta": turns.base, **given}
    if m.partial_rotary_factor != 1:
        far["partial_rotary_factor"] = m.partial_rotary_factor
    if not m.local_rope_max_timescale:
        return {"rope_parameters": far}
    near = {"rope_type": "default", "rope_theta": m.local_rope_max_timescale}
    return {"rope_parameters": {"full_attention": far, "sliding_attention": near}}


# --- names as rows ----------------------------------------------------------------------------


def table(m: Model, arch: Architecture) -> list[Row]:
    """A row for every array of the model.

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
    """Every array of the model by its path, as shapes."""
    params = nnx.to_pure_dict(nnx.state(models.abstract(m), nnx.Param))
    flat = flax.traverse_util.flatten_dict(params)
    return {"/".join(map(str, path)): x for path, x in flat.items()}


def _inside_layer(m: Model, path: str) -> tuple[str, range | int | None]:
    """A path as it is inside a layer, and the layers (one, or all of a stack) it is of."""
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
