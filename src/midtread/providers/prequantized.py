"""Prequantized: loads parameters that were quantized elsewhere into an NNX model.

A checkpoint is a nested dict along the model's own paths. A quantized parameter is a dict
of its parts, {"qvalue", "scale"} and perhaps {"zero_point"}, at `kernel` or at
`kernel/array`. What the model has there decides what becomes of it:

    checkpoint     model        result
    parts          quantized    the parts, in the model's dtypes and shardings
    parts          float        dequantized
    float          float        the array
    float          quantized    refused: quantize_params does that

Parts do not say which format their codes are in; the model does, and codes that its
container cannot hold are refused.
"""

import re
import warnings
from collections.abc import Mapping
from typing import Any

import flax
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from midtread.model import flaxlib
from midtread.numerics import views
from midtread.numerics.qarray import QArray, dequantize, validate

PARTS = ("qvalue", "scale", "zero_point")
_SAME = object()  # the default of act_qtype, which means that of the weights


def process_prequantized_params(
    checkpoint_params: Mapping[str, Any],
    template_params: nnx.Module,
    *,
    allow_extra_params: bool = False,
    use_checkpoint_sharding: bool = False,
) -> Any:
    """Turns parameters that were quantized elsewhere into a pure dict for `nnx.update`.

    Args:
        checkpoint_params: nested dict of arrays and of dicts of parts (`qvalue`, `scale`).
        template_params: the model under PtqProvider or QtProvider, possibly abstract.
        allow_extra_params: drop what the model does not have.
        use_checkpoint_sharding: leave arrays where the checkpoint has them, instead of
            moving them to where the model wants them.

    Returns:
        A nested dict shaped as the model's state.

    Raises:
        ValueError: A parameter that the model does not have, or that does not fit.
        TypeError: A template that is not an NNX model.
    """
    if not isinstance(template_params, nnx.Module):
        raise TypeError(
            "process_prequantized_params only supports NNX PTQ/QT models, not "
            f"{type(template_params).__name__}. For Linen build the tree with "
            "quantize_params, or put QArrays in its WithAux boxes."
        )
    loaded = {}
    for path, given in _flat(checkpoint_params).items():
        path, target = _target(path, template_params)
        if target is None:
            if allow_extra_params:
                continue
            raise ValueError(
                f"Found extra parameters in the checkpoint that the model does not have: "
                f"{_name(path)}. Pass allow_extra_params=True to drop them."
            )
        loaded[path] = _loaded(given, target, path, use_checkpoint_sharding)
    return nnx.to_pure_dict(nnx.state(flax.traverse_util.unflatten_dict(loaded)))


def restore_quantization_rules(
    checkpoint_params: Mapping[str, Any],
    rule_type: type,
    *,
    tile_size: float | None,
    act_qtype: Any = _SAME,
    **fields: Any,
) -> list[Any]:
    """Restores the rules that a checkpoint was quantized by, one for each module path.

    Numbers in a path (layers of a list) match any one name.

    Args:
        checkpoint_params: nested dict of arrays and of dicts of parts (`qvalue`, `scale`).
        rule_type: QuantizationRule, QtRule or a subclass.
        tile_size: the tile size of the weights, which scales do not always show.
        act_qtype: the format of activations; that of the weights if not given.
        fields: further fields of the rules.

    Returns:
        A list of rules.

    Raises:
        ValueError: Nothing in the checkpoint is quantized, or parts that do not fit.
    """
    rules: dict[str, Any] = {}
    for path, given in _flat(checkpoint_params).items():
        if not _is_parts(given):
            continue
        path = path[:-1] if path and path[-1] == "array" else path
        parts = ["[^/]+" if isinstance(p, int) else re.escape(str(p)) for p in path]
        where = "/".join(parts[:-1])
        weight = given["qvalue"].dtype
        rule = rule_type(
            module_path=where,
            weight_qtype=weight,
            act_qtype=weight if act_qtype is _SAME else act_qtype,
            weight_calibration_method=(
                "absmax" if given.get("zero_point") is None else "minmax"
            ),
            tile_size=tile_size,
            **fields,
        )
        if rules.setdefault(where, rule) != rule:
            warnings.warn(
                f"the parameters of {where!r} ask for different rules, {rules[where]} "
                f"and {rule}; the later one is taken.",
                stacklevel=2,
            )
        rules[where] = rule
    return list(rules.values())


def _is_parts(x: Any) -> bool:
    return isinstance(x, dict) and "qvalue" in x


def _flat(tree: Mapping[str, Any]) -> dict[tuple, Any]:
    return flax.traverse_util.flatten_dict(tree, is_leaf=lambda _, x: _is_parts(x))


