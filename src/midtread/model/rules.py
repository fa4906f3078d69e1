"""Rules: where in a model to quantize, in which formats, and the one road to Specs.

A rule has a key and a value. The key is a regular expression that must match a whole
module path ("encoder/layers/3/mlp", "" for the root) and, optionally, names of ops. The
first rule whose key matches decides; later ones are not looked at. A rule without a
`weight_qtype` or an `act_qtype` therefore means: leave this alone.

Rules are plain data. `as_rules` also takes dicts, as they come out of YAML or JSON:

>>> as_rules([{"module_path": "mlp/.*", "weight_qtype": "int8"}])[0].weight_qtype
'int8'

`recipe_of` says what a rule means for a matmul whose operands have known roles, weight or
activation. Every provider goes this way: training takes the whole Recipe, serving its
forward, a look-up the forward's weight. So a model is served as it was trained:

    rule  ->  Step, the six operands as they are asked for  ->  Recipe, six Specs

`additional_qt_config` changes a Step by Qwix's names for its parts, which `PARTS` lists.
"""

import dataclasses
import difflib
import functools
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from midtread.numerics import calibration
from midtread.numerics.formats import as_format
from midtread.numerics.rounding import ROUNDINGS
from midtread.numerics.sparsity import Sparsity
from midtread.numerics.spec import Spec
from midtread.ops.recipe import REUSE, Dlhs, Drhs, Fwd, Recipe, Slot
from midtread.ops.recipe import recipe as named_recipe

FORMATS = ("weight_qtype", "act_qtype", "bwd_qtype")


def _children(cls: type) -> Iterator[type]:
    """Yields our classes that inherit from one of ours, directly or not."""
    for child in cls.__subclasses__():
        if child.__module__.startswith("midtread."):
            yield child
            yield from _children(child)


def named_fields(cls: type) -> type:
    """Makes a dataclass's constructor name a field that does not exist, and the nearest."""
    init = cls.__init__

    @functools.wraps(init)
    def __init__(self, *args: Any, **fields: Any):
        known = sorted(field_names(cls))
        for name in fields.keys() - set(known):
            other = next((k for k in _children(cls) if name in field_names(k)), None)
            hint = (
                did_you_mean(name, known)
                if other is None
                else f"mt.{other.__name__} has it: write that instead."
            )
            raise TypeError(f"{cls.__name__} has no field {name!r}. {hint}")
        init(self, *args, **fields)

    cls.__init__ = __init__
    return cls


@named_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationRule:
    """Which ops of a model are quantized, and how their operands are.

    There is one scale per channel unless the rule tiles, and it is found from the largest
    magnitude unless the rule calibrates otherwise.

    >>> rule = QuantizationRule(module_path="mlp/.*", weight_qtype="int4", tile_size=128)
    >>> rule.matches("mlp/up", "dot_general"), rule.matches("attention/q", "dot_general")
    (True, False)

    Args:
        module_path: a regular expression that a whole module path must match.
        op_names: the ops it applies to ("dot_general", "einsum", "conv_general_dilated",
            "ragged_dot", "ragged_dot_general", "take"); empty means all but "take".
        weight_qtype: the format of weights; None leaves them in float.
        act_qtype: the format of activations; None leaves them in float.
        tile_size: how many neighbours along the sum share a scale. A sum over several
            axes counts as one: 128 on [heads, 64, out] is two heads. A float is a fraction
            of the sum, and a mapping {axis: size} tiles those axes. None means that the
            whole sum shares one.
        act_static_scale: whether activations have one scale that was found beforehand,
            instead of one that each call finds. True means the mean range of all batches,
            and so does "mean"; "max", "ema,0.99" and "percentile,99" are others.
        weight_calibration_method: how the range of a weight is found: "absmax",
            "minmax", "rms,f", "percentile,p", "mse", "fixed,a" (numerics/calibration.py).
        act_calibration_method: the same for activations; None means "absmax".
        act_batch_axes: the axes along which positions share a static range.

    Raises:
        ValueError: a value means nothing; the message says what to write instead.
        TypeError: a value is of another type than the field.
    """

    made_for: ClassVar[str] = "every provider"

    module_path: str = ".*"
    op_names: Collection[str] = ()
    weight_qtype: Any = None
    act_qtype: Any = None
    tile_size: Any = None
    act_static_scale: bool | str | None = None
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
        if isinstance(self.op_names, str):  # one name, as Qwix takes it
            object.__setattr__(self, "op_names", (self.op_names,))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_qtype") and value is not None:
                as_format(value)
            if field.name.endswith("_calibration_method") and value is not None:
                calibration.parse(value)
            if field.name.endswith("tile_size"):
                _check_tile(field.name, value)
        if isinstance(self.act_static_scale, str):
            calibration.statistic(self.act_static_scale)

    @property
    def leaves_alone(self) -> bool:
        """Whether the ops it matches stay in float."""
        return self.weight_qtype is None and self.act_qtype is None

    def matches(self, path: str, op_name: str) -> bool:
        """Whether it applies to an op in the module at a path."""
        if self.op_names and op_name not in self.op_names:
            return False
        return re.fullmatch(self.module_path, path) is not None

    @functools.cached_property
    def _recipes(self) -> dict[tuple[Any, ...], Recipe]:
        """The answers of `recipe_of` so far: (lhs is a weight, rhs is one, and the facts of
        `Step`) -> Recipe."""
        return {}


