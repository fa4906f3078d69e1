"""Environments to choose for, operands made of shapes alone or of random numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import midtread as mt
from midtread.kernels.candidates import Refusal
from midtread.kernels.environment import DEVICES, Env
from midtread.kernels.layout import Groups, Matmul, weight_matmul
from midtread.kernels.pallas_compat import InterpretGPUParams

H200, ADA, CPU = (Env(DEVICES[name]) for name in ("h200", "l40s", "cpu"))
INTERPRETED = Env(DEVICES["h200"], "interpret")
DOT = ("m", "k"), ("k", "n"), ("m", "n")
GROUPED = ("r", "k"), ("g", "k", "n"), ("r", "n")


def floats(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def coded(name, shape, axes=(), tiles=None, **how):
    """A QArray of this shape, without values."""
    options = {"channelwise_axes": axes, "tiled_axes": tiles or {}, **how}
    return jax.eval_shape(lambda x: mt.quantize(x, name, **options), floats(*shape))


def matmul(lhs, rhs, labels=DOT, dtype=jnp.bfloat16, sizes=None, **how):
    groups = None if sizes is None else Groups("r", "g", sizes)
    return Matmul(labels, lhs, rhs, dtype, groups=groups, **how)


def by_weight(x, w, labels=DOT, dtype=jnp.bfloat16):
    found = weight_matmul(matmul(x, w, labels, dtype))
    assert not isinstance(found, str), found
    return found


def reason(plan):
    """Of a refusal; None of a plan."""
    return plan.reason if isinstance(plan, Refusal) else None


needs_interpreter = pytest.mark.skipif(
    InterpretGPUParams is None, reason="Mosaic GPU is interpreted from jax 0.12 on"
)


def random(seed, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.RandomState(seed).randn(*shape), dtype)


def wide(x):
    return np.asarray(x).astype(np.float32)


def error(got, want):
    return np.linalg.norm(wide(got) - wide(want)) / np.linalg.norm(wide(want))
