"""More than one device: the same loss on every mesh, and what lies where."""

import functools
import math
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from midtread.lm import build, data, mesh, model, ranges, settings, step
from midtread.lm.config import Model, Training, section
from midtread.lm.train import read, train
from midtread.lm.usage import UsageError
from midtread.model import prove
from midtread.numerics.qarray import quantize

DENSE = ["tiny", "dataset_type=synthetic", "batch_size=8", "num_query_heads=4",
         "num_kv_heads=2", "head_dim=8", "max_target_length=16", "num_decoder_layers=1",
         "warmup_steps_fraction=0", "learning_rate=0.01"]  # fmt: skip
SPARSE = [*DENSE, "num_experts=4", "num_experts_per_tok=2", "moe_mlp_dim=32"]
# Sums in another order: bfloat16 has 8 bits of mantissa, and a code may fall the other way.
TOLERANCE = 2e-3


class Trained:
    """A few steps of a config."""

    def __init__(self, *words: str, steps: int = 2):
        self.config = config = settings.load(words)
        m, t = section(config, Model), section(config, Training)
        self.layout = layout = mesh.layout_of(config)
        net = build.for_training(config, model.create(m, config.seed, layout))
        if config.static == "calibrated":
            ranges.load(config, net)
        self.start, self.parts = step.initial(net, t, layout=layout)
        self.how = step.Setup(m, t, self.parts.graph, config.seed, layout=layout)
        batch = data.held_out(data.splits(config).train, config)[0]
        self.batch = layout.place_batch(batch) if layout else jax.device_put(batch)
        state, self.losses, self.norms = self.start, [], []
        random = self.parts.random
        lowered = step.run.lower(self.how, state, random, self.batch)
        self.compiled = lowered.compile()
        for _ in range(steps):
            state, metrics = self.compiled(state, random, self.batch)
            self.losses.append(float(metrics["loss"]))
            self.norms.append(float(metrics["grad_norm"]))
        self.state = state


@functools.cache
def trained(*words: str) -> Trained:
    return Trained(*words)


QWIX = ("use_qwix_quantization=true",)
WAYS = {
    "bf16": (),
    "int8": ("quantization=int8", *QWIX),
    "fp8_full": ("quantization=fp8_full",),
}
ORDINARY = {("int8", "data:2,fsdp:4"), ("fp8_full", "tensor:2,fsdp:-1")}  # fmt: skip
MESHES = ("data:8", "fsdp:8", "data:4,tensor:2", "data:2,fsdp:4", "fsdp:4,tensor:2",
          "data:2,fsdp:2,tensor:2", "tensor:2,fsdp:-1")  # fmt: skip


@pytest.mark.parametrize(
    "way, grid",
    [
        pytest.param(w, g, marks=() if (w, g) in ORDINARY else pytest.mark.slow)
        for w in WAYS
        for g in MESHES
    ],
)
def test_the_loss_is_that_of_one_device(way, grid):
    alone, spread = (
        trained(*DENSE, *WAYS[way]),
        trained(*DENSE, *WAYS[way], f"mesh={grid}"),
    )
    np.testing.assert_allclose(spread.losses, alone.losses, rtol=TOLERANCE)
    np.testing.assert_allclose(spread.norms, alone.norms, rtol=10 * TOLERANCE)
    assert spread.losses[1] < spread.losses[0]


@pytest.mark.parametrize(
    "way, grid",
    [
        pytest.param(w, g, marks=pytest.mark.slow)
        for w in WAYS
        for g in ("expert:4,data:2", "expert:4,fsdp:2", "expert:2,fsdp:2,tensor:2")
    ],
)
def test_the_loss_with_experts_is_that_of_one_device(way, grid):
    alone = trained(*SPARSE, *WAYS[way])
    spread = trained(*SPARSE, *WAYS[way], f"mesh={grid}")
    np.testing.assert_allclose(spread.losses, alone.losses, rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["bf16", "int8", "fp8_full"])