def _check_tile(name: str, value: Any) -> None:
    """Refuses all but a number of elements, a fraction of the axis, a mapping to these, and
    None for no tiles."""
    for size in value.values() if isinstance(value, Mapping) else (value,):
        if size is None:
            continue
        if not isinstance(size, numbers.Real) or isinstance(size, bool):
            raise TypeError(f"{name}={value!r} is not a number: write {name}=128, say.")
        if float(size) < 0:
            raise ValueError(f"{name}={value!r} is below 0.")
        if float(size) == 0:
            raise ValueError(
                f"{name}={value!r} is a tile of no elements: leave {name} out for one scale "
                f"per channel, or write {name}=128, say."
            )
        if float(size) > 1 and not isinstance(size, numbers.Integral):
            raise ValueError(
                f"{name}={value!r} is not a whole number, and only up to 1.0 is it a part of "
                f"the axis: write {round(float(size))} for so many elements."
            )


@named_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class QtRule(QuantizationRule):
    """A rule for training. Without `bwd_qtype` it means quantization-aware training.

    Quantization-aware training (QAT) quantizes the forward alone: the gradient of every
    op is the float one, of the float operands (the straight-through estimator), except
    that no gradient reaches a value that its calibration clipped. With `bwd_qtype` both
    backward matmuls are quantized too (quantized training, QT).

    >>> QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="float8_e5m2").bwd_qtype
    'float8_e5m2'

    Args:
        module_path, op_names: where it applies, as in QuantizationRule.
        weight_qtype, act_qtype: the formats of the forward, as in QuantizationRule.
        tile_size: the tiles of the forward, as in QuantizationRule.
        act_static_scale, act_batch_axes: static ranges, as in QuantizationRule.
        weight_calibration_method, act_calibration_method: as in QuantizationRule.
        bwd_qtype: the format of gradients in both backward matmuls; None leaves the
            whole backward in float.
        bwd_calibration_method: how the range of a gradient is found.
        bwd_weight_grad_tile_size: the tiles of the sum that gives a weight's gradient; a
            float is a fraction of that axis.
        disable_channelwise_axes: whether a tensor has one scale, in all three matmuls.
        bwd_stochastic_rounding: the rounding of gradients, "uniform" or
            "low_bit_uniform" as in Qwix, or "stochastic"; it needs the random stream
            'stochastic_rounding'. None rounds to nearest.
        channelwise_noise_axes: the axes that have a noise of their own, for Qwix's two
            roundings.
        additional_qt_config: changes to the step, by the names in `PARTS`, which are those
            of Qwix's DotGeneralQtConfig.
        recipe: the whole Recipe in place of the formats, or the name of one (`mt.recipe`).
            It is written for a weight on the right, and turned round where the weight is
            on the left.

    Raises:
        ValueError: a value means nothing; the message says what to write instead.
        TypeError: a value is of another type than the field.
    """

    made_for: ClassVar[str] = "QtProvider"

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
        for name in self.additional_qt_config or ():
            if name not in PARTS:
                raise ValueError(
                    f"additional_qt_config has no field {name!r}. {did_you_mean(name, PARTS)}"
                )

    @property
    def leaves_alone(self) -> bool:
        return self.recipe is None and super().leaves_alone


