"""Sparse: Qwix's N:M sparsity on `midtread.numerics.sparsity.Sparsity`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from midtread.model.rules import as_sparsity
from midtread.numerics.sparsity import Sparsity


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparsityRule:
    """Keep n of every m weights, and of every m activations; m = 0 keeps all."""

    weight_sparsity_n: int = 0
    weight_sparsity_m: int = 0
    weight_sparsity_order: str = "R"
    weight_sparsity_block_size: int = 0
    weight_sparsity_offset: int = 0
    weight_sparsity_start_step: int = 0
    weight_sparsity_update_step: int = 1
    eval_mode: bool = False
    activation_sparsity_n: int = 0
    activation_sparsity_m: int = 0
    activation_sparsity_order: str = "R"
    activation_sparsity_block_size: int = 0
    activation_sparsity_offset: int = 0

    @property
    def weights(self) -> Sparsity | None:
        return as_sparsity(self)

    @property
    def activations(self) -> Sparsity | None:
        if not self.activation_sparsity_m:
            return None
        names = ("n", "m", "order", "block_size", "offset")
        return Sparsity(**{k: getattr(self, f"activation_sparsity_{k}") for k in names})


def get_sparsity_mask(
    inputs: jax.Array,
    n_sparsity: int = 0,
    m_sparsity: int = 0,
    order: str = "R",
    block_size: int = 0,
    offset: int = 0,
) -> jax.Array:
    """True where an element is kept."""
    return Sparsity(n_sparsity, m_sparsity, order, block_size, offset).mask(inputs)


def prune_inputs_n_m(
    inputs: jax.Array, *, n: int, m: int, order: str = "R", offset: int = 0
) -> jax.Array:
    return Sparsity(n, m, order, offset=offset).apply(inputs)


def sparsify(array: jax.Array, how: SparsityRule) -> jax.Array:
    rule = as_sparsity(how)
    if rule is None:
        raise ValueError(f"{how} asks for no sparsity: weight_sparsity_m is 0.")
    return rule.apply(array)


def apply_sparsity(
    inputs: jax.Array,
    mask: jax.Array,
    is_channelwise: bool = False,
    pruned_value: jax.Array | None = None,
) -> jax.Array:
    """Masked inputs; with `pruned_value` those masked are multiplied by it instead."""
    if is_channelwise:
        mask = jnp.broadcast_to(mask, inputs.shape)
    if pruned_value is not None:
        return inputs * jnp.where(mask, 1, pruned_value).astype(inputs.dtype)
    return jnp.where(mask, inputs, jnp.zeros_like(inputs))


def get_sparsity_mask_unstructured(
    inputs: jax.Array, mask: jax.Array | None, prune_rate: Any
) -> jax.Array:
    """True above the `prune_rate`-th percentile of |inputs|; what `mask` drops counts 0."""
    size = jnp.abs(inputs if mask is None else apply_sparsity(inputs, mask))
    return size > jnp.percentile(size, prune_rate)


class SparsityModule(nnx.Module):
    """Counts steps and keeps a mask of the weight, renewed as the rule's schedule says."""

    def __init__(
        self,
        shape: tuple[int, ...],
        sharding_axes: Any,
        sparsity_rule: SparsityRule | None = None,
    ):
        self.sparsity_rule = sparsity_rule
        self.step = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.mask = nnx.BatchStat(jnp.ones(shape, bool), sharding=sharding_axes)

    def __call__(
        self, inputs: jax.Array, weight: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """(inputs, weight), both masked; a step further unless in eval_mode."""
        rule = self.sparsity_rule
        if rule is None:
            return inputs, weight
        if rule.activations is not None:
            inputs = rule.activations.apply(inputs)
        if rule.weights is None:
            return inputs, weight
        if not rule.eval_mode:
            step, mask = self.step.get_value(), self.mask.get_value()
            if mask.shape != weight.shape:  # one shard of the weight
                mask = mask[tuple(slice(n) for n in weight.shape)]
            self.mask.set_value(rule.weights.refresh(mask, weight, step))
            self.step.set_value(step + 1)
        return inputs, apply_sparsity(weight, self.mask.get_value())
