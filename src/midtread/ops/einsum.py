"""Einsum: subscripts to a sequence of contractions.

Two operands are one contraction. More are taken two at a time along JAX's own path. A
label that only one operand has, and the output does not, is summed before anything else.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from midtread.numerics import views
from midtread.numerics.qarray import QArray, dequantize
from midtread.ops.contraction import Dot

Operand = jax.Array | QArray


def parse(subscripts: Any, operands: Sequence[Any]):
    """Returns (terms, output, operands), with a label for every axis and the output written out.

    >>> x, w = jnp.ones((2, 3, 4)), jnp.ones((4, 5))
    >>> parse("...d,df", (x, w))[:2]
    (('ABd', 'df'), 'ABf')
    """
    if not isinstance(subscripts, str):
        subscripts, operands = _from_sublists((subscripts, *operands))
    inputs, arrow, output = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(operands):
        raise ValueError(
            f"einsum {subscripts!r} names {len(terms)} operands, got {len(operands)}."
        )
    unused = [
        c for c in map(chr, (*range(65, 91), *range(192, 700))) if c not in subscripts
    ]
    ranks = [x.ndim - len(t.replace("...", "")) for t, x in zip(terms, operands)]
    widest = max((r for t, r in zip(terms, ranks) if "..." in t), default=0)
    dots = "".join(unused[:widest])
    for term, rank in zip(terms, ranks):
        if rank < 0 or (rank > 0 and "..." not in term):
            raise ValueError(
                f"einsum {subscripts!r}: term {term!r} does not fit its operand's rank."
            )
    terms = tuple(
        t.replace("...", dots[widest - r :] if r else "") for t, r in zip(terms, ranks)
    )
    if arrow:
        output = output.replace("...", dots)
    else:
        flat = "".join(terms)
        output = dots + "".join(
            sorted(x for x in set(flat) - set(dots) if flat.count(x) == 1)
        )
    if set(output) - set("".join(terms)) or len(set(output)) < len(output):
        raise ValueError(
            f"einsum {subscripts!r}: output {output!r} has unknown or repeated labels."
        )
    for term in terms:
        if len(set(term)) < len(term):
            raise NotImplementedError(
                f"einsum {subscripts!r}: {term!r} repeats a label (a diagonal). Take the "
                "diagonal with jnp.diagonal first."
            )
    return terms, output, tuple(operands)


def in_jax_order(subscripts: Any, *operands: Any) -> tuple[Any, ...]:
    """Puts two operands in the order in which jnp.einsum multiplies them: as given if the
    output's axes come out in order that way, else swapped.

    >>> x = jnp.ones((2, 2, 2, 2))
    >>> in_jax_order("bhqk,bkhd->bqhd", x, x)[0]
    'bkhd,bhqk->bqhd'
    """
    terms, output, operands = parse(subscripts, operands)
    if len(terms) == 2:
        batch = [x for x in output if all(x in term for term in terms)]
        alone = [x for term in terms for x in term if x in output and x not in batch]
        if "".join(batch + alone) != output:
            terms, operands = terms[::-1], operands[::-1]
    return (f"{','.join(terms)}->{output}", *operands)


def _from_sublists(args):
    """Writes the arguments of einsum(x, [0, 1], y, [1, 2], [0, 2]) as a string and operands."""
    operands, lists = list(args[0::2]), list(args[1::2])
    output = operands.pop() if len(args) % 2 else None
    name = lambda labels: "".join(
        "..." if i is Ellipsis else chr(97 + int(i)) for i in labels
    )
    text = ",".join(map(name, lists))
    return (text if output is None else f"{text}->{name(output)}"), operands


def einsum(
    execute: Callable, subscripts, operands, optimize: Any, options: dict
) -> jax.Array:
    """Runs `execute(contraction, lhs, rhs)` for each pair of the path."""
    terms, output, operands = parse(subscripts, operands)
    operands = list(broadcast(terms, operands))
    terms = list(terms)
    preferred = options.get("preferred")
    for pair in _path(terms, output, operands, optimize):
        chosen = [(terms[i], operands[i]) for i in pair]
        for i in sorted(pair, reverse=True):
            del terms[i], operands[i]
        last = not terms
        needed = set(output).union(*terms)
        # Equal terms of one letter are one object, so that only their places tell them apart.
        others = [
            [u for j, (u, _) in enumerate(chosen) if j != i] for i in range(len(chosen))
        ]
        chosen = [
            _presum(t, x, needed.union(*rest)) for (t, x), rest in zip(chosen, others)
        ]
        if len(chosen) == 1:
            term, out = chosen[0]
            out = _plain(out)
        else:
            (l_term, lhs), (r_term, rhs) = chosen
            kept = dict.fromkeys(x for x in l_term + r_term if x in needed)
            term = output if last else "".join(kept)
            own = options if last else {**options, "out_sharding": None}
            out = execute(binary(l_term, r_term, term, own), lhs, rhs)
        terms.append(term)
        operands.append(out)
    (term,), (out,) = terms, operands
    out = _plain(out)
    if term != output:
        out = jnp.einsum(f"{term}->{output}", out)
    return out if preferred is None else out.astype(preferred)


def _plain(x: Operand) -> jax.Array:
    return dequantize(x) if isinstance(x, QArray) else x


def _path(terms, output, operands, optimize):
    if len(terms) <= 2:
        return [tuple(range(len(terms)))]
    # Sizes only weigh one path against another, so a symbolic one counts as 1.
    sizes = [tuple(n if isinstance(n, int) else 1 for n in x.shape) for x in operands]
    shapes: list[Any] = [jax.ShapeDtypeStruct(s, jnp.float32) for s in sizes]
    steps = jnp.einsum_path(f"{','.join(terms)}->{output}", *shapes, optimize=optimize)[
        0
    ]
    steps = [s for s in steps if isinstance(s, tuple)]
    return [pair for step in steps for pair in _pairs(step)]


def _pairs(step):
    """Splits a step over many operands (optimize=False) into steps over two."""
    if len(step) <= 2:
        return [step]
    return [(0, 1)] + [(0, len(step) - 2 - i) for i in range(len(step) - 2)]


def _presum(term: str, x: Operand, needed: set[str]):
    """Sums away the labels that neither another operand nor the output has."""
    alone = [a for a, label in enumerate(term) if label not in needed]
    if not alone:
        return term, x
    return "".join(label for label in term if label in needed), jnp.sum(
        _plain(x), axis=tuple(alone)
    )


def binary(lhs: str, rhs: str, out: str, options: dict) -> Dot:
    """Builds the contraction of two terms, given fields such as its precision."""
    summed = [x for x in lhs if x in rhs and x not in out]
    # Each operand is tiled along the summed label that comes last in its own order.
    last = lambda term: next((x for x in reversed(term) if x in summed), None)
    return Dot(tuple(lhs), tuple(rhs), tuple(out), (last(lhs), last(rhs)), **options)


def broadcast(terms, operands):
    """Repeats an operand whose extent is 1, or divides the others', on a shared label."""
    extents: dict[str, Any] = {}
    for term, x in zip(terms, operands):
        for label, n in zip(term, x.shape):
            known = extents.get(label, 1)
            both = isinstance(n, int) and isinstance(known, int)
            grows = isinstance(known, int) and known == 1
            if grows or (both and n > known and n % known == 0):
                extents[label] = n
    for term, x in zip(terms, operands):
        shape = tuple(extents[label] for label in term)
        yield x if tuple(x.shape) == shape else _repeat(x, shape)


def _repeat(x: Operand, shape) -> Operand:
    if not isinstance(x, QArray):
        return views.expand(x, shape)
    if x.logical is not None or x.pre_rotation is not None:
        return views.expand(dequantize(x), shape)
    grown = lambda n, axis: n * shape[axis] // x.qvalue.shape[axis] if n > 1 else 1
    parts = {
        name: views.expand(part, [grown(n, axis) for axis, n in enumerate(part.shape)])
        for name in ("scale", "zero_point", "pre_scale")
        if (part := getattr(x, name)) is not None
    }
    return dataclasses.replace(x, qvalue=views.expand(x.qvalue, shape), **parts)
