"""OdmlConversionProvider: annotates a model with grids for LiteRT's converter.

Every edge that training quantizes becomes a call of the composite `quant.fake_quant`, with
the grid in its attributes:

    scale                    float32, one or one per channel; empty for a dynamic range
    zero_point               int64, where the grid has one
    quantization_dimension   the axis of the channels
    dtype                    'i8', 'i4', 'i2' or 'i16'
    narrow_range             True for weights: the lowest code is not used

Scales are computed while tracing, from `params` and `quant_stats`. So are weights, which
lets us hand the converter forms that it gets right: a matmul with a weight is always
x [.., K] times w [K, N] (other orders came out wrong), a batch norm is folded into the
weight before it (their codes are the same; only the scales differ), and one that stands
alone is a depthwise convolution with a window of one.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax import lax

from midtread.kernels import xla
from midtread.model import flaxlib
from midtread.model.provider import LATE
from midtread.numerics.calibration import Average, fixed_range
from midtread.numerics.formats import Format, as_format
from midtread.numerics.qarray import calibrate
from midtread.numerics.spec import Spec
from midtread.ops.contraction import Dot
from midtread.ops.conv import Conv
from midtread.providers.litert import OdmlQatProvider
from midtread.providers.litert_ops import (
    ACTIVATIONS,
    WEIGHTS,
    Edge,
    Grid,
    grid_of,
)

DTYPES = WEIGHTS | ACTIVATIONS


class OdmlConversionProvider(OdmlQatProvider):
    """Annotates a float model for LiteRT's converter.

    Args:
        rules: those that the model was trained or calibrated under.
        params: the model's parameters, trained under OdmlQatProvider or not.
        quant_stats: ranges, gathered under OdmlQatProvider with the same rules; may be
            empty if no rule has static activations.
        options: those of OdmlQatProvider; they must be the same as there.

    Raises:
        ValueError: Statistics that are missing or belong to another model.
    """

    def __init__(
        self, rules: Sequence[Any], params: Any, quant_stats: Any, **options: Any
    ):
        super().__init__(rules, **options)
        self._params = _by_path(params)
        self._stats = _by_path(quant_stats, is_leaf=lambda d: "count" in d)

    # --- grids that are known now -------------------------------------------------------

    def _grid(self, x: jax.Array, rule, name: str, fixed=None):
        spec = self._spec(x, rule, fixed)
        with jax.ensure_compile_time_eval():
            if spec.method == "fixed":
                range_ = fixed_range(spec.calibration, 0, jnp.float32)
            else:
                range_ = Average().range(self._statistics(name))
                range_ = {k: jnp.asarray(v).reshape(()) for k, v in range_.items()}
            grid = grid_of(range_, spec)
        return functools.partial(annotated, grid)

    def _has_range(self, name: str) -> bool:
        """Whether there is a range. If Qwix gathered the statistics, some of ours are not there,
        and those ops stay float."""
        path = (*_parts(flaxlib.path_of(self._module())), name)
        return path in self._stats or not _is_ours(name)

    def _statistics(self, name: str) -> Mapping[str, Any]:
        path = (*_parts(flaxlib.path_of(self._module())), name)
        where = "/".join(path)
        if path not in self._stats:
            raise ValueError(
                f"no range was collected for {where!r}. Run the model under "
                "OdmlQatProvider with these rules and options, on data, and pass its "
                "quant_stats."
            )
        if np.ndim(self._stats[path]["count"]):
            raise ValueError(
                f"quant_stats of {where!r} has a layer axis, from nn.scan or nnx.scan. A "
                "file has every layer apart: build the model with a Python loop."
            )
        if int(self._stats[path]["count"]) == 0:
            raise ValueError(
                f"quant_stats has {where!r}, but no batch was seen there. For Linen, "
                "apply with mutable='quant_stats' and keep what it returns; for NNX, "
                "call the model."
            )
        return self._stats[path]

    def _known_weight(self, path: tuple, value: Any) -> Callable | None:
        if not isinstance(value, jax.core.Tracer):
            return lambda: value
        known = self._params.get(path)
        return None if known is None else lambda: known

    def _value(self, x: Any) -> Any:
        if not isinstance(x, jax.core.Tracer):
            return np.asarray(x)
        known = self._edges[x].value
        if known is None:
            path = flaxlib.path_of(self._module())
            raise ValueError(
                f"{path!r}: a weight or constant of shape {x.shape} is not known while "
                "converting. Parameters must be in `params`, under the names the model "
                "gives them."
            )
        return np.asarray(known())

    def _carry_constant(self, op, args, params, out) -> None:
        super()._carry_constant(op, args, params, out)
        known = [
            self._edges[x].value
            if isinstance(x, jax.core.Tracer)
            else functools.partial(jnp.asarray, x)
            for x in args
        ]
        if any(v is None for v in known):
            return
        run = op.run if params is None else functools.partial(op.bind, **params)

        @functools.cache
        def value():
            with jax.ensure_compile_time_eval():
                return jax.tree.leaves(run(*(v() for v in known if v is not None)))

        for i, x in enumerate(jax.tree.leaves(out)):
            weight = self._edges[x].weight
            self._edges[x] = Edge(weight=weight, value=lambda i=i: value()[i])

    def _number(self, c: Any, rule) -> Any:
        if not self._is_static(rule):
            return c
        fmt = as_format(rule.act_qtype)
        c = np.asarray(c, np.float32).reshape(())
        scale = np.abs(c) / np.float32(_top(fmt)) if c else np.float32(1)
        return annotated(Grid(fmt, np.asarray(scale), None, False), jnp.asarray(c))

    def _constant(self, x: jax.Array, rule, change=lambda x: x) -> jax.Array:
        spec = self._constant_spec(rule)
        if spec is None:
            return change(x)
        with jax.ensure_compile_time_eval():
            value = change(jnp.asarray(self._value(x)))
            range_ = {k: v.reshape(()) for k, v in calibrate(value, spec).items()}
            grid = grid_of(range_, spec)
        on_grid = functools.partial(annotated, grid)
        out = on_grid(value)
        self._edges[out] = Edge(on_grid=on_grid)
        return out

    # --- forms that the converter gets right --------------------------------------------

    def _matmul_input(self, rule, op_id: str, c, x, side: str):
        if rule is None or rule.act_qtype is None or rule.act_static_scale:
            return super()._matmul_input(rule, op_id, c, x, side)
        return self._quantized(x, None, f"{op_id}_{side}")  # the rest in _multiply

    def _multiply(self, rule, c, x, w, side: str, gain=None) -> jax.Array:
        channels = self._channels(c, side)
        with jax.ensure_compile_time_eval():
            w = jnp.asarray(self._value(w))
            grid = None
            if rule is not None and rule.weight_qtype is not None:
                spec = self._weight_spec(channels, rule)
                grid = grid_of(calibrate(w, spec), spec, is_narrow=True)
            if gain is not None:
                along = [-1 if axis == channels[0] else 1 for axis in range(w.ndim)]
                w, grid = _scaled(w, grid, gain.reshape(along))
        if isinstance(c, Conv):
            self._check_conv(c)
        is_dynamic = rule is not None and rule.act_qtype and not rule.act_static_scale
        spec = None
        if is_dynamic:  # a scale per row
            spec = Spec(rule.act_qtype, (0,), calibration="minmax")
        if isinstance(c, Dot) and channels:
            return _flat_dot(c, x, w, grid, side, spec)
        x = x if spec is None else _dynamic(x, spec)
        w = w if grid is None else annotated(grid, w)
        return c.run(x, w, by=xla) if side == "rhs" else c.run(w, x, by=xla)

    def _unit(self, *site: Any) -> None:
        return None  # the converter rounds biases

    def _check_conv(self, c: Conv) -> None:
        if any(d != 1 for d in c.lhs_dilation):
            path = flaxlib.path_of(self._module())
            raise ValueError(
                f"{path!r}: a transposed convolution, of which litert-converter makes a "
                "file that LiteRT does not run. Use jax.image.resize and a convolution."
            )

    def _rsqrt(self, x: jax.Array) -> jax.Array:
        return lax.rsqrt(x)

    def _as_one_op(self, name: str, fn, x: jax.Array, **attributes) -> jax.Array:
        return _composite(name, fn, x, attributes)

    def _affine(self, x: jax.Array, module, rule) -> jax.Array:
        path = _parts(flaxlib.path_of(module))
        params = {}
        for name, value in flaxlib.params_of(module).items():
            known = self._known_weight((*path, name), value)
            params[name] = value if known is None else known()
        return _per_channel(x, params.get("scale"), params.get("bias"), rule)

    def _folded(self, module, run, x, rest, kwargs) -> jax.Array:
        known = self._gain_and_shift(module, rest, kwargs)
        scaled = self._edges[x].scaled
        if known is None or scaled is None or module.axis not in (-1, x.ndim - 1):
            return run(x, *rest, **kwargs)
        return scaled(known[0]) + known[1]

    def _standing_alone(self, module, run, x, rest, kwargs, rule) -> jax.Array:
        known = self._gain_and_shift(module, rest, kwargs)
        if known is None or not self._is_static(rule):
            return run(x, *rest, **kwargs)
        return _per_channel(x, *known, rule)

    def _gain_and_shift(self, module, rest, kwargs):
        """Writes a batch norm as gain * x + shift; None if its state is not known now."""
        flag = kwargs.get("use_running_average", rest[0] if rest else None)
        if not (flag or module.use_running_average):
            path = flaxlib.path_of(module)
            raise ValueError(
                f"{path!r} is a batch norm that would use the batch's own moments, which "
                "no file can. Convert with use_running_average=True (NNX: model.eval())."
            )
        if isinstance(module, nn.Module):
            stats = module.variables["batch_stats"]
            moments = stats["mean"], stats["var"]
        else:
            moments = module.mean.get_value(), module.var.get_value()
        params = flaxlib.params_of(module)
        if any(isinstance(v, jax.core.Tracer) for v in (*moments, *params.values())):
            return None
        with jax.ensure_compile_time_eval():
            mean, var = moments
            gain = lax.rsqrt(var + module.epsilon) * params.get("scale", 1.0)
            shift = params.get("bias", 0.0) - mean * gain
        return np.asarray(gain), np.asarray(shift)


def annotated(grid: Grid, x: jax.Array, **options: Any) -> jax.Array:
    """Rounds `x` to the grid, and tells the converter that the result has this grid."""
    scale = np.asarray(grid.scale, np.float32)
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise ValueError(f"a scale is {scale}: were there nan or inf in the data?")
    axes = [a for a, n in enumerate(scale.shape) if n > 1]
    assert len(axes) <= 1, scale.shape
    attributes: dict[str, Any] = {
        "scale": scale.reshape(-1),
        "dtype": DTYPES[grid.format.name],
        "narrow_range": grid.is_narrow,
    }
    if grid.zero_point is not None:
        attributes["zero_point"] = np.asarray(grid.zero_point, np.int64).reshape(-1)
    if axes:
        attributes["quantization_dimension"] = axes[0]
    run = functools.partial(grid, **options)
    return _composite("quant.fake_quant", run, x, attributes)


def _composite(name: str, run: Callable, x: jax.Array, attributes: dict) -> jax.Array:
    return lax.composite(lambda x, **_: run(x), name=name)(x, **attributes)


def _is_ours(name: str) -> bool:
    """Whether Qwix has no such statistics: they are of a bare primitive or an inverse."""
    match = re.match(r"\D+(\d+)(.*)", name)
    return match is not None and (int(match[1]) >= LATE or match[2] == "_inverse")


def _top(fmt: Format) -> int:
    """Returns an integer format's largest code."""
    assert fmt.codes is not None
    return fmt.codes[1]


