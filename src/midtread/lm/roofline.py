"""Roofline: how long a training step takes at the least, from shapes alone.

    arithmetic   FLOPs of every matmul, forward and both gradients, over the device's peak
                 in the format it is multiplied in; nothing else is counted
    transfers    bytes that arrive at a device, over the bandwidth of its links

A step takes the larger of the two if all transfers hide behind arithmetic, and their sum if
none does. It will take longer: no matmul reaches the peak (80% on an H200, 8192^3), and
softmax, norms, quantizing and the optimizer take their time. What it is for is to see what
binds, and what a format or a mesh changes.

Assumed: an even load on experts and devices; every link used in full, NVLink within a host of
eight devices, the network beyond; of a mesh, the axis that changes fastest lies within a
host. Formats that the device does not multiply (4 bits on Hopper) count as bfloat16.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from midtread.kernels.measured import BANDWIDTHS
from midtread.lm import build, memory
from midtread.lm import mesh as meshes
from midtread.lm.config import Config
from midtread.model.coverage import Row, table


class Device(NamedTuple):
    """Peaks of a device by its maker's data sheet, dense: FLOP/s, and bytes/s in one
    direction."""

    name: str
    flops: dict[str, float]  # by dtype
    memory: float
    inside: float  # links within a host
    outside: float  # a device's share of the network

    def peak(self, formats: tuple[str, ...]) -> float:
        """Returns the peak of a matmul of these formats, which is that of the wider
        operand."""
        return min(self.flops.get(f.split("/")[0], self.flops["bf16"]) for f in formats)


_8_BITS = ("e4m3", "e5m2", "int8")
HOST = 8  # devices of a host


def _device(name, bf16, low, f32, inside, outside) -> Device:
    flops = {"bf16": bf16, "f16": bf16, "f32": f32, **dict.fromkeys(_8_BITS, low)}
    return Device(name, flops, BANDWIDTHS[name], inside, outside)


DEVICES = [
    #        name            bf16     8 bits   f32     NVLink   network
    _device("NVIDIA H200",  989e12,  1979e12,  67e12,  450e9,   50e9),
    _device("NVIDIA H100",  989e12,  1979e12,  67e12,  450e9,   50e9),
]  # fmt: skip


def device_here() -> Device | None:
    """Returns the device that a run is on, if its peaks are known."""
    kind = jax.devices()[0].device_kind
    return next((d for d in DEVICES if kind.startswith(d.name)), None)


def model_flops(config: Config) -> float:
    """Returns the FLOPs that a training step has to do, over all devices, whatever it does
    besides.

    A token takes 6 for every weight that it is multiplied by (2 forward, 4 backward), where
    of the experts only its own count. Attention takes 3.5 times its forward over half of all
    pairs, which is what its gradients need without the logits in memory. Nothing that is
    computed again counts, so these FLOPs over the peak's are the model FLOPs utilization.
    """
    tokens = config.batch_size * config.max_target_length
    pairs = config.batch_size * config.max_target_length**2 / 2
    return 6 * _weights_of_a_token(config) * tokens + 3.5 * _attention(config, pairs)


def decoding_flops(config: Config, sequences: int, length: int) -> float:
    """Returns the FLOPs of a step of decoding: one token of every sequence, each with
    `length` tokens before it."""
    weights = 2 * _weights_of_a_token(config, ahead=False) * sequences
    return weights + _attention(config, sequences * length, ahead=False)


def _weights_of_a_token(config: Config, ahead: bool = True) -> float:
    """Returns the weights that a token is multiplied by, with or without the heads that look
    further ahead."""
    share = config.num_experts_per_tok / config.num_experts
    used = 0.0
    for path, var in memory.weights_of(config):
        names = var.get_metadata().get("out_sharding") or ()
        is_table = "token_embedder" in path and not config.logits_via_embedding
        is_ahead = str(path[0]).startswith("mtp_block")
        is_matrix = len([n for n in names if n != "layers"]) > 1
        if is_matrix and not is_table and (ahead or not is_ahead):
            used += var.size * (share if "experts" in names else 1)
    return used


def _attention(config: Config, pairs: float, ahead: bool = True) -> float:
    """Returns the FLOPs of attention's two matmuls over so many pairs of tokens a layer."""
    if config.attention_type == "mla":
        width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    else:
        width = 2 * config.head_dim
    layers = config.num_decoder_layers + ahead * config.mtp_num_layers
    return 2 * pairs * config.num_query_heads * width * layers


