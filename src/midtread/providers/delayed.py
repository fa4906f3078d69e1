"""DelayedFp8Provider: fp8 training whose scales come from the steps before.

Quantizing does not wait for max |x| of the tensor at hand: the scale is the largest |x| of
the last `history` steps over the format's bound. There is one scale per tensor; the forward
is in e4m3 and gradients are in e5m2. The state is that of Flax (nn.Fp8DirectDotGeneralOp)
and, before it, of TransformerEngine:

    scale    <- max(history) 2^margin / bound    kept if the history is all 0, or inf
    history  <- max |x| replaces the oldest      slot 0 the newest, then oldest first

An op has six arrays, `{input,kernel,output_grad}_{amax_history,scale}`, for lhs, rhs and g,
in the collection `_overwrite_with_gradient` under the op's id. That is the tree which Flax's
op makes when a provider calls it `name=op_id`, so that checkpoints can be exchanged. In
NNX they are Variables of type `OverwriteWithGradient` in a submodule `<op
id>_overwrite_with_gradient`.

max |g| is known in the backward only. So the new state comes out as the gradient of the old
one, and an optimizer must put it there instead of subtracting it:

    tx = overwrite_with_gradient(optax.adamw(1e-3))    # adamw sees parameters only
    grads = accumulate_gradients(grads, more)      # sums gradients, maxes histories

Which |x| is seen is the rule's calibration: the largest (`absmax`, the default), a part of
it (`absmax,0.9`), `rms,f`, `percentile,p` or `mse`. `fixed,a` needs no history: its scale is
a over the bound from the first step on, and its state stays as it was.

Layers in a scan need their own state: nn.scan(..., variable_axes={"params": 0,
"_overwrite_with_gradient": 0}); nnx.scan over stacked layers does it by itself. State
that several uses share (a vmap that does not split it) would be summed, as gradients
are: split it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from midtread.model import flaxlib, intercept
from midtread.model.rules import QtRule
from midtread.numerics import calibration
from midtread.numerics.formats import as_format
from midtread.numerics.qarray import QArray, is_float
from midtread.ops.api import Ops
from midtread.ops.recipe import REUSE, Dlhs, Drhs, Fwd, Recipe, per_tensor
from midtread.ops.training import SEEN, Ranges, largest, train
from midtread.providers.qt import QtProvider

COLLECTION = "_overwrite_with_gradient"
NAMES = {"lhs": "input", "rhs": "kernel", "g": "output_grad"}
#           forward            gradients
FP8 = {
    False: ("float8_e4m3fn", "float8_e5m2"),  # NVIDIA
    True: ("float8_e4m3fnuz", "float8_e5m2fnuz"),  # AMD MI300
}
Meta = dict[str, jax.Array]  # {"amax_history": [history], "scale": [1]}


class OverwriteWithGradient(nnx.Variable):
    """State that is replaced by its gradient."""


class AmaxState(nnx.Module):
    """The six arrays of one op."""

    def __init__(self, arrays: Mapping[str, jax.Array]):
        for name, value in arrays.items():
            setattr(self, name, OverwriteWithGradient(value))

    def arrays(self) -> dict[str, jax.Array]:
        attributes = vars(self).items()
        kind = OverwriteWithGradient
        return {k: v.get_raw_value() for k, v in attributes if isinstance(v, kind)}


class DelayedFp8Provider(QtProvider):
    """Trains in fp8 with scales from amax histories: a rule says where, the provider how.

    >>> rule = {"module_path": ".*", "weight_qtype": "e4m3", "act_qtype": "e4m3"}
    >>> provider = DelayedFp8Provider([rule], history=16)
    >>> from midtread.model.quantize import quantize_model
    >>> model = quantize_model(nn.Dense(4), provider)
    >>> variables = model.init(jax.random.key(0), jnp.ones((2, 8)))
    >>> grads = jax.grad(lambda v: model.apply(v, jnp.ones((2, 8))).sum())(variables)
    >>> state = grads["_overwrite_with_gradient"]["dot_general0"]
    >>> state["input_amax_history"][:2].tolist()
    [1.0, 0.0]

    Args:
        rules: those without formats leave their modules alone, as everywhere. Formats
            given must be the provider's; `bwd_qtype` may be left out. Calibrations say
            what a history is of, or `fixed,a`.
        history: how many steps back a scale looks.
        margin: powers of two of headroom above the largest |x| seen.
        fnuz: AMD's e4m3fnuz and e5m2fnuz instead of e4m3fn and e5m2.
        options: `strict` and `disable_jit`, as every provider has them.

    Raises:
        ValueError: A rule asks for a format that is not the provider's, or for a field
            that delayed scaling does not have.
    """

    honours = frozenset({
        "module_path", "op_names", "weight_qtype", "act_qtype", "bwd_qtype",
        "weight_calibration_method", "act_calibration_method", "bwd_calibration_method",
        "additional_qt_config",
        "disable_channelwise_axes",  # a delayed scale is one per tensor in any case
    })  # fmt: skip
    refusal = (
        "delayed scaling has one scale per tensor, from its history, rounded to nearest. "
        "Drop {field}, or use mt.QtProvider"
    )

    def __init__(
        self,
        rules: Sequence[Any],
        *,
        history: int = 1024,
        margin: float = 0,
        fnuz: bool = False,
        **options: Any,
    ):
        if history < 1:
            raise ValueError(f"history={history}: a scale looks back 1 step or more.")
        self._length, self._margin, self._fnuz = history, margin, fnuz
        super().__init__(rules, **options)
        if not any(rule.weight_qtype is not None for rule in self._rules):
            forward, _ = FP8[fnuz]
            raise ValueError(
                "no rule asks for anything: a rule without formats leaves its modules "
                f"alone. Write weight_qtype={forward!r}, act_qtype={forward!r}."
            )

    def _init_rule(self, rule):
        rule = super()._init_rule(rule)
        forward, backward = FP8[self._fnuz]
        if rule.weight_qtype is None and rule.act_qtype is None:
            return rule
        for field, wanted in (
            ("weight_qtype", forward),
            ("act_qtype", forward),
            ("bwd_qtype", backward),
        ):
            asked = getattr(rule, field)
            if asked is None and field == "bwd_qtype":
                continue
            if asked is None or as_format(asked).name != wanted:
                raise ValueError(
                    f"rule {rule.module_path!r}: {field}={asked}, but delayed scaling "
                    f"with fnuz={self._fnuz} has {wanted} there."
                )
        _check_calibrations(rule)
        return rule

    def _run(self, name: str, plain, args, kwargs) -> jax.Array:
        rule, op_id = self._get_current_rule_and_op_id(name)
        if rule is None or rule.weight_qtype is None:
            return plain(*args, **kwargs)
        kwargs.pop("_dot_general", None)
        # Each pair has its own state, since an einsum of three operands is two matmuls.
        ids = (f"{op_id}_{i}" if i else f"{op_id}" for i in itertools.count())
        execute = lambda c, lhs, rhs: self._train(rule, next(ids), c, lhs, rhs)
        return getattr(Ops(execute), name)(*args, **kwargs)

    def _train(self, rule: QtRule, op_id: str, c, lhs, rhs) -> jax.Array:
        module = intercept.current_module()
        state = _unflatten(_variables(module, op_id, self._length))
        forward, backward = (as_format(fmt).bound for fmt in FP8[self._fnuz])
        recipe = _recipe(self._fnuz, *self._methods(rule, module, lhs, rhs))
        margin, ranges, after = self._margin, {}, {}
        for side, x, spec in (
            ("lhs", lhs, recipe.fwd.lhs),
            ("rhs", rhs, recipe.fwd.rhs),
        ):
            if not is_float(x) or spec.method == "fixed" or 0 in x.shape:
                # It is no float, its scale is a constant, or it has no values.
                after[side] = state[side]
                continue
            meta, seen = jax.lax.stop_gradient((state[side], largest(x, spec)))
            after[side] = advance(meta, seen, forward, margin)
            window = after[side]["scale"] * forward
            ranges[side] = {"absmax": window.reshape((1,) * x.ndim)}
        if any(spec.method != "fixed" for spec in (recipe.dlhs.g, recipe.drhs.g)):
            window = _window(backward, margin, state["g"])
            ranges["g"] = {"absmax": window.reshape((1,) * len(c.out))}
        else:
            after["g"] = state["g"]
        after = jax.tree.map(lambda x: checkpoint_name(x, SEEN), after)
        out = train(c, recipe, lhs, rhs, Ranges(**ranges))
        return _record(out, {k: state[k] for k in after}, after)

    def _methods(
        self, rule: QtRule, module: Any, lhs, rhs
    ) -> tuple[str, str, str, str]:
        """Returns the calibrations of lhs, rhs, g for dlhs and g for drhs."""
        act, weight = rule.act_calibration_method, rule.weight_calibration_method
        is_float_weight = lambda x: (
            not isinstance(x, QArray) and bool(self.find_param(module, x))
        )
        method = lambda x: weight if act != weight and is_float_weight(x) else act
        g = rule.bwd_calibration_method
        drhs = (rule.additional_qt_config or {}).get(DRHS, g)
        return method(lhs), method(rhs), g, drhs

    def before_first(self, value: Any) -> Any:
        if not isinstance(value, AmaxState):
            return super().before_first(value)
        arrays = value.arrays()  # each may have an axis for the layers of a scan
        first = lambda name, x: jnp.full(x.shape, name.endswith("_scale"), x.dtype)
        return AmaxState({name: first(name, x) for name, x in arrays.items()})


@functools.cache
def _recipe(fnuz: bool, lhs: str, rhs: str, dlhs: str, drhs: str) -> Recipe:
    forward, backward = FP8[fnuz]
    spec = lambda fmt, method: per_tensor(
        fmt, calibration="delayed" if method == "absmax" else method
    )
    return Recipe(
        Fwd(spec(forward, lhs), spec(forward, rhs)),
        Dlhs(spec(backward, dlhs), REUSE),
        Drhs(REUSE, spec(backward, drhs)),
    )


DRHS = "drhs_grad_calibration_method"
SIZES = ("absmax", "rms", "percentile", "mse", "fixed")  # they give a tensor one number


def _check_calibrations(rule: QtRule) -> None:
    more = dict(rule.additional_qt_config or {})
    given = {
        name: getattr(rule, name)
        for name in ("weight_calibration_method", "act_calibration_method")
    }
    given["bwd_calibration_method"] = bwd = rule.bwd_calibration_method
    given[DRHS] = drhs = more.pop(DRHS, bwd)
    for name, text in given.items():
        parsed = calibration.parse(text)
        if parsed.method not in SIZES or parsed.is_asymmetric:
            raise ValueError(
                f"rule {rule.module_path!r}: {name}={text}, but a delayed scale has a "
                f"window around 0: {', '.join(SIZES)} (fixed,-a,a)."
            )
    moving = {m for m in (bwd, drhs) if calibration.parse(m).method != "fixed"}
    if len(moving) > 1:
        raise ValueError(
            f"rule {rule.module_path!r}: {DRHS}={drhs}, but bwd_calibration_method={bwd}: "
            "gradients have one history. Write the same for both, or fixed,-a,a."
        )
    if more:
        raise ValueError(
            f"rule {rule.module_path!r}: additional_qt_config has {', '.join(more)}; with "
            f"delayed scaling it may have {DRHS}."
        )


# --- state ------------------------------------------------------------------------------------


def initial(length: int) -> Meta:
    """Returns the state before anything was seen, with a scale of 1."""
    return {"amax_history": jnp.zeros((length,)), "scale": jnp.ones((1,))}


def advance(meta: Meta, amax: jax.Array, bound: float, margin: float = 0) -> Meta:
    """Returns the scale for this step, and the history with what was seen in it.

    >>> meta = {"amax_history": jnp.array([4.0, 0.0, 2.0]), "scale": jnp.ones(1)}
    >>> {k: v.tolist() for k, v in advance(meta, jnp.array(1.0), bound=8).items()}
    {'amax_history': [1.0, 2.0, 4.0], 'scale': [0.5]}
    """
    history, old = meta["amax_history"], meta["scale"]
    largest = jnp.max(history)
    usable = (largest > 0) & jnp.isfinite(largest)
    old = jnp.where(old > 0, old, 1.0)  # 0 is the gradient of an op that took no part
    scale = jnp.where(usable, largest * (2.0**margin / bound), old)
    seen = jnp.roll(history, -1).at[0].set(amax.astype(jnp.float32).reshape(()))
    return {"amax_history": seen, "scale": scale}


def _names(side: str) -> dict[str, str]:
    return {part: f"{NAMES[side]}_{part}" for part in ("amax_history", "scale")}


def _unflatten(arrays: Mapping[str, jax.Array]) -> dict[str, Meta]:
    return {
        side: {part: arrays[name] for part, name in _names(side).items()}
        for side in NAMES
    }


def _variables(module: Any, op_id: str, length: int) -> Mapping[str, jax.Array]:
    """Returns the op's six arrays, made if they are not there."""
    first = lambda: {
        name: initial(length)[part]
        for side in NAMES
        for part, name in _names(side).items()
    }
    if isinstance(module, nn.Module):
        arrays = _linen_variables(module, op_id, first)
    else:
        name = f"{op_id}{COLLECTION}"
        if not hasattr(module, name):
            flaxlib.add(module, name, AmaxState(first()))
        arrays = getattr(module, name).arrays()
    shape = arrays["input_amax_history"].shape
    if shape != (length,):
        raise ValueError(
            f"{flaxlib.path_of(module)!r}: {op_id} has amax histories of shape "
            f"{shape}, the provider has history={length}. In a scan over layers, name "
            f"{COLLECTION!r} in variable_axes."
        )
    return arrays


