"""Wanted: which implementation was asked for, and what can run where a model is traced.

`implementation` (environment.py) asks, for all that is traced within it. Whoever chooses (choose.py,
choose_weights.py) collects a reason why a kernel cannot run: the device (`why_no_gpu`), how
operands are laid out (`why_not_here`), then what the kernel itself says. `taken` settles it:
no reason, and it is taken; a reason, and XLA does it, unless "gpu" was insisted on.
"""

import jax
from jax.sharding import AxisType

from midtread.kernels.environment import here, implementation

__all__ = ["implementation"]

SYMBOLIC = "an extent is not known: jax.export with symbolic shapes is left to XLA"


def name() -> str | None:
    return here().asked


def why_no_gpu(hopper: bool) -> str | None:
    """Why our kernels cannot run where this is being traced for; None if they can."""
    return here().why_not("hopper" if hopper else "nvidia")


def taken(reason: str | None, what: str) -> bool:
    """Whether to take a kernel; an explicit wish that cannot be met is an error."""
    if reason is not None and name() == "gpu":
        raise ValueError(
            f"implementation='gpu' cannot run {what}: {reason}. "
            "Write implementation(None) to leave the choice to Midtread."
        )
    return reason is None


def why_not_here(*operands) -> str | None:
    """Why kernels cannot take operands that are laid out as these are."""
    parts = [p for x in operands for p in jax.tree.leaves(x)]
    if is_explicit(*parts):
        return "its operands are laid out over a mesh with explicit axes"
    return None if is_static(*parts) else SYMBOLIC


def is_static(*arrays) -> bool:
    return all(isinstance(n, int) for x in arrays for n in x.shape)


def is_explicit(*arrays) -> bool:
    """Laid out over mesh axes that are part of the type, which kernels do not follow."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    return any(AxisType.Explicit in getattr(m, "axis_types", ()) for m in meshes)


def is_alone() -> bool:
    """One device, or inside shard_map: what is seen here is all there is."""
    return not here().is_split or is_interpreted()


def is_interpreted() -> bool:
    return here().is_interpreted