def _scaled(w: jax.Array, grid: Grid | None, gain: jax.Array):
    """Multiplies weight and grid by a gain for each channel; codes stay, but for signs."""
    if grid is not None:
        size = jnp.where(gain == 0, 1, jnp.abs(gain))
        scale = jnp.broadcast_to(
            grid.scale, jnp.broadcast_shapes(grid.scale.shape, gain.shape)
        )
        grid = Grid(grid.format, scale * size, grid.zero_point, grid.is_narrow)
    return w * gain, grid


def _dynamic(x: jax.Array, spec: Spec) -> jax.Array:
    """Rounds `x` to a grid that LiteRT computes anew at each call."""

    def run(x):
        return grid_of(calibrate(x, spec), spec)(x)

    attributes = {
        "scale": np.array([], np.float32),
        "dtype": DTYPES[spec.format.name],
        "narrow_range": False,
    }
    return _composite("quant.fake_quant", run, x, attributes)


def _flat_dot(c: Dot, x, w, grid: Grid | None, side: str, spec: Spec | None):
    """Multiplies x [.., K] by w [K, N], and gives the result the order that was asked for. With
    a `spec`, x is quantized by rows, and the converter then wants it as [M, K]."""
    other = "lhs" if side == "rhs" else "rhs"
    x_labels, w_labels = c.labels(other), c.labels(side)
    summed = [k for k in x_labels if k in w_labels]
    rows = [k for k in x_labels if k not in w_labels]
    columns = [k for k in w_labels if k not in x_labels]
    x_axes = [x_labels.index(k) for k in (*rows, *summed)]
    w_axes = [w_labels.index(k) for k in (*summed, *columns)]
    sizes = {**dict(zip(x_labels, x.shape)), **dict(zip(w_labels, w.shape))}
    count = int(np.prod([sizes[k] for k in summed]))
    with jax.ensure_compile_time_eval():
        w = jnp.transpose(w, w_axes).reshape(count, -1)
        if grid is not None:  # one scale, or one for each column
            scale = jnp.transpose(grid.scale, w_axes).reshape(1, -1)
            grid = Grid(grid.format, scale, grid.zero_point, grid.is_narrow)
    w = w if grid is None else annotated(grid, w)
    if x_axes != sorted(x_axes):
        x = jnp.transpose(x, x_axes)
    if spec is not None:
        x = _dynamic(x.reshape(-1, count), spec)
    elif len(summed) != 1:
        x = x.reshape(*(sizes[k] for k in rows), count)
    numbers = (((x.ndim - 1,), (0,)), ((), ()))
    out = lax.dot_general(x, w, numbers, precision=c.precision)
    if len(columns) != 1 or spec is not None:
        out = out.reshape([sizes[k] for k in (*rows, *columns)])
    order = [(*rows, *columns).index(k) for k in c.out]
    return out if order == sorted(order) else jnp.transpose(out, order)