def _linen_variables(module: nn.Module, op_id: str, first) -> Mapping[str, jax.Array]:
    scope = module.scope.push(op_id, reuse=True)
    writable = scope.is_mutable_collection(COLLECTION)
    if not writable and not scope.has_variable(COLLECTION, "input_scale"):
        raise ValueError(
            f"{flaxlib.path_of(module)!r}: no amax history of {op_id} in the "
            f"collection {COLLECTION!r}. Pass what init gave of the quantized model, "
            "and in nn.scan name the collection in variable_axes."
        )
    return {
        name: scope.variable(COLLECTION, name, lambda name=name: first()[name]).value
        for name in jax.eval_shape(first)
    }


# --- new state as the gradient of the old -----------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _window(bound: float, margin: float, meta: Meta) -> jax.Array:
    """Returns the largest |g| that fits; its cotangent is the |g| that was seen."""
    return advance(meta, jnp.zeros(()), bound, margin)["scale"] * bound


def _window_fwd(bound, margin, meta):
    return _window(bound, margin, meta), meta


def _window_bwd(bound, margin, meta, seen):
    return (advance(meta, seen, bound, margin),)


_window.defvjp(_window_fwd, _window_bwd)


@jax.custom_vjp
def _record(out: jax.Array, before: dict[str, Meta], after: dict[str, Meta]):
    """Returns `out`, and makes `after` the gradient of `before`."""
    return out


