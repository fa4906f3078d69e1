"""Search: which weight hurts, and which format each should have.

    sensitivity(...)    every weight quantized alone: how far the model's outputs move
    bisect(...)         the fewest weights that make up most of what quantizing all does, or
                        of what sets another model apart
    allocate(...)       a format for every weight, so that outputs move least for a number
                        of bits per weight, of bytes, or of milliseconds of a decoding step

All three run the model itself, on data, with one weight or some of them rounded, and return
a table that is also rules: `print` it, give `.rules` to a provider, or write `.to_yaml()`.

Errors are mean squared changes of the outputs, relative to the outputs; those of weights that
are quantized together are taken to add up, as they do while they are small. Rules know
modules, so layers that are stacked in one parameter (a scan) have one format, and so have all
weights that one module multiplies by.
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from midtread.algorithms.options import check_batches
from midtread.algorithms.program import Site, open_params, trace
from midtread.algorithms.stages import outputs
from midtread.kernels import measured
from midtread.model import flaxlib
from midtread.model.coverage import format_text, table
from midtread.model.rules import QuantizationRule
from midtread.numerics.formats import as_format, dtype_bits
from midtread.numerics.qarray import QArray, dequantize, quantize_by_spec
from midtread.numerics.spec import Spec


@dataclasses.dataclass(frozen=True)
class Choice:
    """One weight in one format."""

    weight: str  # 'decoder/layers/mlp/wo/kernel'
    modules: tuple[str, ...]  # that multiply by it, as rules know them
    format: str
    tile_size: int | None
    bits: float  # per element, scales included
    size: int  # elements
    error: float  # of the outputs, this weight alone quantized
    loss: float | None  # what the loss grows by, if one was given

    @property
    def rule(self) -> QuantizationRule:
        path = "|".join(map(_literal, self.modules))
        if self.format == "float":
            return QuantizationRule(module_path=path)
        return QuantizationRule(
            module_path=path,
            weight_qtype=self.format,
            tile_size=self.tile_size,
        )


def _literal(path: str) -> str:
    """A regular expression for this path alone."""
    return "".join(c if c.isalnum() or c in "_/" else f"\\{c}" for c in path)


@dataclasses.dataclass(frozen=True)
class Table:
    """Choices, the one that matters most first."""

    choices: tuple[Choice, ...]
    says: str

    @property
    def rules(self) -> list[QuantizationRule]:
        """A rule per module, for a PtqProvider."""
        rules = [c.rule for c in self.choices]
        return list({rule.module_path: rule for rule in rules}.values())

    def to_yaml(self) -> str:
        """The rules as `load_rules` reads them."""
        import yaml

        fields = ("module_path", "weight_qtype", "tile_size")
        listed = [
            {k: getattr(r, k) for k in fields if getattr(r, k) is not None}
            for r in self.rules
        ]
        return yaml.safe_dump(listed, sort_keys=False)

    @property
    def bits(self) -> float:
        """Bits per weight, of all together."""
        return sum(c.bits * c.size for c in self.choices) / sum(
            c.size for c in self.choices
        )

    def __str__(self) -> str:
        lines = [["weight", "format", "bits", "elements", "error", "loss"]]
        for c in self.choices:
            name = c.format + (f"/{c.tile_size}" if c.tile_size else "")
            grown = "" if c.loss is None else f"{c.loss:+.3g}"
            lines.append(
                [
                    c.weight,
                    name,
                    f"{c.bits:.2f}",
                    f"{c.size:,}",
                    f"{c.error:.3g}",
                    grown,
                ]
            )
        return "\n".join([table(lines, {2, 3, 4, 5}), "", self.says])


class _Model:
    """A program that runs with some weights rounded."""

    def __init__(self, model, batches, loss, params, method):
        self.batches = check_batches(batches, shapes_vary=True)
        if isinstance(model, nn.Module) and "params" not in (params or ()):
            raise ValueError(
                "a Linen model needs its variables: params={'params': ...}."
            )
        self.program, self.floats = trace(
            model, self.batches[0], params=params, method=method
        )
        if not self.program.sites:
            raise ValueError("no weight of this model meets a matmul: nothing to try.")
        self.loss = loss
        self.sites: dict[tuple, list[Site]] = {}
        for site in self.program.sites:
            self.sites.setdefault(site.path, []).append(site)
        self._run = jax.jit(functools.partial(outputs, self.program))
        self.wanted = [self._outputs({}, batch) for batch in self.batches]

    def _outputs(self, changed: dict, batch) -> list[Any]:
        return self._run({**self.floats, **changed}, self.program.arrays(batch))

    def judge(self, changed: dict) -> tuple[float, float | None]:
        """(error of the outputs, growth of the loss) with parameters changed."""
        error, grown = 0.0, 0.0
        for batch, wanted in zip(self.batches, self.wanted):
            got = self._outputs(changed, batch)
            pairs = [
                (a, b)
                for a, b in zip(wanted, got)
                if jnp.issubdtype(jnp.result_type(a), jnp.floating)
            ]
            gap = sum(float(jnp.sum(jnp.square(a - b))) for a, b in pairs)
            error += gap / max(
                sum(float(jnp.sum(jnp.square(a))) for a, _ in pairs), 1e-30
            )
            if self.loss is not None:
                whole = lambda outs: jax.tree.unflatten(self.program.result, outs)
                grown += float(self.loss(whole(got), batch)) - float(
                    self.loss(whole(wanted), batch)
                )
        count = len(self.batches)
        return error / count, None if self.loss is None else grown / count

    def weights_of(self, other: Any, params: Any) -> dict[tuple, jax.Array]:
        """{path: float array} of another model's parameters that are weights here."""
        if isinstance(other, nnx.Module):
            if params is not None:
                raise ValueError(
                    "the other model is an NNX module, which holds its parameters: leave out "
                    "other_params."
                )
            at = functools.partial(flaxlib.value_at, other)
        elif params is None:
            raise ValueError(
                "the other model's weights are not in it: give other_params=..., too."
            )
        elif isinstance(other, nn.Module):
            at = functools.partial(flaxlib.value_at, params["params"])
        else:
            at = open_params(params)[0].get
        weights = {}
        for path in self.sites:
            w = self.floats[path]
            box = flaxlib.unbox(at(path))
            box = getattr(box, "array", box)  # of a WithAux
            theirs = dequantize(box, w.dtype) if isinstance(box, QArray) else box
            if getattr(theirs, "shape", None) != w.shape:
                raise ValueError(
                    f"{'/'.join(map(str, path))} is {w.shape} in the first model and "
                    f"{getattr(theirs, 'shape', 'missing')} in the other: they are not of "
                    "one structure."
                )
            weights[path] = theirs.astype(w.dtype)
        return weights

    def modules(self, path: tuple) -> tuple[str, ...]:
        """The paths, as rules know them, of what multiplies by a weight."""
        return tuple(dict.fromkeys(site.module for site in self.sites[path]))

    def bundles(self) -> list[list[tuple]]:
        """Weights that rules tell apart: those that a module has in common are in one list."""
        bundles: list[list[tuple]] = []
        for path in self.sites:
            own = set(self.modules(path))
            meets = lambda b, own=own: any(own & set(self.modules(p)) for p in b)
            same = [b for b in bundles if meets(b)]
            bundles = [b for b in bundles if b not in same]
            bundles.append([*(p for b in same for p in b), path])
        return bundles

    def rounded(self, path: tuple, qtype: Any, tile: int | None):
        """(the parameter rounded to nearest, bits per element)."""
        site, w = self.sites[path][0], self.floats[path]
        back = tuple(site.turn.index(a) for a in range(len(site.turn)))
        fmt = as_format(qtype)
        tile = fmt.tile if tile is None else tile
        spec = Spec(fmt, ("kept",), {} if tile is None else {"summed": tile})
        placed = site.c.number_axes(spec, site.side, site.shape)
        assert placed is not None
        stored = placed.transposed(back)
        stacked = len(site.layer)
        shape = (*w.shape[:stacked], *site.stored_shape)
        quantize = functools.partial(_round_trip, spec=stored)
        for _ in range(stacked):
            quantize = jax.vmap(quantize)
        rounded = jax.jit(quantize)(w.reshape(shape)).reshape(w.shape)
        parts = jax.eval_shape(
            functools.partial(quantize_by_spec, spec=stored),
            jax.ShapeDtypeStruct(site.stored_shape, w.dtype),
        )
        scales = parts.scale.size * dtype_bits(parts.scale.dtype)
        bits = fmt.bits + scales / max(1, parts.qvalue.size)
        return rounded, bits


