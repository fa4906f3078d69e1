"""Split: a layer works on parts of the batch in turn, so that one part's transfers can
hide behind another part's arithmetic.

    attention(part 0)  attention(part 1)  mlp(part 0)  mlp(part 1)
                       tokens of part 0 travel to their experts meanwhile

Weights are gathered once per layer, for all parts. Row r of the batch belongs to part
r mod parts, so every device has rows of each. A barrier between neighbours keeps the order:
without it XLA merges the parts again. The loss is that of the whole batch: the router's
loads are added up before they are multiplied. Ranges of gradients are those of a part.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from midtread.lm import mesh as meshes


def parts() -> int:
    """Returns the number of parts of a batch in the current layout."""
    layout = meshes.current()
    return layout.split if layout else 1


def cut(tree: Any, count: int) -> list[Any]:
    """Cuts a `tree` of arrays [B, ...] into `count` parts."""
    take = lambda a, i: a.reshape(-1, count, *a.shape[1:])[:, i]
    keep = meshes.keep_rows
    return [jax.tree.map(lambda a, i=i: keep(take(a, i)), tree) for i in range(count)]


def join(arrays: Sequence[jax.Array]) -> jax.Array:
    """Puts parts together again, in their old order."""
    together = jax.numpy.stack(arrays, axis=1)
    return meshes.keep_rows(together.reshape(-1, *arrays[0].shape[1:]))


def staggered(run: Callable[[Any], Any], inputs: Sequence[Any]) -> list[Any]:
    """Returns run(x) of every x, each begun when the one before is done."""
    outputs, waiting = [], list(inputs)
    for i in range(len(waiting)):
        out = run(waiting[i])
        if i + 1 < len(waiting):
            out, waiting[i + 1] = jax.lax.optimization_barrier((out, waiting[i + 1]))
        outputs.append(out)
    return outputs
