"""Rules: where to quantize, and how.

A rule has a key and a value. The key is a regular expression that must match a whole
module path ("encoder/layers/3/mlp", "" for the root) and, optionally, names of ops. The
first rule whose key matches decides; later ones are not looked at. A rule without a
`weight_qtype` or an `act_qtype` therefore means: leave this alone.

Rules are plain data. `as_rules` also takes dicts, as they come out of YAML or JSON:

>>> as_rules([{"module_path": "mlp/.*", "weight_qtype": "int8"}])[0].weight_qtype
'int8'
"""

import dataclasses
import difflib
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from midtread.numerics import calibration
from midtread.numerics.formats import as_format
from midtread.numerics.rounding import ROUNDINGS
from midtread.ops.recipe import Recipe
from midtread.ops.recipe import recipe as named_recipe

FORMATS = ("weight_qtype", "act_qtype", "bwd_qtype")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationRule:
    """One scale per channel unless tiled; absmax unless calibrated otherwise.

    Args:
        module_path: regular expression that a whole module path must match.
        op_names: ops it applies to ("dot_general", "einsum", ...); empty for all.
        weight_qtype: format of weights; None leaves them in float.
        act_qtype: format of activations; None leaves them in float.
        tile_size: neighbours along the summed axis that share a scale; a float is a
            fraction of the axis, a mapping {axis: size} tiles those axes.
        act_static_scale: one scale found beforehand instead of one per call.
        weight_calibration_method, act_calibration_method: see numerics/calibration.py.
        act_batch_axes: axes that static ranges are averaged over.
    """

    module_path: str = ".*"
    op_names: Collection[str] = ()
    weight_qtype: Any = None
    act_qtype: Any = None
    tile_size: Any = None
    act_static_scale: bool | None = None
    weight_calibration_method: str = "absmax"
    act_calibration_method: str | None = None
    act_batch_axes: Collection[int] = (0,)

    def __post_init__(self):
        try:
            re.compile(self.module_path)
        except re.error as error:
            raise ValueError(
                f"module_path {self.module_path!r} is not a regular expression: {error}."
            ) from None
        if isinstance(self.op_names, str):
            raise TypeError(
                f"op_names takes several names: write ({self.op_names!r},)."
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_qtype") and value is not None:
                as_format(value)
            if field.name.endswith("_calibration_method") and value is not None:
                calibration.parse(value)
            if field.name.endswith("tile_size"):
                _check_tile(field.name, value)

    def matches(self, path: str, op_name: str) -> bool:
        if self.op_names and op_name not in self.op_names:
            return False
        return re.fullmatch(self.module_path, path) is not None

    @property
    def tiles(self) -> dict:
        """`tile_size` as a Spec's tiled_axes."""
        if isinstance(self.tile_size, Mapping):
            return dict(self.tile_size)
        return {"summed": self.tile_size} if self.tile_size else {}


def _check_tile(name: str, value: Any) -> None:
    """A number of elements, a fraction of the axis, or a mapping to these; None or 0: none."""
    for size in value.values() if isinstance(value, Mapping) else (value,):
        if size is None:
            continue
        if not isinstance(size, numbers.Real) or isinstance(size, bool):
            raise TypeError(f"{name}={value!r} is not a number: write {name}=128, say.")
        if float(size) < 0:
            raise ValueError(f"{name}={value!r} is below 0.")
        if float(size) > 1 and not isinstance(size, numbers.Integral):
            raise ValueError(
                f"{name}={value!r} is not a whole number, and only up to 1.0 is it a part of "
                f"the axis: write {round(float(size))} for so many elements."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class QtRule(QuantizationRule):
    """A rule for training. Without `bwd_qtype` the backward stays in float (QAT).

    Args:
        bwd_qtype: format of gradients in both backward matmuls.
        bwd_weight_grad_tile_size: tiles of the sum that gives a weight's gradient.
        disable_channelwise_axes: one scale per tensor, in all three matmuls.
        bwd_stochastic_rounding: a rounding for gradients; needs the random stream
            'stochastic_rounding'.
        channelwise_noise_axes: axes with a noise of their own, for Qwix's two methods.
        additional_qt_config: overrides by the names of Qwix's DotGeneralQtConfig.
        recipe: the whole recipe instead, or the name of one (mt.recipe).
    """

    bwd_qtype: Any = None
    bwd_calibration_method: str = "absmax"
    bwd_weight_grad_tile_size: int | float | None = None
    disable_channelwise_axes: bool = False
    bwd_stochastic_rounding: str | None = None
    channelwise_noise_axes: Sequence[int] = (0,)
    additional_qt_config: Mapping[str, Any] | None = None
    recipe: Recipe | str | None = None

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.recipe, str):
            object.__setattr__(self, "recipe", named_recipe(self.recipe))
        beside = [n for n in FORMATS if self.recipe and getattr(self, n) is not None]
        if beside:
            raise ValueError(
                f"a rule with a recipe has its formats from there: leave out {beside[0]}, or "
                "the recipe."
            )
        if self.bwd_stochastic_rounding not in (None, *ROUNDINGS):
            raise ValueError(
                f"unknown bwd_stochastic_rounding {self.bwd_stochastic_rounding!r}. "
                f"There are: {', '.join(ROUNDINGS[1:])}."
            )


def did_you_mean(
    asked: Any,
    known: Iterable[str],
    show: Callable[[str], str] = repr,
    otherwise: str | None = None,
) -> str:
    """The end of an error: the nearest name there is, or else all of them.

    >>> did_you_mean("wieght", ["act", "weight"]), did_you_mean("x", ["act", "weight"])
    ("Did you mean 'weight'?", 'There are: act, weight.')
    """
    known = list(known)
    if near := difflib.get_close_matches(str(asked), known, 1, 0.5):
        return f"Did you mean {show(near[0])}?"
    return f"There are: {', '.join(known)}." if otherwise is None else otherwise


def as_rules(rules: Iterable[Any], kind: type = QuantizationRule) -> list[Any]:
    """Rules from rules or dicts; a field that does not exist is named, with the nearest."""
    if isinstance(rules, str | Mapping | QuantizationRule):
        raise TypeError(
            f"rules are a list, not a {type(rules).__name__}: write "
            f"[mt.{kind.__name__}(weight_qtype='int8')], say."
        )
    rules = list(rules)
    return [
        _from_dict(r, i, kind) if isinstance(r, Mapping) else r
        for i, r in enumerate(rules)
    ]


def _from_dict(fields: Mapping[str, Any], index: int, kind: type) -> Any:
    known = [f.name for f in dataclasses.fields(kind)]
    for name in fields:
        if name not in known:
            raise ValueError(
                f"rule {index} has an unknown field {name!r}. {did_you_mean(name, known)}"
            )
    return kind(**fields)


def load_rules(path: str, kind: type | None = None) -> list[Any]:
    """Rules from a YAML file: a list of mappings.

    Args:
        kind: the class of rules; None: QtRule if some field is of training alone.
    """
    import yaml  # flax brings it; nobody else needs it

    with open(path) as file:
        content = yaml.safe_load(file)
    if not isinstance(content, list):
        raise TypeError(
            f"{path} should hold a list of rules, not a {type(content).__name__}."
        )
    if kind is None:
        fields = {
            name for rule in content if isinstance(rule, Mapping) for name in rule
        }
        training = {f.name for f in dataclasses.fields(QtRule)}
        training -= {f.name for f in dataclasses.fields(QuantizationRule)}
        kind = QtRule if fields & training else QuantizationRule
    return as_rules(content, kind)