@pytest.mark.parametrize("grid", ["expert:4,data:2", "expert:2,fsdp:2,tensor:2"])
@pytest.mark.parametrize("how, tolerance", [("ring", TOLERANCE), ("ring_fp8", 1e-2)])
def test_tokens_sent_by_hand_give_the_same_loss(way, grid, how, tolerance):
    alone = trained(*SPARSE, *WAYS[way])
    spread = trained(*SPARSE, *WAYS[way], f"mesh={grid}", f"expert_dispatch={how}")
    np.testing.assert_allclose(spread.losses, alone.losses, rtol=tolerance)
    np.testing.assert_allclose(spread.norms, alone.norms, rtol=10 * tolerance)
    sent = prove.read(spread.compiled.as_text()).collectives
    tokens = 8 * 16 // math.prod(spread.layout.sizes[a] for a in ("data", "fsdp"))
    codes = [c for c in sent if c.dtype == "u8" and c.dims == (tokens, 32)]
    assert bool(codes) == (how == "ring_fp8")


@pytest.mark.slow
def test_stochastic_rounding_is_the_same_on_every_mesh():
    words = (*DENSE, "quantization=int8", "use_qwix_quantization=false")
    alone, spread = trained(*words), trained(*words, "mesh=fsdp:4,tensor:2")
    np.testing.assert_allclose(spread.losses, alone.losses, rtol=TOLERANCE)


# --- what lies where --------------------------------------------------------------------------


def test_weights_and_moments_are_cut_alike():
    run = trained(*DENSE, "mesh=fsdp:4,tensor:2")
    for state in (run.start, run.state):
        weight = state.learned["decoder"]["layers"]["mlp"]["wi_0"]["kernel"][...]
        assert weight.sharding.spec == P(None, "fsdp", "tensor")
        shapes = {x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(state.optimizer) if x.shape == weight.shape}  # fmt: skip
        assert shapes == {(1, 8, 32)}
        scale = state.learned["decoder"]["decoder_norm"]["scale"][...]
        assert scale.sharding.is_fully_replicated
    assert run.batch["inputs"].sharding.spec == P(mesh.BATCH, None)


def test_a_qarray_is_cut_like_its_array():
    layout = mesh.layout_of(settings.load([*DENSE, "mesh=fsdp:4,tensor:2"]))
    w = jax.random.normal(jax.random.key(0), (32, 64))
    q = quantize(w, "int8", channelwise_axes=(1,), tiled_axes={0: 8})
    place = lambda q: layout.place(
        nnx.Param(q, out_sharding=("embed", "mlp"), eager_sharding=False)
    )[...]
    placed = place(q)
    assert (
        placed.qvalue.sharding.spec == placed.scale.sharding.spec == P("fsdp", "tensor")
    )
    one = quantize(w, "int8", channelwise_axes=(1,))
    placed = place(one)
    assert placed.scale.sharding.spec == P(None, "tensor")
    np.testing.assert_array_equal(placed.qvalue, one.qvalue)


def test_masks_of_pruned_weights_are_cut_like_them():
    words = "mesh=fsdp:4,tensor:2", "quantization=fp8_full", "weight_sparsity_n=2", "weight_sparsity_m=4"  # fmt: skip
    config = settings.load([*DENSE, *words])
    layout = mesh.layout_of(config)
    net = build.for_training(config, model.create(section(config, Model), 0, layout))
    pruning = build.pruning(config, build.coverage(config))
    state, _ = step.initial(net, section(config, Training), pruning, layout)
    mask = state.masks["decoder/layers/mlp/wi_0/kernel"]
    weight = state.learned["decoder"]["layers"]["mlp"]["wi_0"]["kernel"][...]
    assert mask.sharding.spec == weight.sharding.spec == P(None, "fsdp", "tensor")


