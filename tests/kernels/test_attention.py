"""Flash attention over ranges: values and gradients, interpreted, and lowered for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from midtread.kernels import choose
from midtread.kernels.attention import Ranged
from midtread.kernels.attention import triton as flash
from midtread.kernels.environment import here, implementation, pretended
from midtread.kernels.pallas_compat import pretend_gpu

#   B, T, S, H, K, h, w, and what else
CASES = {
    "documents": (2, 90, 90, 4, 2, 16, 16, {}),
    "everything": (1, 70, 70, 2, 1, 24, 16, {"window": 20, "softcap": 2.0, "sinks": True}),
    "a cache": (1, 40, 100, 2, 2, 32, 32, {"offset": 50}),
    "some see nothing": (1, 64, 64, 2, 1, 16, 16, {"blind": 37}),
}  # fmt: skip


def example(key, name) -> tuple[Ranged, jax.Array]:
    """Operands in bfloat16, and a gradient of the output."""
    B, T, S, H, K, h, w, extra = CASES[name]
    keys = jax.random.split(key, 6)
    shapes = (B, T, H, h), (B, S, K, h), (B, S, K, w), (B, T, H, w)
    q, k, v, g = (jax.random.normal(x, s, jnp.bfloat16) for x, s in zip(keys, shapes))
    index = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    begins = jax.random.bernoulli(keys[4], 0.05, (B, T))
    first = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    first = jnp.maximum(first, index + 1 - extra.get("window", T))
    stop = index + 1 + extra.get("offset", 0)
    stop = jnp.where(index < extra.get("blind", 0), first, stop)
    sinks = jax.random.normal(keys[5], (H,)) if extra.get("sinks") else None
    return Ranged(q, k, v, first, stop, h**-0.5, extra.get("softcap"), sinks), g


def attend(a: Ranged) -> jax.Array:
    """The kernel's output."""
    choice = choose.plan_attend_ranges(a, here())
    assert choice.plan is not None, choice.refused
    return choice.plan.run(a)


def formula(a: Ranged, q, k, v, sinks) -> jax.Array:
    """The definition, in float32, with every logit in memory."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    logits = jnp.einsum("bthx,bshx->bhts", q, k) * a.scale
    if a.softcap is not None:
        logits = a.softcap * jnp.tanh(logits / a.softcap)
    slots = jnp.arange(k.shape[1])
    seen = (slots >= a.first[..., None]) & (slots < a.stop[..., None])
    logits = jnp.where(seen[:, None], logits, -jnp.inf)
    sink = jnp.full((q.shape[2],), -jnp.inf) if sinks is None else sinks
    sink = jnp.broadcast_to(sink[None, :, None, None], (*logits.shape[:3], 1))
    top = jnp.maximum(jnp.concatenate([logits, sink], -1).max(-1, keepdims=True), -1e9)
    weights = jnp.exp(logits - top)
    total = weights.sum(-1, keepdims=True) + jnp.exp(sink - top)
    return jnp.einsum("bhts,bshx->bthx", weights / jnp.where(total > 0, total, 1), v)


def results(run, a: Ranged, g: jax.Array) -> list[np.ndarray]:
    """The output and every gradient, in float32."""

    @jax.jit
    def both(q, k, v, sinks):
        out, vjp = jax.vjp(run, q, k, v, sinks)
        return out, vjp(g.astype(out.dtype))

    leaves = jax.tree.leaves(both(a.q, a.k, a.v, a.sinks))
    return [np.asarray(x, np.float32) for x in leaves]


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_formula(key, name, monkeypatch):
    """Within the rounding of bfloat16, with blocks that are smaller than a document."""
    small = flash.Kernels(*[flash.Blocks(32, 32, 4, 1)] * 3)
    monkeypatch.setattr(flash, "KERNELS", {256: small})
    a, g = example(key, name)

    def kernel(q, k, v, sinks):
        with implementation("interpret"):
            operands = Ranged(q, k, v, a.first, a.stop, a.scale, a.softcap, sinks)
            return attend(operands)

    got = results(kernel, a, g)
    want = results(lambda *arrays: formula(a, *arrays), a, g)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=0.015 * np.abs(y).max(), rtol=0)


@pytest.mark.parametrize("width", [64, 80, 128, 256])
def test_it_lowers_for_a_gpu(width):
    B, T, H, K = 2, 300, 4, 2
    shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype)
    token = shape(B, T, dtype=jnp.int32)

    def run(q, k, v, first, stop, sinks):
        operands = Ranged(q, k, v, first, stop, 0.1, 30.0, sinks)
        return jnp.sum(attend(operands).astype(jnp.float32))

    cache = shape(B, T, K, width)
    arrays = shape(B, T, H, width), cache, cache, token, token
    sinks = shape(H, dtype=jnp.float32)
    with pretended("h200"), pretend_gpu():
        traced = jax.jit(jax.grad(run, (0, 1, 2, 5))).trace(*arrays, sinks)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("flash_forward", "flash_dq", "flash_dkv"):
        assert text.count(f'name = "{kernel}"') == 1, kernel


def test_what_it_does_not_take_has_a_reason():
    wide = jnp.zeros((1, 8, 1, 300), jnp.bfloat16)
    token = jnp.zeros((1, 8), jnp.int32)

    def why(x):
        choice = choose.plan_attend_ranges(Ranged(x, x, x, token, token, 1.0), here())
        return choice.refused[0][1]

    with pretended("h200"):
        assert why(wide) == "heads of 300: 256 at most have a kernel"
        assert why(wide.astype(jnp.float32)).endswith("not float32")
    with pretended("a100"):
        assert "not a Hopper GPU" in why(wide)