def _name(path: tuple) -> str:
    return "/".join(map(str, path))


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def _target(path: tuple, model: nnx.Module) -> tuple[tuple, Any]:
    """Returns where a parameter goes, and what the model has there: parts or an array."""
    value = flaxlib.value_at(model, path)
    if value is None and path and path[-1] == "array":
        above = flaxlib.value_at(model, path[:-1])
        if _is_array(flaxlib.unbox(above)):  # a float model has no box to open
            return path[:-1], above
    inner = (
        value.get("array") if isinstance(value, dict) else getattr(value, "array", None)
    )
    return path, value if inner is None else inner


def _loaded(given: Any, target: Any, path: tuple, keep_sharding: bool) -> Any:
    quantized = isinstance(target, dict | QArray)
    if isinstance(given, dict):
        _check_parts(given, path)
        if quantized:
            return _parts(given, target, path, keep_sharding)
        return _dequantized(given, target, path, keep_sharding)
    if quantized:
        raise ValueError(
            f"Unhandled or invalid parameter combination at {_name(path)}: the checkpoint "
            f"has a float array and the model a quantized one. Use quantize_params."
        )
    return _fitted(given, target, path, keep_sharding)


def _check_parts(given: dict, path: tuple) -> None:
    unknown = sorted(set(given) - set(PARTS))
    if unknown:
        raise ValueError(
            f"{_name(path)} has unsupported parts {unknown}. There are: {', '.join(PARTS)}."
        )
    missing = [name for name in ("qvalue", "scale") if name not in given]
    if missing:
        raise ValueError(f"{_name(path)} is missing its {' and '.join(missing)}.")


def _parts(given: dict, target: Any, path: tuple, keep_sharding: bool) -> QArray:
    get = target.get if isinstance(target, dict) else lambda k: getattr(target, k, None)
    parts = {}
    for name in PARTS:
        mine, theirs = given.get(name), get(name)
        if (mine is None) != (theirs is None):
            raise ValueError(
                f"{_name(path)} has an unexpected {name}: the model is symmetric there."
                if theirs is None
                else f"{_name(path)} is missing its {name}, which the model has."
            )
        if mine is not None:
            part = (*path, name)
            parts[name] = _fitted(mine, theirs, part, keep_sharding, name != "qvalue")
    out = QArray(**parts)
    validate(out)
    return out


def _fitted(value, target, path, keep_sharding: bool, may_grow: bool = False):
    """Makes an array of the checkpoint what the model wants: its sharding, shape and dtype."""
    target = flaxlib.unbox(target)
    if not _is_array(target):
        raise TypeError(
            f"{_name(path)} is no array in the model, but a {type(target).__name__}."
        )
    sharding = _sharding(value if keep_sharding else target, path)
    value = jnp.asarray(value) if sharding is None else jax.device_put(value, sharding)
    if value.shape != target.shape:
        value = _grown(value, target.shape, path, may_grow)
    return value if value.dtype == target.dtype else _cast(value, target.dtype, path)


def _grown(value: jax.Array, shape, path: tuple, may_grow: bool) -> jax.Array:
    """Repeats the scales of larger tiles."""
    try:
        if may_grow:
            return views.expand(value, shape)
    except ValueError:
        pass
    raise ValueError(
        f"{_name(path)} has shape {value.shape}, the model expects {shape}."
    )


def _cast(value: jax.Array, dtype: Any, path: tuple) -> jax.Array:
    cast = value.astype(dtype)
    if path[-1] in ("qvalue", "zero_point") and not bool(
        (cast.astype(jnp.float32) == value.astype(jnp.float32)).all()
    ):
        raise ValueError(
            f"{_name(path)} holds codes in {value.dtype} that do not fit the model's "
            f"{dtype}: another format. Dequantize them and use quantize_params."
        )
    return cast


def _dequantized(given: dict, target: Any, path: tuple, keep_sharding: bool):
    parts = {k: jnp.asarray(v) for k, v in given.items() if v is not None}
    wanted = flaxlib.unbox(target)
    sharding = _sharding(given["qvalue"] if keep_sharding else wanted, path)
    if isinstance(sharding, NamedSharding):
        whole = NamedSharding(sharding.mesh, PartitionSpec())
        parts = {
            k: jax.device_put(v, sharding if k == "qvalue" else whole)
            for k, v in parts.items()
        }
    out = QArray(**parts)
    validate(out)
    return _fitted(dequantize(out), target, path, keep_sharding=keep_sharding)


def _sharding(x: Any, path: tuple) -> Any:
    """Returns the sharding of an array or shape, on the current mesh if it names an abstract
    one."""
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        mesh = jax.sharding.get_mesh()
        if mesh.empty:
            raise ValueError(
                f"{_name(path)} is sharded over an abstract mesh: run this inside the "
                "same jax.set_mesh(...) as the model."
            )
        return NamedSharding(mesh, sharding.spec)
    return sharding
