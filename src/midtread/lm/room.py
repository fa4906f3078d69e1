"""Room: whether a run fits into its devices, asked before anything is allocated.

What a step needs comes from shapes (`lm/memory.py`), what a device has from the device: a
GPU says its limit, a CPU's devices share what the system has left. A run that does not fit
is refused in one line, with the numbers and with the keys that would help, each with what it
saves. Activations take a trace of the model to count, so they are counted only where a bound
that is easily found leaves a doubt.

`remat_policy=auto` is settled by the same numbers, before the run is held against its devices:
the first of these that needs no more than SHARE of a device,

    none                         the backward recomputes nothing
    minimal_with_quantization    it quantizes nothing again; where something is quantized
    minimal                      it multiplies nothing again
    full                         whatever it needs

The same for serving: weights before they are loaded, a cache before it is made.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax

from midtread.lm import memory
from midtread.lm import mesh as meshes
from midtread.lm.config import Config
from midtread.lm.usage import UsageError
from midtread.model.coverage import human

SHARE = 0.9  # of a device that a policy of `auto` may need, by a count that is off by some percent

# keys that save memory, and what to write for them
HELP = [
    {"optimizer_states": "int8"},
    {"optimizer_states": "int8", "quantize_embedding_states": True},
    {"weight_dtype": "bfloat16", "weight_rounding": "stochastic"},
]


def bytes_here() -> int | None:
    """Returns the bytes that one of this machine's devices has for a run, or None if it
    does not say."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if device.platform != "cpu":
        return None
    return _available() // jax.local_device_count()


def bytes_free() -> int | None:
    """Returns the bytes that this machine's first device has left, or None if it does not
    say."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return _available()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))


def _available() -> int:
    """Returns the bytes of memory that the system can still give."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":") for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2**62


def settle(
    config: Config, limit: int | None = None, on: Mapping[str, int] | None = None
) -> Config:
    """Returns the config with the remat_policy that `auto` stands for on these devices.

    Args:
        limit: the bytes of a device; None asks the device.
        on: the sizes of the mesh; None asks the config and the devices there are.
    """
    if config.remat_policy != "auto":
        return config
    limit = bytes_here() if limit is None else limit
    on = meshes.sizes(config.mesh, jax.device_count()) if on is None else on
    return dataclasses.replace(config, remat_policy=_policy(config, limit, on))


def _policy(config: Config, limit: int | None, on: Mapping[str, int]) -> str:
    """Returns the policy that recomputes least in `limit` bytes."""
    if limit is None:  # a device that does not say what it has
        return "minimal"
    least = _static(config, on)
    if least > SHARE * limit:
        return "full"
    if _without_a_doubt(config, on, least) <= SHARE * limit:
        return "none"
    policies = ["none", "minimal_with_quantization", "minimal"]
    if not (config.quantization or config.quant):  # there are no codes to keep
        policies.remove("minimal_with_quantization")
    for policy in policies:
        each = dataclasses.replace(config, remat_policy=policy)
        if memory.model(each, on).total <= SHARE * limit:
            return policy
    return "full"


def require_room(config: Config, limit: int | None = None) -> None:
    """Refuses a training run that needs more memory than its devices have.

    Args:
        limit: the bytes of a device; None asks the device.
    """
    limit = bytes_here() if limit is None else limit
    if not config.check_memory or limit is None:
        return
    on = meshes.sizes(config.mesh, jax.device_count())
    least = _static(config, on)
    if _without_a_doubt(config, on, least) <= limit:
        return
    need = least if least > limit else memory.model(config, on).total
    if need <= limit:
        return
    raise UsageError(_refusal(config, on, need, limit))


def _static(config: Config, on: Mapping[str, int]) -> int:
    """Returns the bytes of parameters, gradients and the optimizer, which do not depend on
    the batch."""
    weights = memory.weights_on(config, on)
    parameters, moments = memory.parameters_and_moments(config, weights)
    return 2 * parameters + moments


def _without_a_doubt(config: Config, on: Mapping[str, int], least: int) -> int:
    """Returns bytes that suffice under every policy, of which `least` do not depend on the
    batch."""
    # Codes of weights take a byte where parameters and gradients take four or more.
    return least + least // 4 + _at_most(config, on)


