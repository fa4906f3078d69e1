"""What XLA makes of quantized matmuls on a GPU, read from the compiled program.

JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests/device
"""

import jax
import jax.numpy as jnp
import pytest

import midtread as mt

pytestmark = pytest.mark.gpu


def step(name, m, k, n):
    ops = mt.learn(mt.recipe(name), key=jax.random.key(0))

    def run(x, w, g):
        out, vjp = jax.vjp(ops.dot, x, w)
        return out, vjp(g)

    shapes = (m, k), (k, n), (m, n)
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    return mt.prove(jax.jit(run), *arrays)


@pytest.mark.parametrize("name", ["qwix_int8", "qwix_fp8", "te_fp8_current"])
def test_aligned_steps_run_in_low_bits(name):
    found = step(name, 1024, 1024, 2048)
    assert len(found.contractions) >= 3, str(found)
    assert found.flops_share() == 1, str(found)


def plain(dtypes, m, k, n, out):
    dot = lambda x, y: jax.lax.dot(x, y, preferred_element_type=out)
    shapes = ((m, k), (k, n))
    arrays = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes)]
    return mt.prove(jax.jit(dot), *arrays)


E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
UNALIGNED = {
    "fp8 17x33x9": ((E4M3, E4M3), 17, 33, 9, jnp.float32),
    "fp8 4095x1031x257": ((E4M3, E4M3), 4095, 1031, 257, jnp.float32),
    "int8 17x33x9": ((jnp.int8, jnp.int8), 17, 33, 9, jnp.int32),
    # cuBLASLt multiplies e5m2 by e4m3, but not by itself
    "e5m2 x e5m2": ((E5M2, E5M2), 1024, 1024, 1024, jnp.float32),
}


def test_what_xla_widens_is_flagged(capsys):
    """Which of these XLA widens changes with its version; that one of them is, and that
    whatever does not run in low bits is flagged, does not."""
    widened = []
    for name, case in UNALIGNED.items():
        found = plain(*case)
        assert found.contractions, name
        for e in found.contractions:
            assert e.verdict in ("low", "kernel", "widened"), (name, str(found))
            assert (e in found.flagged) == (e.verdict == "widened")
        if found.flagged:
            widened.append(name)
        with capsys.disabled():
            print(f"\n{name}: {found.summary}", end="")
    assert widened


def test_kernels_are_named():
    """Weight-only matmuls at small batches go to a kernel or to XLA; both are read."""
    w = jax.eval_shape(
        lambda: mt.quantize(
            jnp.ones((4096, 4096), jnp.bfloat16), "int8", channelwise_axes=[1]
        )
    )
    x = jax.ShapeDtypeStruct((8, 4096), jnp.bfloat16)
    found = mt.prove(jax.jit(mt.dot), x, w)
    assert found.contractions, str(found)
    assert all(
        e.verdict in ("kernel", "dequantized", "upcast") for e in found.contractions
    )
    assert any("s8" in (*e.ran, *e.stored) for e in found.contractions), str(found)