def _round_trip(x: jax.Array, spec: Spec) -> jax.Array:
    return dequantize(quantize_by_spec(x, spec))


def _tried(runner: _Model, formats: Sequence[Any]) -> dict[tuple, list[Choice]]:
    """{path: a choice per format} of every weight."""
    choices: dict[tuple, list[Choice]] = {}
    for path in runner.sites:
        for qtype in formats:
            name, tile = qtype if isinstance(qtype, tuple) else (qtype, None)
            w, bits = runner.rounded(path, name, tile)
            error, grown = runner.judge({path: w})
            choice = Choice(
                "/".join(map(str, path)),
                runner.modules(path),
                as_format(name).name,
                as_format(name).tile if tile is None else tile,
                bits,
                w.size,
                error,
                grown,
            )
            choices.setdefault(path, []).append(choice)
    return choices


def sensitivity(
    model: Any,
    batches: Iterable[Any],
    weight_qtype: Any = "int4",
    tile_size: int | None = None,
    *,
    loss: Callable[[Any, Any], jax.Array] | None = None,
    params: Any = None,
    method: str = "__call__",
) -> Table:
    """How far the model's outputs move when one weight alone is rounded, for each weight.

    >>> from flax import nnx
    >>> model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    >>> table = sensitivity(model, [jnp.ones((4, 16))], "int4")
    >>> table.choices[0].weight, table.choices[0].error < 0.1
    ('kernel', True)

    Args:
        model: an NNX module, or a Linen one with its variables in `params`.
        batches: inputs as the method takes them.
        weight_qtype: the format that weights are rounded to.
        tile_size: how many elements of the summed axis share a scale; None for all.
        loss: of (outputs, a batch): its growth is told beside the error.
        params: the variables of a Linen module.
        method: the method that is called with a batch.

    Returns:
        A table, the weight that hurts most first. Its rules quantize all of them.

    Raises:
        ValueError: no batches, or a model that cannot be traced in a straight line.
    """
    runner = _Model(model, batches, loss, params, method)
    choices = [c for (c,) in _tried(runner, [(weight_qtype, tile_size)]).values()]
    choices.sort(key=lambda c: -c.error)
    total = sum(c.error for c in choices)
    says = f"{len(choices)} weights, each alone: together {total:.3g} of the outputs"
    return Table(tuple(choices), says)