def _record_fwd(out, before, after):
    return out, after


def _record_bwd(after, g):
    return g, after, None


_record.defvjp(_record_fwd, _record_bwd)


# --- optimizers -------------------------------------------------------------------------------


def is_overwritten(path: tuple) -> bool:
    """Whether a path in a tree of variables, gradients or updates leads to such state."""
    keys = (getattr(k, "key", getattr(k, "name", None)) for k in path)
    return any(isinstance(k, str) and k.endswith(COLLECTION) for k in keys)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Overwrite:
    """An update that replaces: parameter + Overwrite(value) is the value.

    Adding value - parameter would round, and an infinity seen once would stay for good.
    """

    value: Any

    def __radd__(self, _: Any) -> Any:
        return self.value


def overwrite_with_gradient(tx: Any) -> Any:
    """Wraps an optimizer so that state which is to be overwritten gets its gradient.

    The result must be the outermost transformation: its updates for such state are
    `Overwrite`s, which optax.apply_updates (and nnx.Optimizer) apply bit for bit.
    Clipping, weight decay and moments belong in `tx`, which sees parameters only.

    >>> import optax
    >>> variables = {"params": jnp.ones(2), "_overwrite_with_gradient": jnp.ones(2)}
    >>> clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    >>> tx = overwrite_with_gradient(clipped)
    >>> grads = jax.tree.map(lambda v: jnp.array([0.0, 9.0]), variables)
    >>> updates, _ = tx.update(grads, tx.init(variables), variables)
    >>> new = optax.apply_updates(variables, updates)
    >>> new["params"].tolist(), new["_overwrite_with_gradient"].tolist()
    ([1.0, 0.0], [0.0, 9.0])

    Args:
        tx: an optax.GradientTransformation, for the parameters.

    Returns:
        An optax.GradientTransformation for parameters and such state together.
    """
    import optax  # a caller who has a tx has optax

    tx = optax.with_extra_args_support(tx)

    def rest(tree):
        hide = lambda path, v: () if is_overwritten(path) else v
        return None if tree is None else jax.tree_util.tree_map_with_path(hide, tree)

    def update(updates, state, params=None, **extra):
        new, state = tx.update(rest(updates), state, rest(params), **extra)
        pick = lambda path, g, u: Overwrite(g) if is_overwritten(path) else u
        return jax.tree_util.tree_map_with_path(pick, updates, new), state

    init = lambda params: tx.init(rest(params))
    return optax.GradientTransformationExtraArgs(init, update)


def accumulate_gradients(total: Any, more: Any, weight: float = 1.0) -> Any:
    """Adds gradients, total + weight * more; of state to be overwritten it takes the larger.

    This is for micro-batches that start from the same state: each puts its max |x| in slot 0,
    and the rest of the state is the same. Start from zeros and give weight=1/n for a mean.

    >>> a = {"params": jnp.array(1.0), "_overwrite_with_gradient": jnp.array([3.0, 1.0])}
    >>> b = {"params": jnp.array(5.0), "_overwrite_with_gradient": jnp.array([2.0, 1.0])}
    >>> sorted(map(str, jax.tree.leaves(accumulate_gradients(a, b))))
    ['6.0', '[3. 1.]']

    Args:
        total: gradients of the micro-batches so far.
        more: those of the next one.
        weight: what `more` is multiplied by.

    Returns:
        A tree like `total`.
    """

    def add(path, a, b):
        if is_overwritten(path):
            return jnp.maximum(a, b)
        return a + weight * b

    return jax.tree_util.tree_map_with_path(add, total, more)