def _at_most(config: Config, on: Mapping[str, int]) -> int:
    """Returns an upper bound of the bytes of activations: every array of a layer is kept,
    at four bytes an element."""
    ways = math.prod(on[a] for a in meshes.BATCH)
    tokens = config.batch_size * config.max_target_length // ways
    heads = config.num_query_heads * max(
        config.head_dim, config.qk_nope_head_dim + config.qk_rope_head_dim
    )
    inner = config.mlp_dim
    if config.num_experts > 1:
        experts = config.num_experts_per_tok + config.shared_experts
        inner = max(inner, experts * config.moe_mlp_dim)
    wide = 16 * config.emb_dim + 16 * heads + 8 * inner
    logits = config.num_query_heads * min(config.max_target_length, 512)
    layers = config.num_decoder_layers + config.mtp_num_layers
    per_token = 4 * layers * (wide + 3 * logits)
    return tokens * (per_token + 12 * min(config.vocab_size, 2**27 // tokens + 1))


def _refusal(config: Config, on: Mapping[str, int], need: int, limit: int) -> str:
    """Says what a step needs, what the device has, and which keys would help."""
    moments = memory.optimizer_bytes(config)
    static = _static(config, on)
    size = lambda n: human(n, "B")
    parts = f"{size(static)} for parameters, gradients and the optimizer"
    if need > static:
        parts += f", {size(need - static)} for activations"
    helps = [
        f"{' '.join(f'{k}={_word(v)}' for k, v in keys.items())} (-{size(saved)})"
        for keys in HELP
        if (saved := static - _with(config, on, keys)) > 0
    ]
    if need > static:
        if config.remat_policy != "full":
            helps.append("remat_policy=full")
        helps.append(
            f"a smaller batch_size than {config.batch_size}, or max_target_length"
        )
    helps.append("mesh=fsdp:-1 with more devices")
    device = jax.local_devices()[0].device_kind
    return (
        f"a step needs {size(need)} on each device ({parts}; {moments:.1f} bytes of moments "
        f"a parameter), and {device} has {size(limit)}. What would help: "
        f"{'; '.join(helps)}; check_memory=false tries all the same."
    )


def _word(value: object) -> str:
    """Returns a value as one writes it on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _with(config: Config, on: Mapping[str, int], keys: Mapping[str, object]) -> int:
    """Returns the bytes that do not depend on the batch, with some keys changed."""
    if all(getattr(config, k) == v for k, v in keys.items()):
        return _static(config, on)
    return _static(dataclasses.replace(config, **keys), on)


# --- serving ----------------------------------------------------------------------------------


def fits(needed: int) -> bool:
    """Returns whether the device has so many bytes left, or does not say."""
    free = bytes_free()
    return free is None or needed <= free


def no_weights(needed: int, helps: Mapping[str, int]) -> str:
    """Says that there is no room for weights, and what would fit.

    Args:
        needed: their bytes while they are loaded.
        helps: what to write instead -> the bytes that it needs.
    """
    free, size = bytes_free() or 0, lambda n: human(n, "B")
    fitting = [f"{word} ({size(n)})" for word, n in helps.items() if n <= free]
    advice = "; ".join([*fitting, "mesh=fsdp:-1 with more devices"])
    device = jax.local_devices()[0].device_kind
    return (
        f"the weights need {size(needed)}, and {device} has {size(free)} left. What would "
        f"fit: {advice}; check_memory=false tries all the same."
    )


def no_cache(slots: int, length: int, needed: int) -> str:
    """Says that there is no room for a cache of `slots` x `length` tokens, and what would
    fit."""
    text = f"a cache of {slots} x {length:,} tokens needs {human(needed, 'B')}"
    free = bytes_free()
    if free is None or needed <= free:
        return (
            f"{text}, which the device does not have: fewer prompts at once "
            "(decode_slots), fewer max_new_tokens, or quantize_kvcache=true."
        )
    device = jax.local_devices()[0].device_kind
    tokens = free * slots * length // needed
    fits = f"{tokens:,} tokens"
    if tokens >= length:
        fits = f"decode_slots={tokens // length}, or {tokens // slots:,} tokens each"
    return (
        f"{text}, and {device} has {human(free, 'B')} left. What would fit: {fits}, prompt "
        "and max_new_tokens together; quantize_kvcache=true has a half or a quarter of it; "
        "check_memory=false tries all the same."
    )
