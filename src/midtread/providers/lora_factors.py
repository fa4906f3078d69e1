"""Factors: how the two matrices of a LoRA adapter share out the axes of a weight.

Every axis of a weight has a label, a letter. The axes that are summed with x go to A, those
that stay go to B, and between them stands an axis of extent `rank`. Where a matmul has several
summed axes they are flattened into one axis of A, which then is written with several letters:

    weight "abc", a and b summed     A ("ab", "r")    B ("r", "c")

From these letters follow the shapes of A and B, how they are sharded, and the product A B as
the weight is stored. A layer may multiply by a transpose of the stored weight, and by another
in a second use; `turn` says which, so that both uses can share one pair of adapters.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from midtread.providers.lora import LoraRule


@dataclasses.dataclass(frozen=True)
class Factors:
    """How A and B share out the axes of a weight. For each axis of A and of B there is a
    string: the labels of the weight that are flattened into it, or that of the rank."""

    weight: str
    a: tuple[str, ...]
    b: tuple[str, ...]
    extents: Mapping[str, int]
    scale: float
    groups: int = 1  # more than 1 for a grouped convolution
    # Axis i of the operand is axis turn[i] of the weight. () means that they are the same, and
    # None that this is not known.
    turn: tuple[int, ...] | None = ()

    @classmethod
    def of(
        cls,
        rule: "LoraRule",
        labels: Sequence[str],
        shape: Sequence[int],
        a: Sequence[str],
        b: Sequence[str],
        rank: str = "r",
    ) -> "Factors":
        """Returns those of a rule, for a weight whose axes have these labels and extents."""
        extents = {**dict(zip(labels, shape)), rank: int(rule.rank)}
        return cls("".join(labels), tuple(a), tuple(b), extents, rule.scale)

    def shape(self, axes: Sequence[str]) -> tuple[int, ...]:
        return tuple(math.prod(self.extents[x] for x in axis) for axis in axes)

    def split(self, x: jax.Array, axes: Sequence[str]) -> jax.Array:
        """Gives each label an axis of its own; axes in front (stacked layers) stay."""
        stacked = x.shape[: x.ndim - len(axes)]
        return x.reshape(*stacked, *(self.extents[label] for label in "".join(axes)))

    def origins(self, axes: Sequence[str]) -> tuple[int | None, ...]:
        """Returns the weight's axis that each of `axes` is sharded like, None for the others."""
        positions = {label: i for i, label in enumerate(self.weight)}
        return tuple(positions.get(axis[:1]) for axis in axes)

    @property
    def stored(self) -> str:
        """The labels of the weight in the order in which it is stored."""
        turn = self.turn or range(len(self.weight))
        return "".join(label for _, label in sorted(zip(turn, self.weight)))

    @property
    def parts(self) -> Any:
        """Which axes of the stored weight A and B have: the same for two uses of it whose
        corrections are the same function of A and B."""
        position = {label: i for i, label in enumerate(self.stored)}
        parts = [
            [[position.get(x) for x in axis] for axis in axes]
            for axes in (self.a, self.b)
        ]
        extents = [self.extents[label] for label in self.stored]
        return self.turn is None, extents, parts, self.groups

    def seen(self, stored: jax.Array) -> jax.Array:
        """Arranges an array like the stored weight as this use has it."""
        extents = [self.extents[label] for label in self.stored]
        turn = self.turn or tuple(range(len(self.weight)))
        return stored.reshape(extents).transpose(turn)

    def delta(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Computes what the adapters add to the weight as it is stored, in float32."""
        a, b = (
            self.split(jnp.float32(x), axes) for x, axes in ((a, self.a), (b, self.b))
        )
        product = f"...{''.join(self.a)},...{''.join(self.b)}->...{self.stored}"
        return jnp.einsum(product, a, b, precision="highest") * self.scale
