"""Orbax, written and read by two processes with four devices each.

python -m pytest -m slow tests/interop
"""

import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import midtread as mt
from midtread.interop import orbax

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import midtread as mt
from midtread.interop import orbax

mesh = Mesh(np.array(jax.devices()), ("data",))
split = NamedSharding(mesh, PartitionSpec("data"))
make = lambda: {
    q: mt.quantize(jnp.sin(jnp.arange(2048.0)).reshape(64, 32), q, channelwise_axes=[0])
    for q in ("int8", "nf4", "fp8")
}
tree = jax.jit(make, out_shardings=split)()
orbax.save(sys.argv[3], tree)
shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split), tree)
loaded = orbax.load(sys.argv[3], shapes)
for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(loaded)):
    assert a.sharding == b.sharding and not b.is_fully_addressable
    for x, y in zip(a.addressable_shards, b.addressable_shards):
        assert np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes()
print("same", jax.process_count())
"""


@pytest.mark.slow
def test_two_processes_save_and_load_one_checkpoint(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    start = lambda i: subprocess.Popen(
        [sys.executable, "-c", PROGRAM, port, str(i), str(tmp_path / "c")],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    both = [start(0), start(1)]
    for process in both:
        out, error = process.communicate(timeout=180)
        assert process.returncode == 0, error[-3000:]
        assert "same 2" in out
    alone = orbax.load(tmp_path / "c")  # on one device, in one process
    x = jnp.sin(jnp.arange(2048.0)).reshape(64, 32)
    want = jax.jit(lambda x: mt.quantize(x, "nf4", channelwise_axes=[0]))(x)
    assert np.array_equal(alone["nf4"].qvalue, want.qvalue)
