"""Cache: keys and values of the tokens so far, in float or in few bits.

A cache holds rows [B, S, heads, width] by name ("k" and "v", or MLA's "latent" and
"k_rope"), one slot per position. In few bits every row is written with a scale, as
`kv_quant_axis` says:

    dkv              one per head of a token          scale [B, S, heads, 1]
    heads_and_dkv    one per token, all heads alike   scale [B, S, 1, 1]

Quantizing is that of `midtread.quantize`; MaxText's KVQuant stores max |x| where we store
the scale, and turns an all-zero row into NaN. Readers multiply codes and apply scales to
what comes out (`lm/attend.py`).
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from midtread.lm.config import Model
from midtread.lm.usage import require
from midtread.numerics.formats import dtype_bits
from midtread.numerics.qarray import QArray, dequantize, quantize

CHANNELS = {"dkv": (0, 1, 2), "heads_and_dkv": (0, 1)}  # axes with scales of their own
FORMATS = {"int8": "int8", "int4": "int4", "fp8": "float8_e4m3fn"}
Format = tuple[str, str] | None  # kv_quant_dtype and kv_quant_axis; None: float


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["format"]
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """The cache of one layer, or of several stacked along a first axis."""

    rows: dict[str, Any]  # name -> array or QArray
    format: Format = None

    @property
    def length(self) -> int:
        return jax.tree.leaves(self.rows)[0].shape[-3]

    def write(self, positions: jax.Array, **new: jax.Array) -> "Cache":
        """Returns the cache with `new` [B, T, heads, width] at the slots `positions` [B, T]."""
        put = functools.partial(_put, positions)
        rows = {}
        for name, old in self.rows.items():
            x = new[name]
            if self.format is None:
                rows[name] = put(old, x)
                continue
            q = _quantize(x, self.format)
            rows[name] = dataclasses.replace(
                old, qvalue=put(old.qvalue, q.qvalue), scale=put(old.scale, q.scale)
            )
        return dataclasses.replace(self, rows=rows)


def _put(positions: jax.Array, old: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `old` [B, S, heads, width] with x [B, T, ..] at the slots `positions` [B, T]."""
    if positions.size == 1:  # a copy; XLA would check the bounds of a scatter first
        return jax.lax.dynamic_update_slice(
            old, x.astype(old.dtype), (0, positions[0, 0], 0, 0)
        )
    batch = jnp.arange(positions.shape[0])[:, None]
    return old.at[batch, positions].set(x.astype(old.dtype))


def _quantize(x: jax.Array, cache_format: tuple[str, str]) -> QArray:
    fmt, axis = cache_format
    return quantize(
        x.astype(jnp.float32), FORMATS[fmt], channelwise_axes=CHANNELS[axis]
    )


def make(
    m: Model,
    batch: int,
    length: int,
    cache_format: Format = None,
    stacked: bool | None = None,
) -> dict[str, Any]:
    """Returns empty caches for every kind of layer of a model: a Cache stacked over the
    layers of a scan, or a list of one for each.

    Args:
        cache_format: of codes and their scales; None: the model's dtype.
        stacked: whether they are; None: as the model's `scan_layers`.
    """
    require(
        cache_format in (None, *itertools.product(FORMATS, CHANNELS)),
        f"cache_format={cache_format}: a format, one of {', '.join(FORMATS)}, and what "
        f"shares a scale, one of {', '.join(CHANNELS)}.",
    )
    stacked = m.scan_layers if stacked is None else stacked
    if m.attention_type == "mla":
        widths = {"latent": (1, m.kv_lora_rank), "k_rope": (1, m.qk_rope_head_dim)}
    else:
        widths = dict.fromkeys(("k", "v"), (m.num_kv_heads, m.head_dim))
    first = m.first_num_dense_layers if m.num_experts > 1 else 0
    counts = {"dense_layers": first, "moe_layers": m.num_decoder_layers - first}
    if not first:
        counts = {"layers": m.num_decoder_layers}

    def rows(*lead: int) -> Cache:
        out = {}
        for name, (heads, width) in widths.items():
            x = jnp.zeros((batch, length, heads, width), jnp.dtype(m.dtype))
            x = x if cache_format is None else _quantize(x, cache_format)
            out[name] = jax.tree.map(lambda a: jnp.zeros((*lead, *a.shape), a.dtype), x)
        return Cache(out, cache_format)

    layers = lambda n: rows(n) if stacked else [rows() for _ in range(n)]
    return {name: layers(count) for name, count in counts.items() if count}


def codes(x: Any, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """Returns what to multiply, and the scale of it."""
    if isinstance(x, QArray):
        return x.qvalue.astype(dtype), x.scale
    return x, None


def restore(x: Any, dtype: Any) -> jax.Array:
    return dequantize(x).astype(dtype) if isinstance(x, QArray) else x


def nbytes(caches: Any) -> int:
    """Returns the number of bytes of the caches, at the bits their formats have."""
    return sum(x.size * dtype_bits(x.dtype) // 8 for x in jax.tree.leaves(caches))
