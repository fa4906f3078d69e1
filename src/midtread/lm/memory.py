"""Memory: what a training step needs on each device, from shapes alone.

    parameters    weights as they are kept, cut as the mesh cuts them
    optimizer     two moments of each, as optimizer_states keeps them
    gradients     one more of each
    activations   what the forward keeps for the backward
    gathers       what arrives over fsdp in a step, and what of it is there at once

Nothing is allocated and nothing compiled, so any model can be asked about on any machine.
Activations come from a trace of one device's share of the work: its rows, its heads, its
part of the inner widths. Traced with two numbers of rows, the difference is what grows with
rows; what does not are copies of weights, which are counted elsewhere. With experts, a
device is taken to compute as many pairs as it sends, an even load.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from midtread import optim
from midtread.lm import build, step
from midtread.lm import loss as losses
from midtread.lm import mesh as meshes
from midtread.lm import model as models
from midtread.lm.config import Config, Model, Training, section
from midtread.lm.optimizer import optimizer
from midtread.model.coverage import human, table


class Bytes(NamedTuple):
    """The bytes that one device needs."""

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    at_once: int  # gathered weights of one layer, and of what is not in layers
    gathered: int  # sent to this device in a step

    @property
    def total(self) -> int:
        return sum(self[:5])


def model(config: Config, on: Mapping[str, int]) -> Bytes:
    """Returns the bytes of a training step of `config` on a mesh of these sizes."""
    weights = weights_on(config, on)
    parameters, moments = parameters_and_moments(config, weights)
    at_once = sum(w.arriving for w in weights)
    gathered = num_forwards(config) * sum(w.arriving * w.layers for w in weights)
    kept = activations(config, on) + codes_of_weights(config, weights)
    return Bytes(parameters, moments, parameters, kept, at_once, gathered)


def codes_of_weights(config: Config, weights: list["Weight"]) -> int:
    """Returns the bytes of the codes of weights that the forward keeps for the backward, at a
    byte an element."""
    keeps = config.remat_policy == "minimal_with_quantization"
    if not (keeps or config.keeps_all) or not (config.quantization or config.quant):
        return 0
    return sum(w.here for w in weights if w.in_layers and w.is_matrix)


def num_forwards(config: Config) -> int:
    """Returns how often a step runs the forward: once more if the backward recomputes it."""
    return 2 if config.remat_policy in ("full", "quantized") else 1


def parameters_and_moments(config: Config, weights: list["Weight"]) -> tuple[int, int]:
    """Returns the bytes of weights and of their optimizer states on one device."""
    parameters = sum(w.here * w.itemsize for w in weights)
    return parameters, int(sum(w.here for w in weights) * optimizer_bytes(config))


def optimizer_bytes(config: Config) -> float:
    """Returns the bytes of optimizer states of one parameter, on the average."""
    params = nnx.state(models.abstract(section(config, Model)), nnx.Param)
    make = optimizer(section(config, Training)).init
    count = sum(x.size for x in jax.tree.leaves(params))
    return optim.nbytes(jax.eval_shape(make, params)) / count


def weights_of(config: Config) -> list[tuple[tuple, Any]]:
    """Returns every weight as a path and a variable that has its shape."""
    state = nnx.state(models.abstract(section(config, Model)), nnx.Param)
    return list(nnx.to_flat_state(state))


def weights_on(config: Config, on: Mapping[str, int]) -> list["Weight"]:
    """Returns every weight as a mesh of these sizes cuts it."""
    return [Weight(config, on, path, var) for path, var in weights_of(config)]


class Weight:
    """One weight on a mesh: its elements on a device, and the bytes that arrive when it is
    gathered."""

    def __init__(self, config: Config, on: Mapping[str, int], path: tuple, var: Any):
        names, shape = var.get_metadata().get("out_sharding"), var.shape
        self.cut = cut = meshes.spec(on, names, shape)
        self.here = meshes.shard_size(on, cut, shape)
        self.itemsize = jnp.dtype(var.dtype).itemsize
        is_stacked = bool(names) and names[0] == "layers"
        self.layers = shape[0] if is_stacked else 1
        self.in_layers = "layers" in "/".join(map(str, path))
        self.is_matrix = len(shape) - is_stacked > 1
        self.arriving = 0
        if "fsdp" in cut:
            wire = 1 if is_coded(config, path) else jnp.dtype(config.dtype).itemsize
            self.arriving = self.here * on["fsdp"] // self.layers * wire


def is_coded(config: Config, path: tuple) -> bool:
    """Returns whether a weight travels as codes of 8 bits."""
    where = "/".join(map(str, path))
    inside = "layers/" in where or (
        config.quantize_mtp and "transformer_layer" in where
    )
    is_wide = "gate" in path and not config.quantize_router_proj
    return config.fp8_weight_gather and inside and not is_wide


def share(config: Config, on: Mapping[str, int]) -> Config:
    """Returns the config of one device's part of the work."""
    ways = math.prod(on[a] for a in meshes.BATCH)
    cut = {"batch_size": config.batch_size // ways, "mesh": ""}
    for name in ("num_query_heads", "num_kv_heads", "mlp_dim", "moe_mlp_dim",
                 "vocab_size"):  # fmt: skip
        cut[name] = getattr(config, name) // on["tensor"]
    cut |= {"fp8_weight_gather": False, "batch_split_factor": 1}
    return dataclasses.replace(config, **cut)


def activations(config: Config, on: Mapping[str, int]) -> int:
    """Returns the bytes that the forward keeps for the backward on one device."""
    part = share(config, on)
    rows = max(part.batch_size // part.gradient_accumulation_steps, 1)
    kept = _of_a_row(part)
    if not part.keeps_all:  # the backward recomputes one layer at a time
        whole = _of_a_row(dataclasses.replace(part, remat_policy="none"))
        kept += (whole - kept) // part.num_decoder_layers
    num_logits = rows * part.max_target_length * part.vocab_size
    return kept * rows + 8 * min(num_logits, losses.BLOCK)  # logits and their gradient


def _of_a_row(config: Config) -> int:
    """Returns the bytes of residuals that each further row adds."""
    one, two = (_kept(dataclasses.replace(config, batch_size=n)) for n in (1, 2))
    return two - one


def _kept(config: Config) -> int:
    """Returns the bytes of the residuals of a step of `batch_size` rows."""
    config = dataclasses.replace(config, gradient_accumulation_steps=1)
    m = section(config, Model)
    net = build.for_training(config, models.abstract(m))
    parts = step.take_apart(net)
    row = jax.ShapeDtypeStruct((config.batch_size, m.max_target_length), jnp.int32)
    batch = dict.fromkeys(("inputs", "targets", "positions", "segments", "mask"), row)

    def residuals(learned, kept, random, batch):
        def loss(learned):
            noise = step.with_noise(random, jax.random.key(0))
            whole = step.Parts(parts.graph, learned, kept, noise).whole()
            return step.loss_sums(m, config.z_loss_multiplier, whole, batch, 1.0)[0]

        return jax.vjp(loss, learned)[1]

    residuals_kept = jax.eval_shape(residuals, *parts[1:], batch)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(residuals_kept))


# --- for reading ------------------------------------------------------------------------------


def describe(config: Config, on: Mapping[str, int]) -> str:
    """Returns a table for `midtread explain`."""
    bytes_needed = model(config, on)
    rows = [["on each device", "bytes"]]
    rows += [[name, human(value, "B")] for name, value in (
        ("parameters", bytes_needed.parameters), ("optimizer", bytes_needed.optimizer),
        ("gradients", bytes_needed.gradients), ("activations", bytes_needed.activations),
        ("gathered weights, at once", bytes_needed.at_once), ("together", bytes_needed.total),
        ("gathered in a step", bytes_needed.gathered))]  # fmt: skip
    axes = ", ".join(f"{axis} {n}" for axis, n in on.items() if n > 1) or "one device"
    return f"mesh: {axes}\n{table(rows, {1})}"
