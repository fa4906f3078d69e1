"""Params: makes the parameters of a model under PtqProvider from float ones.

quantize_params(...)   a tree of them, for a model whose shapes are known
quantize_like(...)     one parameter, as a box says
check_data(...)        refuses static scales for which there is no data
"""

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from midtread.model import flaxlib
from midtread.model.boxes import WithAux
from midtread.numerics import views
from midtread.numerics.calibration import statistic_of
from midtread.numerics.qarray import QArray, quantize_by_spec
from midtread.numerics.scales import compute_scales
from midtread.numerics.spec import Spec


def quantize_params(
    params: Any,
    abstract_quantized_params: Any,
    quant_stats: Any = None,
    *,
    allow_extra_params: bool = False,
) -> Any:
    """Quantizes a float parameter tree for a model under PtqProvider.

    >>> from flax import linen as nn
    >>> from midtread.model.quantize import quantize_model
    >>> from midtread.model.rules import QuantizationRule
    >>> from midtread.providers.ptq import PtqProvider
    >>> float_model, x = nn.Dense(4), jnp.ones((2, 8))
    >>> params = float_model.init(jax.random.key(0), x)["params"]
    >>> provider = PtqProvider([QuantizationRule(weight_qtype="int8")])
    >>> model = quantize_model(float_model, provider)
    >>> shapes = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
    >>> quantize_params(params, shapes)["kernel"].array.qvalue.dtype.name
    'int8'

    Args:
        params: a nested dict of arrays; any subtree of the model's will do.
        abstract_quantized_params: what the quantized model's `init` gives under
            jax.eval_shape (Linen), or the quantized model itself (NNX).
        quant_stats: the statistics of a QAT model, for static scales of activations.
        allow_extra_params: whether parameters that the quantized model does not have are
            dropped, instead of refused.

    Returns:
        The parameters as the quantized model has them: a nested dict, for `apply` in Linen
        and for `nnx.update` in NNX.

    Raises:
        TypeError: `params` is not a nested dict of arrays.
        ValueError: a parameter is not in the quantized model or does not fit it, or a
            static scale of a module in `params` has no statistics.
    """
    if not isinstance(params, Mapping) or isinstance(params, nnx.State):
        raise TypeError(
            f"params is not a pure dict of arrays but a {type(params).__name__}: write "
            "nnx.to_pure_dict(nnx.state(model, nnx.Param)), or variables['params']."
        )
    out = {}
    for path, param in flax.traverse_util.flatten_dict(params).items():
        name = "/".join(map(str, path))
        if not isinstance(param, jax.Array | np.ndarray):
            is_codes = getattr(type(param), "is_boxed", False)
            hint = (
                "It is quantized already: start from the float parameters."
                if is_codes
                else "Use nn.unbox or nnx.to_pure_dict first."
            )
            raise TypeError(
                f"params is not a pure dict of arrays: {name} is a "
                f"{type(param).__name__}. {hint}"
            )
        target = flaxlib.value_at(abstract_quantized_params, path)
        if target is None:
            if allow_extra_params:
                continue
            raise ValueError(
                f"{path} is not found in the abstract_quantized_params."
                f"{_which_half(params, abstract_quantized_params)}"
            )
        out[path] = _like(target, jnp.asarray(param), name)
    out |= _static_scales(abstract_quantized_params, quant_stats or {})
    if isinstance(abstract_quantized_params, Mapping):
        _check_static_scales(abstract_quantized_params, out)
    if isinstance(abstract_quantized_params, nnx.Module):
        out = nnx.to_pure_dict(nnx.state(out))
    return flax.traverse_util.unflatten_dict(out)


def _which_half(params: Mapping, abstract: Any) -> str:
    """Says what to write where only one of the two is a tree of collections."""
    if not isinstance(abstract, Mapping):
        return ""
    if "params" in abstract and "params" not in params:
        return " These are all collections: write shapes['params']."
    if "params" in params and "params" not in abstract:
        return " params are all collections: write variables['params']."
    return ""


def _like(target: Any, param: jax.Array, name: str) -> Any:
    """Makes a parameter as the quantized model has it."""
    if isinstance(target, WithAux):
        try:
            return WithAux(quantize_like(target, param), target.how)
        except ValueError as error:
            raise ValueError(f"{name} does not fit: {error}") from None
    shape = getattr(flaxlib.unbox(target), "shape", param.shape)
    if shape != param.shape:
        raise ValueError(
            f"{name} does not fit: it has shape {list(param.shape)}, and in the quantized "
            f"model {list(shape)}."
        )
    return param


