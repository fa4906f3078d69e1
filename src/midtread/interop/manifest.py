"""Manifest: what a checkpoint says of itself, so that it can never be taken for another.

A tree (a Linen variable dict, an NNX model, any pytree) is a set of named entries: arrays,
QArrays, and boxes (`WithAux`) that also know how their array was made. A file stores bare
arrays; the manifest, JSON beside them, says what they are parts of:

    {"format": "midtread", "version": 1, "rules": [...], "names": [...], "sum": ...,
     "entries": {"params/up/kernel": {
        "qtype": "int4", "tile": [128, 1], "logical": null, "rule": 0, "sum": ...,
        "how": {"format": "int4", "calibration": "absmax", ...},
        "parts": {"qvalue": {"dtype": "int4", "shape": [256, 64], "bits": 4, ...},
                  "scale": {"dtype": "bfloat16", "shape": [2, 64], "bits": 16, ...}}}}}

Every entry has a SHA-256 of its own description, which holds the digests of its bytes (in
safetensors) or of its files (in orbax): a changed bit, a swapped scale, another qtype is
refused with the entry's name. The checkpoint's own sum covers the list of names and the
version. Nothing here is ever executed: it is JSON and arrays of numbers.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from midtread.interop.trees import PARTS, Tree, near, nest, parts
from midtread.model.boxes import WithAux
from midtread.model.rules import QtRule, QuantizationRule, as_rules
from midtread.numerics.formats import FORMATS, as_format, dtype_bits
from midtread.numerics.qarray import QArray, validate
from midtread.numerics.spec import Spec
from midtread.ops.recipe import RECIPES
from midtread.providers.lora import LoraRule

FORMAT, VERSION = "midtread", 1
_KEYS = {"format", "version", "rules", "names", "entries", "sum"}
_RULES = {kind.__name__: kind for kind in (QuantizationRule, QtRule, LoraRule)}


def canonical(value: Any) -> str:
    """Returns JSON with one spelling: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


def _sum_of(record: Mapping[str, Any], *name: str) -> str:
    body = {k: v for k, v in record.items() if k not in ("sum", "entries")}
    return digest(canonical([*name, body]).encode())


# --- describing -------------------------------------------------------------------------------


def describe(name: str, entry: Any, rules: Sequence[Any] = ()) -> dict[str, Any]:
    """Returns an entry without its data: all that `rebuilt` needs besides arrays."""
    inner = entry.array if isinstance(entry, WithAux) else entry
    described: dict[str, Any] = {"parts": {}}
    for part, array in parts(entry).items():
        dtype = getattr(array, "dtype", None)
        if not isinstance(dtype, np.dtype) or dtype.kind in "cOSUmM":
            raise TypeError(
                f"{name}: {type(array).__name__} {getattr(array, 'dtype', '')} cannot be "
                "saved; arrays of numbers can."
            )
        bits = 8 if array.dtype == np.bool_ else dtype_bits(array.dtype)
        if part == "qvalue":
            bits = min(bits, inner.format.bits)
        described["parts"][part] = {
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            "bits": bits,
        }
    if isinstance(inner, QArray):
        described["qtype"] = inner.format.name
        described["tile"] = list(inner.scale_tile_shape)
        described["logical"] = None if inner.logical is None else list(inner.logical)
        rule = _rule_of(name, inner.format.name, rules)
        if rule is not None:
            described["rule"] = rule
    if isinstance(entry, WithAux):
        described["how"] = _spec_json(entry.how)
    return described