def field_names(kind: type) -> frozenset[str]:
    """Returns the names of the fields of a class of rules."""
    return frozenset(field.name for field in dataclasses.fields(kind))


# --- from a rule to Specs ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OperandRule:
    """What is asked of one operand, before its op says which axes are which."""

    qtype: Any = None
    calibration_method: str = "absmax"
    disable_channelwise_axes: bool = False

    def spec(self, tile: Any, axis: str, **fields: Any) -> Spec | None:
        """Returns the Spec it asks for, with tiles along an axis; None for float."""
        if self.qtype is None:
            return None
        fmt = as_format(self.qtype)
        kept = () if self.disable_channelwise_axes else ("kept",)
        return Spec(
            fmt, kept, _tiles(fmt, tile, axis), self.calibration_method, **fields
        )


def _tiles(fmt: Any, tile: Any, axis: str) -> dict:
    """Turns a tile size into a Spec's tiled_axes. A format that comes in tiles has its own."""
    own = {axis: fmt.tile} if fmt.tile else {}
    is_whole = isinstance(tile, float) and tile == 1.0  # the whole axis is one tile
    asked = dict(tile) if isinstance(tile, Mapping) else {axis: tile}
    asked = {} if tile is None or is_whole else asked
    if own and asked not in ({}, own):
        raise ValueError(
            f"Format {fmt.name} requires a tile size of {fmt.tile}, but tile_size={tile}: "
            "leave it out."
        )
    return asked or own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A training step as it is asked for: six operands, tiles, and what the backward keeps.

    "dlhs" is the gradient of lhs: its matmul takes the gradient of the output ("grad") and
    the other operand of the forward ("residual"). A residual is the forward's own codes,
    unless `use_original_residuals` asks for the float operand. Codes that are tiled along
    the forward's sum cannot be used along the backward's: then the operand is quantized
    again, along the backward's own sum.

    Two facts are of the class, because Qwix's meaning of them differs (interop/qwix).
    """

    tiled_sum: ClassVar[str] = "summed"  # what a tile size is a part of
    quantizes_tiles_again: ClassVar[bool] = True  # or the backward takes float operands

    lhs: OperandRule = OperandRule()
    rhs: OperandRule = OperandRule()
    dlhs_grad: OperandRule = OperandRule()
    drhs_grad: OperandRule = OperandRule()
    dlhs_residual: OperandRule = OperandRule()
    drhs_residual: OperandRule = OperandRule()
    tile_size: Any = None
    dlhs_tile_size: int | float | None = None
    drhs_tile_size: int | float | None = None
    disable_gradient_clipping: bool = False
    use_original_residuals: bool = False
    sparsity_rule: Any = None
    rounding: str = "nearest"  # that of gradients
    noise_axes: tuple[int, ...] = (0,)

    def changed(self, changes: Mapping[str, Any]) -> "Step":
        """Returns the step with other values of some of its PARTS."""
        fields: dict[str, Any] = {}
        for name, value in changes.items():
            field, part = PARTS[name]
            if part is not None:
                operand = fields.get(field, getattr(self, field))
                value = dataclasses.replace(operand, **{part: value})
            fields[field] = value
        return dataclasses.replace(self, **fields)

    def recipe(self) -> Recipe:
        """Returns the six Specs of the step."""
        lhs, rhs = (
            x.spec(self.tile_size, self.tiled_sum) for x in (self.lhs, self.rhs)
        )
        return Recipe(
            fwd=Fwd(lhs, rhs),
            dlhs=Dlhs(self._gradient("dlhs", rhs), self._residual("dlhs", rhs)),
            drhs=Drhs(self._residual("drhs", lhs), self._gradient("drhs", lhs)),
            mask_clipped=not self.disable_gradient_clipping,
            sparsity=as_sparsity(self.sparsity_rule),
        )

    def _gradient(self, matmul: str, forward: Spec | None) -> Spec | None:
        operand: OperandRule = getattr(self, f"{matmul}_grad")
        tile = self._backward_tile(matmul, forward)
        noise = {"rounding": self.rounding, "noise_axes": self.noise_axes}
        return operand.spec(tile, self.tiled_sum, **noise)

    def _residual(self, matmul: str, forward: Spec | None) -> Slot:
        operand: OperandRule = getattr(self, f"{matmul}_residual")
        is_tiled = forward is not None and bool(forward.tiles)
        is_fresh = operand.qtype is not None and forward is None
        if not (self.use_original_residuals or is_tiled or is_fresh):
            return REUSE
        is_low = getattr(self, f"{matmul}_grad").qtype is not None
        if operand.qtype is None and is_tiled and is_low and not self._wants_floats:
            operand = dataclasses.replace(operand, qtype=forward.format)
        return operand.spec(self._backward_tile(matmul, forward), self.tiled_sum)

    @property
    def _wants_floats(self) -> bool:
        """Whether the backward of a tiled operand takes it in float."""
        return self.use_original_residuals or not self.quantizes_tiles_again

    def _backward_tile(self, matmul: str, forward: Spec | None) -> Any:
        """Returns the tile of a backward sum: its own, or else the forward's."""
        own = getattr(self, f"{matmul}_tile_size")
        if own or forward is None or self._wants_floats:
            return own
        return forward.tiles.get(self.tiled_sum)


