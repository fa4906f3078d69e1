"""config.json as keys of our own model, and keys as the config.json they would have.

`settings_of` reads what a published model says of itself, by the row of its architecture
(lm/architectures.py): entries that every config.json has, those of its kind, windows by layer,
and the rotary embedding in its old and its new spelling. A value that the model cannot do is
refused by its name there. `config_of` goes back: of all architectures it takes the one whose
config.json, read again, gives the same keys, and says what keeps a model from the nearest.
"""

import math
from collections.abc import Mapping
from typing import Any

from midtread.lm import rope
from midtread.lm.architectures import (
    ACTIVATIONS,
    ARCHITECTURES,
    COMMON,
    MOST,
    Architecture,
    architecture,
)
from midtread.lm.config import Model, keys
from midtread.lm.usage import UsageError, require

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
}

# --- config.json as keys ----------------------------------------------------------------------


def settings_of(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a folder's config.json as keys of the model.

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
            bias = read("attention_bias", "mlp_bias", arch.bias)
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
    size = out.get("sliding_window_size", 0)
    require(
        type(size) is int,
        f"{where}: config.json has sliding_window={size!r:.80}, which should be "
        f"{_WORDS[int]}.",
    )
    if out.get("num_experts", 2) == 1:
        raise UsageError(f"{where}: a single expert is not supported: it is an MLP.")
    return _checked(out, where)


# entries that null switches off, where others are then at their default
SWITCHES = ("final_logit_softcapping", "attn_logit_softcapping")


class _Reader:
    """Entries of a config.json, of the type that our key has."""

    def __init__(self, config: Mapping[str, Any], where: str):
        self.config, self.where = config, where

    def __call__(self, name: str, key: str, default: Any) -> Any:
        given = [self.config.get(n) for n in name.split("|")]
        value = next((x for x in given if x is not None), None)
        if value is None and name in self.config and name in SWITCHES:
            return 0.0
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
            f"{self.where}: config.json has {name}={value!r:.80}, which should be "
            f"{_WORDS.get(kind, kind.__name__)}.",
        )
        return kind(value)


def _checked(out: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the keys, when the model takes them together."""
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
    """Returns base, stretch and share of the rotary embedding, in the old spelling
    (rope_theta and rope_scaling) or the new one (rope_parameters, by kind of layer in Gemma
    3)."""
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
    if arch.local_base is not None:
        near = config.get("rope_local_base_freq", arch.local_base)
        near = {"rope_theta": (local or {}).get("rope_theta", near)}
        name = "local_rope_max_timescale"
        out[name] = _Reader(near, where)("rope_theta", name, None)
    share = number("partial_rotary_factor", "partial_rotary_factor", 1.0)
    if share != 1:
        require(
            arch.can_turn_part,
            f"{where}: config.json has partial_rotary_factor={share:g}, but transformers "
            f"turns whole heads of {arch.models}. Write 1 there if it was trained so.",
        )
        out["partial_rotary_factor"] = share
    kind = given.get("rope_type", given.get("type", "default"))
    if isinstance(kind, str):
        kind = arch.rope_kinds.get(kind, kind)
    if kind == "default" or kind is None:
        return out
    require(
        isinstance(kind, str) and kind in TAKES,
        f"{where}: config.json has rope_type={kind!r:.40}; known are default, "
        f"{', '.join(TAKES)}.",
    )
    return {**out, "rope_scaling": _stretch(arch, kind, {**config, **given}, where)}


def _stretch(arch: Architecture, kind: str, config: Mapping[str, Any], where: str):
    """Returns `rope_scaling` as one text."""
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
            if any(both) and not all(both) and "attention_factor" not in given:
                factor = _as_number(given.get("factor"), where)
                given["attention_factor"] = max(0.1 * math.log(factor) + 1, 1.0)
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
    """Returns the architecture that a model of ours is one of, and the config.json it would
    have.

    Raises:
        UsageError: it is none of them; what keeps it from the nearest is named.
    """
    require(
        not m.mtp_num_layers,
        f"mtp_num_layers={m.mtp_num_layers}: heads that predict further ahead are not "
        "exported, and a model that is to be exported is trained without: mtp_num_layers=0.",
    )
    nearest: tuple[int, str] | None = None
    for arch in ARCHITECTURES:
        config = _config(m, arch)
        try:
            other = Model(**settings_of(config, arch.model_type))
        except UsageError as error:
            missing = (99, f"{arch}: {str(error).rstrip('.')}")
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
    """Returns a key's value to compare by, however it is written."""
    return dict(rope.of(m).numbers) if key == "rope_scaling" else getattr(m, key)


def _config(m: Model, arch: Architecture) -> dict[str, Any]:
    """Returns config.json with everything of the model that an architecture has a name for."""
    out: dict[str, Any] = {
        "architectures": [arch.class_name],
        "model_type": arch.model_type,
        "num_key_value_heads": m.num_kv_heads,
        "tie_word_embeddings": m.logits_via_embedding,
        "max_position_embeddings": m.max_target_length,
        "pad_token_id": None,  # Phi-3's default is 32000, which small tables lack
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