def test_weights_are_the_same_on_every_mesh():
    m = section(settings.load(DENSE), Model)
    layout = mesh.layout_of(settings.load([*DENSE, "mesh=fsdp:8"]))
    alone, spread = model.create(m, 3), model.create(m, 3, layout)
    for a, b in zip(
        *(jax.tree.leaves(nnx.state(x, nnx.Param)) for x in (alone, spread))
    ):
        np.testing.assert_array_equal(a, b)


# --- shards of a weight gradient --------------------------------------------------------------


def rule_of(*words):
    from midtread.lm import quantization

    return quantization.rules(settings.load([*DENSE, "quantization=int8", *words]))[0]


def test_local_shard_count():
    assert rule_of(*QWIX).bwd_weight_grad_tile_size is None  # one range
    count = "quantization_local_shard_count="
    assert rule_of(*QWIX, f"{count}4").bwd_weight_grad_tile_size == 1 / 4
    host = 1 / jax.local_device_count()
    assert rule_of(*QWIX, f"{count}-1").bwd_weight_grad_tile_size == host
    with pytest.raises(UsageError, match="quantization_local_shard_count=0"):
        rule_of(*QWIX, f"{count}0")
    aqt = rule_of("use_qwix_quantization=false", f"{count}0").recipe
    assert aqt.drhs.g is None and aqt.dlhs.g is not None
    every = settings.load([*DENSE, "quantization=int8", *QWIX, f"{count}-1"])
    assert "depend on the mesh" in build.mode(every)


# --- what cannot be ---------------------------------------------------------------------------