def _static_scales(abstract: Any, quant_stats: Any) -> dict:
    out = {}
    flat = flax.traverse_util.flatten_dict(flax.core.unfreeze(quant_stats))
    for path in {p[:-1] for p in flat}:
        stat = {p[-1]: v for p, v in flat.items() if p[:-1] == path}
        if "count" not in stat:
            raise ValueError(
                f"quant_stats has {'/'.join(map(str, path))}, which is no statistic: write "
                "variables['quant_stats']."
            )
        if _is_empty(stat):
            raise ValueError(
                f"quant_stats is not initialized for {path}: run the model on some data first."
            )
        scale_path = (*path[:-1], f"{path[-1]}_scale")
        target = flaxlib.value_at(abstract, scale_path)
        if not isinstance(target, WithAux):
            raise ValueError(  # noqa: TRY004
                f"the quantized model has no static scale at {scale_path}."
            )
        scales = compute_scales(
            _range_of(stat), target.how.format, target.how.scale_rule
        )
        out[scale_path] = target.replace(array=scales.scale)
        if scales.zero_point is not None:
            out[(*path[:-1], f"{path[-1]}_zero_point")] = scales.zero_point
    return out


def _range_of(stat: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the range that a statistic stands for. That of layers under nn.scan or nn.vmap has
    further axes in front, which its count has alone."""
    read = statistic_of(stat).range
    for _ in range(jnp.ndim(stat["count"])):
        read = jax.vmap(read)
    return read(stat)


def _check_static_scales(abstract: Mapping, out: Mapping) -> None:
    """Refuses parameters of a module whose static scales were not given."""
    is_leaf = lambda _, value: isinstance(value, WithAux)
    flat = flax.traverse_util.flatten_dict(
        flax.core.unfreeze(abstract), is_leaf=is_leaf
    )
    modules = {path[:-1] for path in out}
    for path, box in flat.items():
        is_scale = isinstance(box, WithAux) and not isinstance(
            flaxlib.unbox(box.array), QArray
        )
        if is_scale and path[:-1] in modules and path not in out:
            raise ValueError(
                f"{'/'.join(map(str, path))} is a static scale, and found from statistics: "
                "pass quant_stats=variables['quant_stats'] of the model after QtProvider ran "
                "it on data with the same rules."
            )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _quantize_jit(spec: Spec, stacked: int, x: jax.Array) -> QArray:
    quantize = functools.partial(quantize_by_spec, spec=spec)
    for _ in range(stacked):
        quantize = jax.vmap(quantize)
    return quantize(x)


def quantize_like(box: WithAux, x: jax.Array) -> QArray:
    """Quantizes as the box says. Layers under scan are one array with further axes in front,
    which the Spec of one layer does not know; there are as many as give the box's shapes."""
    target = flaxlib.unbox(box.array)
    if not views.is_regrouped(x.shape, target.shape):
        raise ValueError(
            f"it has shape {list(x.shape)}, and in the quantized model {list(target.shape)}."
        )
    x = x.reshape(target.shape)
    for stacked in range(x.ndim):
        try:
            shapes = jax.eval_shape(
                functools.partial(_quantize_jit, box.how, stacked), x
            )
        except ValueError:
            continue  # the Spec names an axis that the array inside does not have
        if shapes.scale.shape == target.scale.shape:
            return _quantize_jit(box.how, stacked, x)
    raise ValueError(
        f"{box.how} does not turn an array of shape {x.shape} into scales of shape "
        f"{target.scale.shape}: was it made for another model?"
    )


def check_data(scales: dict[str, Any], inputs: Any) -> None:
    """Refuses to compute static scales without data; `scales` is {path: its statistics}."""
    of = lambda names: ", ".join(names[:3]) + (" .." if names[3:] else "")
    stats = {k: v for k, v in scales.items() if isinstance(v, flaxlib.QuantStat)}
    empty = [name for name, stat in stats.items() if _is_empty(flaxlib.read(stat))]
    if empty:
        raise ValueError(
            f"quant_stats is not initialized for {of(empty)}: run the model on some data first."
        )
    without = [name for name in scales if name not in stats]
    leaves = jax.tree.leaves(inputs)
    if without and any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        raise ValueError(
            f"{of(without)} are static scales, and found from data: give quantize_model arrays, "
            "or a model that a QtProvider ran on data, not shapes."
        )
    if without:
        warnings.warn(
            f"static scales of {of(without)} come from the example input of quantize_model, "
            "and from nothing else: give it data, or run the model under a QtProvider first.",
            stacklevel=2,
        )


def _is_empty(stat: Mapping) -> bool:
    """Whether a statistic has seen no data. In a trace that is not known."""
    count = stat["count"]
    # This uses NumPy, for inside a trace jnp makes a tracer even of known numbers.
    return not isinstance(count, jax.core.Tracer) and bool(
        (np.asarray(count) == 0).any()
    )