def _parts() -> dict[str, tuple[str, str | None]]:
    parts: dict[str, tuple[str, str | None]] = {}
    for field in dataclasses.fields(Step):
        if not isinstance(field.default, OperandRule):
            parts[field.name] = (field.name, None)
            continue
        for part in dataclasses.fields(OperandRule):
            parts[f"{field.name}_{part.name}"] = (field.name, part.name)
    return parts


# Qwix's name of a part of a step -> (the field of Step, the field of its OperandRule, if any)
PARTS = _parts()


def as_sparsity(rule: Any) -> Sparsity | None:
    """Makes a Sparsity of one, or of anything with Qwix's `weight_sparsity_*` fields."""
    if rule is None or isinstance(rule, Sparsity):
        return rule
    get = lambda name: getattr(rule, f"weight_sparsity_{name}")
    if not get("m"):
        return None
    names = ("n", "m", "order", "block_size", "offset", "start_step", "update_step")
    return Sparsity(**{name: get(name) for name in names})


def recipe_of(
    rule: QuantizationRule, lhs_is_weight: bool, rhs_is_weight: bool
) -> Recipe:
    """Returns what a rule means for a matmul whose operands have these roles.

    >>> rule = QuantizationRule(weight_qtype="int4", act_qtype="int8")
    >>> recipe_of(rule, lhs_is_weight=False, rhs_is_weight=True).fwd.rhs.format.name
    'int4'

    Args:
        rule: a rule; one that is not for training has the gradients of QAT.
        lhs_is_weight, rhs_is_weight: whether the operand is a parameter of the model; an
            operand that is not is an activation.

    Returns:
        The Recipe, which is the rule's own if it has one. `Contraction.number_axes` turns the
        names of axes in it into numbers.

    Raises:
        ValueError: a format and a tile size do not go together, or a recipe with a
            rotation or with sparsity meets a weight on the left.
    """
    roles = bool(lhs_is_weight), bool(rhs_is_weight)
    key = (*roles, Step.tiled_sum, Step.quantizes_tiles_again)
    if key not in rule._recipes:
        rule._recipes[key] = _recipe_of(rule, *roles)
    return rule._recipes[key]


def _recipe_of(rule: Any, lhs_is_weight: bool, rhs_is_weight: bool) -> Recipe:
    training = isinstance(rule, QtRule)
    if training and rule.recipe is not None:
        is_turned = lhs_is_weight and not rhs_is_weight
        return _turned_round(rule.recipe) if is_turned else rule.recipe
    methods = rule.act_calibration_method or "absmax", rule.weight_calibration_method
    per_tensor = training and rule.disable_channelwise_axes
    operand = lambda is_weight: OperandRule(
        rule.weight_qtype if is_weight else rule.act_qtype,
        methods[is_weight],
        per_tensor,
    )
    step = Step(
        lhs=operand(lhs_is_weight),
        rhs=operand(rhs_is_weight),
        tile_size=rule.tile_size,
        use_original_residuals=not training or rule.bwd_qtype is None,
    )
    if not training:
        return step.recipe()
    grad = OperandRule(rule.bwd_qtype, rule.bwd_calibration_method, per_tensor)
    tile = None if rule.bwd_qtype is None else rule.bwd_weight_grad_tile_size
    step = dataclasses.replace(
        step,
        dlhs_grad=grad,
        drhs_grad=grad,
        dlhs_tile_size=tile if lhs_is_weight else None,
        drhs_tile_size=tile if rhs_is_weight else None,
        rounding=rule.bwd_stochastic_rounding or "nearest",
        noise_axes=tuple(rule.channelwise_noise_axes),
    )
    return step.changed(rule.additional_qt_config or {}).recipe()


