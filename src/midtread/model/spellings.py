"""Spellings: the matmuls that are a dot_general by another name.

`x @ w`, jnp.dot, jnp.matmul, jnp.inner, jnp.tensordot and lax.dot all multiply two arrays and
sum over some of their axes. A provider handles dot_general alone, so that while a model runs
a call of any of these becomes a call of lax.dot_general. Most of them differ only in the axes
that they sum over, which the column `numbers` of the table in caught.py gives.

    as_dot_general("dot", a, b)    returns ((a, b, dimension numbers), options)
    multiply_boxes("dot", (a, b))  multiplies quantized parameters, which JAX would refuse
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from midtread.model.caught import OPS


def as_dot_general(name: str, a: Any, b: Any, *rest, **options):
    """Translates a call to lax.dot_general's arguments, or returns None to leave it to JAX."""
    if name == "tensordot":
        numbers = _tensordot_numbers(a, b, *rest, axes=options.pop("axes", None))
        return (a, b, numbers), options
    if name == "matmul" and b.ndim > 2:
        return None
    if name == "lax_dot" and options.pop("dimension_numbers", None) is not None:
        return None
    if a.ndim == 0 or b.ndim == 0 or rest:
        return None
    numbers = OPS[name].numbers
    assert numbers is not None  # only tensordot has none, and it returned above
    return (a, b, numbers(a.ndim, b.ndim)), options


def _tensordot_numbers(a, b, *rest, axes):
    axes = rest[0] if rest else 2 if axes is None else axes
    if isinstance(axes, int):
        lhs, rhs = tuple(range(a.ndim - axes, a.ndim)), tuple(range(axes))
    else:
        lhs, rhs = ((x,) if isinstance(x, int) else tuple(x) for x in axes)
    return (tuple(i % a.ndim for i in lhs), tuple(i % b.ndim for i in rhs)), ((), ())


def vecdot(x1: Any, x2: Any, /, *, axis: int = -1, **options) -> Any:
    """Multiplies as jnp.vecdot does, by jnp.matmul. JAX's own maps a jit over single vectors,
    where a weight is not known any more."""
    if axis != -1:
        x1, x2 = (jnp.moveaxis(x, axis, -1) for x in (x1, x2))
    if not hasattr(x1, "array") and jnp.iscomplexobj(x1):
        x1 = jnp.conj(x1)
    out = jnp.matmul(jnp.expand_dims(x1, -2), jnp.expand_dims(x2, -1), **options)
    return jnp.squeeze(out, (-2, -1))


def multiply_boxes(name: str, args: tuple, kwargs: dict) -> Any:
    """Multiplies boxes, which the function of JAX's called `name` would refuse."""
    spelled = as_dot_general(name, *args, **kwargs)
    if spelled is None:
        return _matmul(*args, **kwargs)
    arguments, options = spelled
    return lax.dot_general(*arguments, **options)


def _matmul(a: Any, b: Any, **options) -> Any:
    """Multiplies as jnp.matmul does where b has batch axes, by the dot_general that jnp.matmul
    makes of it: a rule, its static scales and adapters are the same for float and for codes."""
    a_matrix, b_matrix = a.ndim > 1, b.ndim > 1
    fronts = a.shape[:-2], b.shape[:-2]
    count = max(map(len, fronts))
    batch, alone, absent = [], ([], []), ([], [])
    for i in range(count):
        axes = [i - (count - len(front)) for front in fronts]
        sizes = [f[axis] if axis >= 0 else None for f, axis in zip(fronts, axes)]
        are_one = [size == 1 and None not in sizes for size in sizes]
        for side in (0, 1):
            if are_one[side]:
                absent[side].append(axes[side])
        if all(are_one):
            continue
        if None in sizes or any(are_one):
            alone[are_one[0] or sizes[0] is None].append(i)
        else:
            batch.append(i)
    a, b = (lax.squeeze(x, gone) if gone else x for x, gone in zip((a, b), absent))
    order = [sorted([*batch, *alone[side]]) for side in (0, 1)]
    paired = [[order[side].index(i) for i in batch] for side in (0, 1)]
    summed = (a.ndim - 1,), (b.ndim - 1 - b_matrix,)
    out = lax.dot_general(a, b, (summed, tuple(map(tuple, paired))), **options)
    last = [*[count] * a_matrix], [*[count + 1] * b_matrix]
    come = [*batch, *alone[0], *last[0], *alone[1], *last[1]]
    out = lax.transpose(out, sorted(range(len(come)), key=come.__getitem__))
    both = [i for i in range(count) if i not in come]
    return lax.expand_dims(out, both) if both else out