def bisect(
    model: Any,
    batches: Iterable[Any],
    weight_qtype: Any = None,
    tile_size: int | None = None,
    *,
    other: Any = None,
    share: float = 0.5,
    params: Any = None,
    other_params: Any = None,
    method: str = "__call__",
) -> Table:
    """The fewest weights that make up `share` of what sets two models apart.

    The second model is the first one with all weights rounded to a format, or `other`: one
    that was quantized by whatever means, or trained further. Weights are tried in the order
    of what each alone does to the outputs.

    >>> from flax import nnx
    >>> model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    >>> len(bisect(model, [jnp.ones((4, 16))], "int4").choices)
    1

    Args:
        model, batches: as for `sensitivity`.
        weight_qtype, tile_size: what all weights are rounded to; None: "int4".
        other: a model of the same structure to compare with, instead of a format.
        share: of the outputs' error, between 0 and 1: with the weights found back as they
            were and all others changed, no more than 1 - share of it is left.
        params, method: as for `sensitivity`.
        other_params: the variables of `other`, where it is a Linen module.

    Returns:
        A table of those weights, whose rules leave them in float. Put them before the rules
        that quantize the rest.

    Raises:
        ValueError: no batches, a share that is none, a format beside another model, or a
            model whose weights are not those of the first.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share={share} lies between 0 and 1.")
    if other is not None and (weight_qtype is not None or tile_size is not None):
        raise ValueError(
            "bisect compares with another model or with a format: leave out `other`, or "
            "weight_qtype and tile_size."
        )
    runner = _Model(model, batches, None, params, method)
    if other is None:
        asked = weight_qtype or "int4", tile_size
        changed = {p: runner.rounded(p, *asked)[0] for p in runner.sites}
        tried = {p: c for p, (c,) in _tried(runner, [asked]).items()}
    else:
        changed = runner.weights_of(other, other_params)
        tried = {p: _changed(runner, p, w) for p, w in changed.items()}
    alone = lambda bundle: -sum(tried[p].error for p in bundle)
    order = sorted(runner.bundles(), key=alone)
    whole, _ = runner.judge(changed)
    left = lambda count: runner.judge({p: changed[p] for b in order[count:] for p in b})[0]  # fmt: skip
    # With `low` weights as they were the error is too large, with `high` small enough.
    low, high = 0, len(order)
    while high - low > 1:
        middle = (low + high) // 2
        is_enough = left(middle) <= (1 - share) * whole
        low, high = (low, middle) if is_enough else (middle, high)
    chosen = tuple(
        dataclasses.replace(tried[p], format="float", tile_size=None, bits=16.0)
        for bundle in order[:high]
        for p in bundle
    )
    says = (
        f"{len(chosen)} of {len(tried)} weights make up {100 * share:.0f}% of an error of "
        f"{whole:.3g}"
    )
    return Table(chosen, says)


def _changed(runner: _Model, path: tuple, w: jax.Array) -> Choice:
    """One weight of another model, in the first."""
    error, _ = runner.judge({path: w})
    name = "/".join(map(str, path))
    return Choice(
        name, runner.modules(path), "float", None, 16.0, w.size, error, None
    )  # fmt: skip


def allocate(
    model: Any,
    batches: Iterable[Any],
    formats: Sequence[Any] = (("int4", 64), "int8"),
    *,
    bits: float | None = None,
    nbytes: float | None = None,
    milliseconds: float | None = None,
    device: str | None = None,
    rows: int = 1,
    params: Any = None,
    method: str = "__call__",
) -> Table:
    """A format for every weight, so that outputs move least for a budget.

    Every weight begins in its smallest format; the step to a larger one that removes most
    error per bit is taken until the budget is spent.

    >>> from flax import nnx
    >>> model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    >>> table = allocate(model, [jnp.ones((4, 16))], ["int4", "int8"], bits=11)
    >>> table.choices[0].format
    'int8'

    Args:
        model: an NNX module, or a Linen one with its variables in `params`.
        batches: inputs as the method takes them.
        formats: to choose from: names, or pairs (name, tile size).
        bits: per weight, scales included, in the mean over all weights.
        nbytes: of all weights together, scales included, instead of `bits`.
        milliseconds: of a step of decoding, all weights together, instead of `bits`: by the
            measured times of kernels/measured.py.
        device: the kind that milliseconds are meant for, as JAX calls it ("NVIDIA H200");
            None: the one here.
        rows: how many sequences are decoded at once, for milliseconds.
        params: the variables of a Linen module.
        method: the method that is called with a batch.

    Returns:
        A table with the choice for every weight; its rules are for a PtqProvider.

    Raises:
        ValueError: the budget is less than the smallest formats take, or is not one.
    """
    budgets = {"bits": bits, "nbytes": nbytes, "milliseconds": milliseconds}
    given = {name: budget for name, budget in budgets.items() if budget is not None}
    if len(given) != 1:
        raise ValueError(
            "allocate needs one budget: bits=... per weight, nbytes=... or milliseconds=..."
        )
    if milliseconds is None and device is not None:
        raise ValueError(f"device={device!r} is for a budget in milliseconds.")
    if isinstance(formats, str) or not formats:
        raise ValueError(
            f"formats={formats!r}: give a list to choose from, as in ['int4', 'int8']."
        )
    ((unit, room),) = given.items()
    if not isinstance(room, numbers.Real) or math.isnan(room):
        raise ValueError(f"{unit}={room!r} is no budget: give a number.")
    kind = device or jax.devices()[0].device_kind
    if unit == "milliseconds":
        for name in formats:  # refused before anything is run
            _milliseconds(kind, name[0] if isinstance(name, tuple) else name, 1, rows)
    runner = _Model(model, batches, None, params, method)
    tried = _tried(runner, formats)
    size = sum(cs[0].size for cs in tried.values())
    # What a choice costs, in the unit of the budget.
    prices = {
        "bits": lambda c: c.bits * c.size / size,
        "nbytes": lambda c: c.bits * c.size / 8,
        "milliseconds": lambda c: _milliseconds(kind, c.format, c.size, rows),
    }
    # Weights of one module, which rules do not tell apart, change their format together.
    bundles = [
        [tuple(choices) for choices in zip(*(tried[p] for p in bundle))]
        for bundle in runner.bundles()
    ]
    price = lambda bundle: sum(map(prices[unit], bundle))
    error = lambda bundle: sum(c.error for c in bundle)
    now = [min(bs, key=lambda b: (price(b), error(b))) for bs in bundles]
    spent = sum(map(price, now))
    if spent > room:
        what = {"bits": "bits a weight, scales included", "nbytes": "bytes in all"}
        raise ValueError(
            f"{unit}={room} are too few: the smallest of {list(formats)} take "
            f"{spent:.4g} {what.get(unit, unit)}. Give more, smaller formats, or larger tiles."
        )
    while True:
        steps = [
            ((error(old) - error(b)) / max(price(b) - price(old), 1e-30), i, b)
            for i, old in enumerate(now)
            for b in bundles[i]
            if price(b) >= price(old)
            and error(b) < error(old)
            and spent + price(b) - price(old) <= room
        ]
        if not steps:
            break
        _, i, bundle = max(steps, key=lambda step: step[0])
        spent += price(bundle) - price(now[i])
        now[i] = bundle
    listed = [c for bundle in now for c in bundle]
    choices = tuple(sorted(listed, key=lambda c: -c.error))
    bits_now = sum(c.bits * c.size for c in choices)
    says = f"{bits_now / size:.2f} bits a weight, {bits_now / 8:,.0f} bytes, "
    if unit == "milliseconds":
        says += f"{spent:.3g} ms a step of {kind} with {rows} rows, "
    return Table(choices, f"{says}errors add to {error(choices):.3g}")


def _milliseconds(kind: str, fmt: Any, size: int, rows: int) -> float:
    return measured.milliseconds(kind, format_text(as_format(fmt)), size, rows)