def _turned_round(recipe: Recipe) -> Recipe:
    """Turns a recipe for act . weight into one for weight . act."""
    if recipe.sparsity is not None or recipe.drhs.hadamard:
        raise ValueError(
            "the rule's recipe prunes or rotates the right operand, but here the weight is on "
            "the left: write the matmul with the weight on the right, or put a rule without "
            "sparsity and hadamard first."
        )
    return dataclasses.replace(
        recipe,
        fwd=Fwd(recipe.fwd.rhs, recipe.fwd.lhs, recipe.fwd.accumulate),
        dlhs=Dlhs(recipe.drhs.g, recipe.drhs.lhs, recipe.drhs.accumulate),
        drhs=Drhs(recipe.dlhs.rhs, recipe.dlhs.g, recipe.dlhs.accumulate),
    )


# --- rules from data --------------------------------------------------------------------------


def did_you_mean(
    asked: Any,
    known: Iterable[str],
    show: Callable[[str], str] = repr,
    otherwise: str | None = None,
) -> str:
    """Writes the end of an error message: the nearest name there is, or else all of them.

    >>> did_you_mean("wieght", ["act", "weight"]), did_you_mean("x", ["act", "weight"])
    ("Did you mean 'weight'?", 'There are: act, weight.')
    """
    known = list(known)
    if near := difflib.get_close_matches(str(asked), known, 1, 0.5):
        return f"Did you mean {show(near[0])}?"
    return f"There are: {', '.join(known)}." if otherwise is None else otherwise


def as_rules(rules: Iterable[Any], kind: type = QuantizationRule) -> list[Any]:
    """Makes rules of rules or dicts, and refuses a field that does not exist by name."""
    if isinstance(rules, str | Mapping | QuantizationRule):
        raise TypeError(
            f"rules are a list, not a {type(rules).__name__}: write "
            f"[mt.{kind.__name__}(weight_qtype='int8')], say."
        )
    rules = list(rules)
    for rule in rules:
        if not isinstance(rule, Mapping | QuantizationRule):
            raise TypeError(
                f"{rule!r} is not a rule: write mt.{kind.__name__}(weight_qtype='int8'), "
                "say, or a dict of its fields."
            )
    return [
        _from_dict(r, i, kind) if isinstance(r, Mapping) else r
        for i, r in enumerate(rules)
    ]


def _from_dict(fields: Mapping[str, Any], index: int, kind: type) -> Any:
    known = sorted(field_names(kind))
    for name in fields:
        if name not in known:
            raise ValueError(
                f"rule {index} has an unknown field {name!r}. {did_you_mean(name, known)}"
            )
    return kind(**fields)


def load_rules(path: str, kind: type | None = None) -> list[Any]:
    """Reads rules from a YAML file, which has a list of mappings.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "rules.yml")
    >>> with open(path, "w") as file:
    ...     _ = file.write("- {module_path: 'mlp/.*', weight_qtype: int8}")
    >>> load_rules(path)[0].weight_qtype
    'int8'

    Args:
        path: the file.
        kind: the class of rules; None for QtRule if some field is for training only, else
            QuantizationRule.

    Returns:
        A list of rules.

    Raises:
        TypeError: The file holds something else than a list.
        ValueError: A field that does not exist; the message has the nearest one.
    """
    import yaml  # flax depends on it, and nothing else here needs it

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
        training = field_names(QtRule) - field_names(QuantizationRule)
        kind = QtRule if fields & training else QuantizationRule
    return as_rules(content, kind)