def _per_channel(x: jax.Array, gain, shift, rule) -> jax.Array:
    """Computes gain * x + shift along the last axis, as a depthwise convolution."""
    if gain is None and shift is None:
        return x
    channels, fmt = x.shape[-1], as_format("int8")
    with jax.ensure_compile_time_eval():
        gain = jnp.ones(channels) if gain is None else jnp.asarray(gain)
        w = jnp.broadcast_to(gain, (channels,)).reshape(1, 1, 1, channels)
        scale = jnp.where(w == 0, 1, jnp.abs(w) / _top(fmt))
        grid = Grid(fmt, scale, None, True)
    images = x.reshape(x.shape[0], 1, -1, channels)
    numbers = ("NHWC", "HWIO", "NHWC")
    out = lax.conv_general_dilated(
        images,
        annotated(grid, w),
        (1, 1),
        "VALID",
        dimension_numbers=numbers,
        feature_group_count=channels,
    )
    return (out if shift is None else out + shift).reshape(x.shape)


def _by_path(tree: Any, is_leaf: Callable = lambda d: False) -> dict[tuple, Any]:
    """Returns {path of strings: value} for nested dicts, NNX states or NNX modules."""
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree)
    if isinstance(tree, nnx.State):
        tree = nnx.to_pure_dict(tree)
    flat: dict[tuple, Any] = {}

    def walk(path: tuple, node: Any) -> None:
        if isinstance(node, Mapping) and not is_leaf(node):
            for name, child in node.items():
                walk((*path, str(name)), child)
        else:
            flat[path] = flaxlib.unbox(node)

    walk((), flax.core.unfreeze(tree if tree is not None else {}))
    return flat


def _parts(path: str) -> tuple[str, ...]:
    return tuple(p for p in path.split("/") if p)