def records(described: Mapping) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields (entry, part, record) in the order of the data."""
    for name in sorted(described):
        for part in sorted(described[name]["parts"]):
            yield name, part, described[name]["parts"][part]


def full(name: str, part: str) -> str:
    """Returns the name of a part of an entry, as files have it."""
    return f"{name}/{part}" if part else name


def _rule_of(name: str, qtype: str, rules: Sequence[Any]) -> int | None:
    """Returns the rule that made a parameter: the first that matches its module and its
    format."""
    path = name.rpartition("/")[0]
    path = path.removeprefix("params").removeprefix("/")
    for i, rule in enumerate(rules):
        if rule.weight_qtype is None or as_format(rule.weight_qtype).name != qtype:
            continue
        if any(rule.matches(path, op) for op in rule.op_names or ("",)):
            return i
    return None


def _spec_json(spec: Spec) -> dict[str, Any]:
    return {
        "format": spec.format.name,
        "channelwise_axes": list(spec.channelwise_axes),
        "tiled_axes": [list(pair) for pair in spec.tiled_axes],
        "calibration": ",".join(
            [spec.method, *map(repr, spec.calibration.args)]  # every digit
        ),
        "rounding": spec.rounding,
        "noise_axes": list(spec.noise_axes),
        "scale_dtype": None if spec.scale_dtype is None else spec.scale_dtype.name,
        "scale_rule": spec.scale_rule,
    }


def _spec_from(fields: Mapping[str, Any]) -> Spec:
    tiles = {axis: tile for axis, tile in fields["tiled_axes"]}
    lists = {k: tuple(fields[k]) for k in ("channelwise_axes", "noise_axes")}
    return Spec(**{**fields, **lists, "tiled_axes": tiles})


def rebuilt(
    file: str,
    manifest: Mapping[str, Any],
    target: Tree | None,
    read: Callable[[str, Mapping[str, Any]], dict[str, Any]],
) -> Any:
    """Returns the tree again, nested dicts or one like the target, from what `read` gives:
    the arrays of an entry by part."""
    built, arrays = {}, {}
    for name, entry in manifest["entries"].items():
        arrays[name] = read(name, entry)
        try:
            built[name] = _built(entry, arrays[name])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{file}: tensor {name!r}: {error}") from error
    return nest(built) if target is None else target.rebuild(arrays)


def _built(described: Mapping[str, Any], arrays: Mapping[str, Any]) -> Any:
    """Returns an entry again. Raises ValueError if its parts do not belong together."""
    if "qtype" in described:
        logical = described["logical"]
        inner = QArray(
            **{part: arrays.get(part) for part in PARTS},
            qtype=described["qtype"],
            logical=None if logical is None else tuple(logical),
        )
        validate(inner)
    else:
        inner = arrays[""]
    return WithAux(inner, _spec_from(described["how"])) if "how" in described else inner


# --- rules ------------------------------------------------------------------------------------


def rules_json(rules: Any) -> list[dict[str, Any]]:
    """Returns rules, or a provider's, as plain data: the fields that are not at their
    default."""
    rules = getattr(rules, "_rules", rules)
    out = []
    for i, rule in enumerate(as_rules(rules or ())):
        if type(rule).__name__ not in _RULES:
            raise TypeError(
                f"rule {i} is a {type(rule).__name__}, which has no name here."
            )
        fields: dict[str, Any] = {"type": type(rule).__name__}
        for field in dataclasses.fields(rule):
            value = getattr(rule, field.name)
            if value is not field.default and value != field.default:
                fields[field.name] = _field_json(i, field.name, value)
        out.append(fields)
    return out


def _field_json(index: int, name: str, value: Any) -> Any:
    if name.endswith("_qtype"):
        return as_format(value).name
    if name == "recipe":
        known = [k for k, recipe in RECIPES.items() if recipe == value]
        if known:
            return known[0]
    elif isinstance(value, tuple | list | set | frozenset):
        return list(value)
    elif isinstance(value, str | int | float | bool | Mapping):
        return dict(value) if isinstance(value, Mapping) else value
    raise ValueError(
        f"rule {index}: {name}={value!r} has no name that a file could hold. Save without "
        "rules=, or use a named recipe."
    )


def rules_from(manifest: Mapping[str, Any]) -> list[Any]:
    """Returns the rules that a checkpoint was saved with."""
    out = []
    for fields in manifest["rules"]:
        fields = dict(fields)
        kind = _RULES[fields.pop("type")]
        if "recipe" in fields:
            fields["recipe"] = RECIPES[fields["recipe"]]
        for name in ("op_names", "act_batch_axes", "channelwise_noise_axes"):
            if name in fields:
                fields[name] = tuple(fields[name])
        out += as_rules([fields], kind)
    return out


# --- sealing and checking ---------------------------------------------------------------------


def seal(
    entries: dict[str, dict[str, Any]], rules: list, **more: Any
) -> dict[str, Any]:
    """Returns the manifest of these entries, with its sums."""
    for name, entry in entries.items():
        entry["sum"] = _sum_of(entry, name)
    whole = {"format": FORMAT, "version": VERSION, "rules": rules, **more}
    whole |= {"names": sorted(entries), "entries": entries}
    return {**whole, "sum": _sum_of(whole)}


def check(file: str, manifest: Any, *more: str) -> dict[str, Any]:
    """Raises ValueError naming the file, and the entry, where a manifest is not whole."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(
            f"{file} has no Midtread manifest: it was not written by midtread, or is damaged. "
            "Float checkpoints of other writers are read by load_float."
        )
    version = manifest.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(f"{file} is damaged: its version is {version!r}.")
    if version > VERSION:
        raise ValueError(
            f"{file} was written by a newer Midtread: version {version} of the format, and "
            f"this one reads up to {VERSION}. Update midtread."
        )
    if set(manifest) != _KEYS | set(more):
        odd = sorted(set(manifest) ^ (_KEYS | set(more)))
        raise ValueError(f"{file} is damaged: its manifest's keys {odd} are wrong.")
    if manifest["sum"] != _sum_of(manifest):
        raise ValueError(
            f"{file} is damaged: the list of its tensors does not have the sum it was "
            "written with."
        )
    _check_entries(file, manifest)
    return manifest


