"""N:M sparsity: of every M neighbours keep the N largest, as a step before quantizing.

    order 'R'      neighbours along the last axis;  'C' along the one before it
    block_size b   whole runs of b elements are kept or dropped together, by their sum |x|
    offset d       the M members of a group lie d apart instead of side by side

`Sparsity` also says when: nothing is pruned before `start_step`; from then on the mask
is refreshed every `update_step` steps and kept in between. For that a caller counts steps,
keeps the mask and calls `refresh`. A recipe does neither: it prunes in every step (`apply`).
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """Keeps the n largest of every m weights.

    >>> Sparsity(2, 4).mask(jnp.array([[3.0, -9.0, 1.0, 4.0]])).tolist()
    [[False, True, False, True]]

    Args:
        n, m: of every m neighbours n are kept.
        order: 'R' for neighbours along the last axis, 'C' along the one before it.
        block_size: whole runs of so many elements are kept or dropped together.
        offset: how far apart the m members of a group lie; 0 for side by side.
        start_step: nothing is pruned before this step.
        update_step: the mask is refreshed every so many steps.

    Raises:
        ValueError: n above m, or a field below its least value.
    """

    n: int
    m: int
    order: str = "R"
    block_size: int = 0
    offset: int = 0
    start_step: int = 0
    update_step: int = 1

    def __post_init__(self):
        if not 0 < self.n <= self.m:
            raise ValueError(
                f"N must not exceed M in {self.n}:{self.m} sparsity, nor be 0."
            )
        if self.order not in ("R", "C"):
            raise ValueError(
                f"Index order {self.order} not supported: write 'R' (last axis) or 'C'."
            )
        for name in ("block_size", "offset", "start_step"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"sparsity {name}={getattr(self, name)} must not be negative."
                )
        if self.update_step < 1:
            raise ValueError(
                f"sparsity update_step={self.update_step} must be at least 1."
            )

    def mask(self, x: jax.Array) -> jax.Array:
        """Returns a mask that is True where `x` is kept."""
        if self.order == "C":
            if x.ndim < 2:
                raise ValueError(
                    f"order 'C' needs two axes; the array has shape {x.shape}."
                )
            turned = dataclasses.replace(self, order="R")
            return turned.mask(x.swapaxes(-1, -2)).swapaxes(-1, -2)
        score = jnp.abs(x)
        if self.block_size > 1:
            score = _by_blocks(score, self.block_size).sum(-1)
        kept = _largest(score, self.n, self.m, max(self.offset, 1))
        return (
            jnp.repeat(kept, self.block_size, axis=-1) if self.block_size > 1 else kept
        )

    def apply(self, x: jax.Array) -> jax.Array:
        """Returns `x` with zeros where it is not kept."""
        return jnp.where(self.mask(x), x, jnp.zeros_like(x))

    def refresh(self, mask: jax.Array, x: jax.Array, step: jax.Array) -> jax.Array:
        """Returns the mask at `step`. Before the start it keeps everything."""
        since = step - self.start_step
        due = (since >= 0) & (since % self.update_step == 0)
        mask = jax.lax.cond(due, self.mask, lambda _: mask, x)
        return mask | (since < 0)


def _by_blocks(score: jax.Array, size: int) -> jax.Array:
    if score.shape[-1] % size:
        raise ValueError(
            f"blocks of {size} do not divide the axis of {score.shape[-1]}."
        )
    return score.reshape(*score.shape[:-1], -1, size)


def _largest(score: jax.Array, n: int, m: int, offset: int) -> jax.Array:
    """Marks the largest n of every group of m, of equal ones the first. Groups run along the
    last axis if they fit there, else over the flattened array."""
    fits = score.shape[-1] % (m * offset) == 0
    if not fits and score.size % (m * offset):
        raise ValueError(
            f"inputs size must be divisible by m * offset: {score.shape} has {score.size} "
            f"elements, m * offset = {m * offset}."
        )
    lead = score.shape[:-1] if fits else ()
    groups = score.reshape(*lead, -1, m, offset).swapaxes(-1, -2)
    _, chosen = jax.lax.top_k(groups, n)
    kept = jnp.any(jax.nn.one_hot(chosen, m, dtype=bool), axis=-2)
    return kept.swapaxes(-1, -2).reshape(score.shape)
