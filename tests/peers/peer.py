"""Peers: published packages that do part of what we do, at the version we compare with."""

import contextlib
import importlib
import os
import random
import warnings
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def load(package: str, version: str, *modules: str) -> list:
    """The peer's modules, or a skip that says why there are none."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed", allow_module_level=True)
    if found != version:
        reason = f"these tests know {package} {version}, installed is {found}"
        pytest.skip(reason, allow_module_level=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, while importing; none of ours
        return [importlib.import_module(module) for module in modules]


@contextlib.contextmanager
def manners():
    """Peers count on standard dtype promotion and AQT on a deprecated call; we run under
    the strict one, and warnings are errors."""
    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        arrays_as_dtypes = "Implicit conversion of an array to a dtype"
        warnings.filterwarnings("ignore", arrays_as_dtypes, DeprecationWarning)
        yield


def data(rng, shape, dtype, size=1.0):
    return jnp.asarray(rng.normal(size=shape) * size).astype(dtype)


# Compiling takes the time, and CI has little; PEER_CASES=4 in the environment draws
# thousands of cases.
SHARE = float(os.environ.get("PEER_CASES", "0.2"))


def sample(cases, count, seed=0):
    cases = list(cases)
    return random.Random(seed).sample(cases, min(int(count * SHARE), len(cases)))


def chunks(cases, size):
    """Lists of cases, so that pytest's own cost is paid once for many."""
    return [cases[i : i + size] for i in range(0, len(cases), size)]


def planted(seed, shape, bound=127.5, every=4):
    """Random numbers below a bound (a format's times a power of two) and the bound itself
    in every run of `every` elements along any axis: scales are powers of two, and so exact
    whether divided by or multiplied with, and no code is near a tie."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-0.99, 0.99, shape) * bound
    places = np.indices(shape).sum(0) % every == 0
    return jnp.asarray(np.where(places, bound, x) / 2.0 ** rng.integers(4, 8)).astype(
        jnp.float32
    )