class Bound(NamedTuple):
    """The least seconds that a step takes on one device."""

    device: Device
    arithmetic: dict[str, float]  # by formats, "e4m3 x e4m3"
    transfers: dict[str, float]  # by what is sent

    @property
    def hidden(self) -> float:
        return max(sum(self.arithmetic.values()), sum(self.transfers.values()))

    @property
    def in_turn(self) -> float:
        return sum(self.arithmetic.values()) + sum(self.transfers.values())


def bound(config: Config, on: Mapping[str, int]) -> Bound:
    """Returns the least time of a step of `config` on a mesh of these sizes."""
    device = device_here() or DEVICES[0]
    return Bound(device, arithmetic(config, on, device), transfers(config, on, device))


def arithmetic(config: Config, on: Mapping[str, int], device: Device) -> dict:
    """Returns the least seconds that a device multiplies for, by the formats that are
    multiplied."""
    ways, seconds_by_formats = math.prod(on.values()), {}
    for row in build.coverage(config).rows:
        if not row.flops:
            continue
        for formats, times in _matmuls(row, memory.num_forwards(config)):
            name = " x ".join(formats)
            seconds = times * row.flops / ways / device.peak(formats)
            seconds_by_formats[name] = seconds_by_formats.get(name, 0.0) + seconds
    return seconds_by_formats


def _matmuls(row: Row, forwards: int) -> list[tuple[tuple[str, str], int]]:
    """Returns the formats of the three matmuls of a step, and how often each runs."""
    wide = ("bf16", "bf16")
    return [(row.fwd or wide, forwards), (row.dlhs or wide, 1), (row.drhs or wide, 1)]


def transfers(config: Config, on: Mapping[str, int], device: Device) -> dict:
    """Returns the least seconds that a device waits for the bytes that arrive, by what is
    sent."""
    wide = jnp.dtype(config.dtype).itemsize
    weights = memory.weights_on(config, on)
    whole = sum(w.here * on["fsdp"] * wide for w in weights if w.arriving)
    shared = sum(w.here * w.itemsize for w in weights if "expert" not in w.cut)
    needed = memory.model(config, on)
    rest = lambda axis: 1 - 1 / on[axis]  # the share that a gather has yet to send
    ways = math.prod(on[a] for a in meshes.BATCH)
    stream = (
        config.batch_size * config.max_target_length // ways * config.emb_dim * wide
    )
    layers = config.num_decoder_layers
    sparse = (layers - config.first_num_dense_layers) * (config.num_experts > 1)
    token = (1 if config.expert_dispatch == "ring_fp8" else wide) / wide
    sent = {
        # what is sent: (mesh axis, bytes)
        "weights": ("fsdp", needed.gathered * rest("fsdp")),
        "gradients of weights": ("fsdp", whole * rest("fsdp")),
        "gradients, over data": ("data", 2 * needed.parameters * rest("data")),
        "gradients, over expert": ("expert", 2 * shared * rest("expert")),
        # One sum follows attention and one the MLP, in both directions.
        "activations, over tensor": ("tensor", 8 * layers * stream * rest("tensor")),
        # Tokens go to the experts and sums come back, and so do their gradients.
        "tokens to experts": (
            "expert",
            sparse * stream * (on["expert"] - 1) * (token + 3),
        ),
    }
    return {
        name: nbytes / _link(device, on, axis)
        for name, (axis, nbytes) in sent.items()
        if nbytes
    }


def _link(device: Device, on: Mapping[str, int], axis: str) -> float:
    """Returns the bandwidth along a mesh axis. Devices are numbered along the last mesh
    axis first, so neighbours share a host."""
    order = meshes.AXES
    span = math.prod(on[a] for a in order[order.index(axis) :])
    return device.inside if span <= HOST else device.outside


def describe(config: Config, on: Mapping[str, int]) -> str:
    """Returns a table for `midtread explain`."""
    least = bound(config, on)
    rows = [["a step takes at least", "seconds"]]
    time = lambda s: f"{s:.3g} s" if s >= 1 else f"{1000 * s:.3g} ms"
    for what, parts in (("multiply", least.arithmetic), ("send", least.transfers)):
        rows += [[f"{what} {name}", time(s)] for name, s in parts.items()]
    rows += [["all transfers hidden", time(least.hidden)],
             ["none hidden", time(least.in_turn)]]  # fmt: skip
    d = least.device
    links = f"{d.inside / 1e9:g} GB/s within {HOST} devices, {d.outside / 1e9:g} GB/s beyond"
    return f"{table(rows, {1})}\nat the peaks of {d.name}, links of {links}"