REFUSED = {
    "mesh=data:3": "mesh=data:3 is for 3 devices, and there are 8",
    "mesh=row:8": "no axis is called 'row'",
    "mesh=data:x": "data:x should be",
    "mesh=data:-1,fsdp:-1": "only one axis can be -1",
    "mesh=fsdp:3,data:-1": "3 does not divide the 8 devices",
    "mesh=tensor:8": "tensor:8 does not divide num_query_heads=4",
    "mesh=expert:8": "expert:8 does not divide num_experts=1",
    "mesh=data:8 gradient_accumulation_steps=2": "batch_size=8",
    "mesh=fsdp:8 quant=[{'weight_qtype':'int8','tile_size':8}]": "tile_size=8",
    "mesh=fsdp:8 fp8_weight_gather=true": "fp8_weight_gather=true with quantization=''",
    "mesh=fsdp:8 fp8_weight_gather=true quantization=fp8_full": "fixed,-a,a",
    "mesh=data:8 fp8_weight_gather=true quantization=fp8_full "
    "weight_quantization_calibration_method=fixed,-224,224": "mesh=data:8",
    "mesh=fsdp:8 fp8_weight_gather=true quantization=fp8_full static=calibrated":
        "fp8_weight_gather=true needs the ranges of a calibration run: write load_parameters_path",
    "mesh=fsdp:8 fp8_weight_gather=true quantization=fp8_full static=calibrated "
    "load_parameters_path=/": "load_parameters_path=/ has no static.npz",
    "expert_dispatch=ring mesh=expert:4,data:2 quantization=fp8_full static=measure": "static=measure",
    "batch_split_factor=2 quantization=int8": "batch_split_factor=2",
    "expert_dispatch=ring mesh=data:8": "expert_dispatch=ring with mesh=data:8",
    "expert_dispatch=ring quantization=int8": "expert_dispatch=ring with quantization=int8",
    "expert_dispatch=ring quantization=fp8_gpu": "expert_dispatch=ring with quantization=fp8_gpu",
    "expert_dispatch=ring quantization=te_mxfp8": "use_qwix_quantization=true",
    "expert_dispatch=ring quant=[{'weight_qtype':'int8'}]": "expert_dispatch=ring with",
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(words):
    with pytest.raises(UsageError) as caught:
        mesh.layout_of(settings.load([*DENSE, *words.split()]))
    assert REFUSED[words] in str(caught.value) and "\n" not in str(caught.value)


# --- checkpoints and processes ----------------------------------------------------------------

RUN = [
    *DENSE,
    "dtype=float32",
    "eval_interval=0",
    "eval_steps=1",
]


def run_of(folder, *words):
    return settings.load([*RUN, f"base_output_directory={folder}", *words])


@pytest.mark.slow
def test_a_checkpoint_of_one_mesh_goes_on_with_another(tmp_path):
    every = "steps=4", "checkpoint_period=2"
    whole = train(run_of(tmp_path / "a", *every, "mesh=fsdp:4,tensor:2"))
    curve = [x["loss"] for x in read(whole.folder / "metrics.jsonl")]
    cut = tmp_path / "b"
    train(run_of(cut, *every, "mesh=fsdp:4,tensor:2"))
    folder = cut / "run"
    (folder / "checkpoints" / "4").rename(tmp_path / "gone")
    again = train(run_of(cut, *every, "mesh=data:8"))
    lines = read(again.folder / "metrics.jsonl")
    assert len(lines) == 4
    np.testing.assert_allclose([x["loss"] for x in lines], curve, rtol=1e-5)


def processes(folder: pathlib.Path, *words: str) -> list[subprocess.Popen]:
    """The same command in two processes of four devices."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = {**os.environ, "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2",
           "JAX_COORDINATOR_BIND_ADDRESS": address, "JAX_PLATFORMS": "cpu",
           "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}  # fmt: skip
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "midtread", "train", *RUN,
               f"base_output_directory={folder}", *words]  # fmt: skip
    started = []
    for number in range(2):
        with (folder / f"log{number}").open("a") as log:
            started.append(subprocess.Popen(
                command, env={**env, "JAX_PROCESS_ID": str(number)},
                stdout=log, stderr=subprocess.STDOUT))  # fmt: skip
    return started


def finish(started) -> list[int]:
    return [p.wait(timeout=400) for p in started]


@pytest.mark.slow
def test_two_processes_one_killed_and_started_again(tmp_path):
    words = ("mesh=fsdp:4,tensor:2", "steps=120", "checkpoint_period=20")
    one = train(run_of(tmp_path / "one", "mesh=fsdp:4,tensor:2", "steps=8"))
    assert finish(processes(tmp_path / "two", *words[:1], "steps=8")) == [0, 0]
    curves = [
        [x["loss"] for x in read(folder / "metrics.jsonl")]
        for folder in (one.folder, tmp_path / "two" / "run")
    ]
    np.testing.assert_allclose(*curves, rtol=1e-5)

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert finish(processes(whole, *words)) == [0, 0]
    first, second = processes(cut, *words)
    lines = cut / "run" / "metrics.jsonl"
    while not (lines.exists() and len(read(lines)) > 40):
        assert first.poll() is None
        time.sleep(0.05)
    second.kill()
    second.wait()
    killed = time.monotonic()
    assert first.wait(timeout=60) != 0 and time.monotonic() - killed < 60
    time.sleep(1)
    assert "Start all of them again" in (cut / "log0").read_text()
    assert finish(processes(cut, *words)) == [0, 0]
    assert "resumed at step" in (cut / "log0").read_text()
    strip = lambda folder: [
        (x["loss"], x["grad_norm"]) for x in read(folder / "run" / "metrics.jsonl")
    ]
    assert strip(cut) == strip(whole)  # to the bit


def test_processes_are_found_by_their_variables():
    from midtread.lm.processes import start

    start({})  # alone
    with pytest.raises(UsageError, match="JAX_NUM_PROCESSES"):
        start({"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"})
    by_hand = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "2"}
    with pytest.raises(UsageError, match="begin at 0"):
        start({**by_hand, "JAX_PROCESS_ID": "2"})
    with pytest.raises(UsageError, match="is not a number"):
        start({**by_hand, "JAX_PROCESS_ID": "x"})