def _check_entries(file: str, manifest: dict[str, Any]) -> None:
    entries = manifest["entries"]
    entries = entries if isinstance(entries, dict) else {}
    for name in manifest["names"]:
        if name not in entries:
            raise ValueError(f"{file}: tensor {name!r} is missing from its manifest.")
    for name, entry in entries.items():
        if name not in manifest["names"]:
            raise ValueError(f"{file}: tensor {name!r} is not among its names.")
        if not isinstance(entry, dict) or entry.get("sum") != _sum_of(entry, name):
            raise ValueError(
                f"{file}: the description of tensor {name!r} does not have the sum it was "
                "written with: it was damaged or changed."
            )
        if "qtype" in entry and entry["qtype"] not in FORMATS:
            raise ValueError(
                f"{file}: tensor {name!r} has format {entry['qtype']!r}, which this version "
                f"does not know. There are: {', '.join(FORMATS)}."
            )


def require_floats(file: str, manifest: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first tensor that is quantized."""
    for name, entry in manifest["entries"].items():
        if "qtype" in entry:
            raise ValueError(f"{file}: {name!r} is quantized: use load.")


def match(file: str, manifest: Mapping[str, Any], target: Tree) -> None:
    """Raises ValueError naming the first tensor in which a target differs."""
    stored = manifest["entries"]
    for name, entry in target.entries.items():
        if name not in stored:
            raise ValueError(
                f"{file} has no tensor {name!r}, which the target has: it is a checkpoint "
                f"of another model. {near(name, stored)}"
            )
        want = describe(name, entry)
        for field in ("qtype", "logical", "how"):
            if want.get(field) != stored[name].get(field):
                raise ValueError(
                    f"{file}: tensor {name!r} has {field} {stored[name].get(field)}, but the "
                    f"target has {want.get(field)}."
                )
        have = stored[name]["parts"]
        for part in want["parts"].keys() | have.keys():
            a, b = have.get(part), want["parts"].get(part)
            pick = lambda p: p and (p["dtype"], p["shape"])
            if pick(a) != pick(b):
                raise ValueError(
                    f"{file}: tensor {full(name, part)!r} is {pick(a)}, but the "
                    f"target has {pick(b)}."
                )
    extra = sorted(stored.keys() - target.entries.keys())
    if extra:
        raise ValueError(
            f"{file} holds tensor {extra[0]!r}, which the target does not have: it is a "
            f"checkpoint of another model. {near(extra[0], target.entries)}"
        )


def stored_size(part: Mapping[str, Any]) -> int:
    """Returns the number of bytes of a part at its own width."""
    return math.ceil(math.prod(part["shape"]) * part["bits"] / 8)
