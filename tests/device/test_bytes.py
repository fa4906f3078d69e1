"""A quantized checkpoint on a GPU: as many bytes as its formats promise, and no float copy.

JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests/device/test_bytes.py
"""

import gc
import json

import jax
import numpy as np
import pytest
from flax import nnx

from midtread.interop import orbax as interop
from midtread.lm import convert, model
from midtread.lm.config import Config, Model, section
from midtread.lm.generate import generate
from midtread.lm.tokenizer import tokenizer

pytestmark = pytest.mark.gpu

SHAPE = {"emb_dim": 2048, "mlp_dim": 8192, "num_decoder_layers": 4, "head_dim": 128,
         "num_query_heads": 16, "num_kv_heads": 4, "max_new_tokens": 4}  # fmt: skip
#                 per layer: q and out, k and v, the MLP
WEIGHTS = 4 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192)
SCALES = 4 * 4 * (2 * 2048 + 2 * 512 + 2 * 8192 + 2048)  # float32, one per column
FLOATS = 4 * (264 * 2048 + (2 * 4 + 1) * 2048)  # the embedding and the norms
BITS = {"int8w": 8, "int4w": 4, "int8": 8, "fp8": 8}


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms mix dtypes
        yield


# XLA's allocator gives a free piece of memory whole where less than half of it would be left
# over, so that what it counts depends on what ran before in this process. A copy of one MLP
# weight in bfloat16 would be more than this.
ALLOCATED = 0.1


def in_use(device):
    """(bytes of arrays that are alive, bytes that the allocator has given out)."""
    gc.collect()
    alive = [x for x in jax.live_arrays() if x.devices() == {device}]
    arrays = sum(x.on_device_size_in_bytes() for x in alive)
    return np.array([arrays, device.memory_stats()["bytes_in_use"]])


def checkpoint(folder, config):
    """Written as `midtread quantize` writes it, from weights that never see the GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        net = convert.in_memory(config, model.create(section(config, Model)))
        interop.save(folder / "params", net)
    (folder / convert.FILE).write_text(json.dumps({}))
    return str(folder)


@pytest.mark.parametrize("value", BITS)
def test_bytes_held_are_what_the_format_promises(tmp_path, gpu, value):
    config = Config(**SHAPE, quantization=value, use_qwix_quantization=None)
    path = checkpoint(tmp_path, config)
    promised = WEIGHTS * BITS[value] // 8 + SCALES + FLOATS
    before = in_use(gpu)
    net = convert.load(config, path)
    arrays = jax.tree.leaves(nnx.state(net))
    assert all(x.devices() == {gpu} for x in arrays)
    assert convert.nbytes(arrays) == promised
    held = sum(x.on_device_size_in_bytes() for x in arrays)
    assert held == pytest.approx(promised, rel=0.01)
    alive, allocated = in_use(gpu) - before
    assert alive == pytest.approx(promised, rel=0.01)
    assert allocated == pytest.approx(promised, rel=ALLOCATED)

    made = generate(net, tokenizer(config), config, ["import os"])
    assert len(made.tokens[0]) == 4
    # The text is made, and no weight was left behind in float.
    alive, allocated = in_use(gpu) - before
    assert alive == pytest.approx(promised, rel=0.01, abs=4 << 20)
    assert allocated == pytest.approx(promised, rel=ALLOCATED, abs=4 << 20)
