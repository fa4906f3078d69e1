"""Safetensors: quantized trees in one file that any reader of the format can open.

    8 bytes    length of the header
    header     JSON: {"__metadata__": {"midtread": manifest}, name: {dtype, shape, data_offsets}}
    data       the arrays, end to end

A QArray `up/kernel` is the tensors `up/kernel/qvalue`, `up/kernel/scale`, ... Codes take the
bits of their format: below eight they are packed, end to end, into U8. Dtypes that the
format has no name for are stored as U8 as well; the manifest (interop/manifest.py) has the
real dtype, the shape, and a SHA-256 of each tensor's bytes, which `load` checks.

Written and read here, in a few lines, because no library reads fp8 into numpy, and because
a file from elsewhere is input like any other: every number in its header is checked before
it is used.
"""

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import jax
import ml_dtypes
import numpy as np

from midtread.interop import manifest as m
from midtread.interop import trees
from midtread.numerics import packing
from midtread.numerics.formats import as_format

# names of the format -> dtypes; all others are stored as bytes
DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16,
    "U32": np.uint32, "I32": np.int32, "U64": np.uint64, "I64": np.int64,
    "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip
DTYPES = {k: np.dtype(v) for k, v in DTYPES.items()}
_NAMES = {v: k for k, v in DTYPES.items()}
_MOST_HEADER = 100_000_000  # as the format's own readers have it
_NO_SUM = "0" * 64


def save(path: Any, tree: Any, *, rules: Any = None) -> None:
    """Writes a tree of arrays and QArrays: Linen variables, an NNX model, any pytree.

    A file that is there is replaced once the new one is whole.

    >>> import midtread as mt
    >>> file = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> save(file, {"kernel": mt.quantize(jax.numpy.ones((4, 2)), "int4")})
    >>> load(file)["kernel"].qvalue.dtype.name
    'int4'

    Args:
        path: the file.
        tree: what to write.
        rules: the rules, or the provider, that quantized it; `read_rules` gives them back.

    Raises:
        ValueError: An array that is spread over several processes, or a leaf that is no
            array.
        TypeError: A tree that holds no arrays, such as a Linen module or an nnx.State.
    """
    path = os.fspath(path)
    entries = trees.open_tree(tree).entries
    rules = getattr(rules, "_rules", rules) or ()
    described = {k: m.describe(k, v, rules) for k, v in entries.items()}
    for name, part, record in m.records(described):
        array = trees.parts(entries[name])[part]
        if not getattr(array, "is_fully_addressable", True):
            raise ValueError(
                f"{m.full(name, part)}: the array is spread over several processes. Save "
                "with midtread.interop.orbax."
            )
        record["sha256"] = _NO_SUM
    listed = m.rules_json(rules)
    placeholder = _header(described, listed)
    with replacing(path) as file:
        file.write(placeholder)
        for name, part, record in m.records(described):
            qtype = described[name].get("qtype")
            array = trees.parts(entries[name])[part]
            data = _encode(name, part, record, qtype, array)
            record["sha256"] = m.digest(data)
            file.write(data)
        final = _header(described, listed)
        assert len(final) == len(placeholder)
        file.seek(0)
        file.write(final)


def write(
    path: Any,
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    arrays: Iterable[np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a plain file, without a manifest: one for other programs, array by array.

    A file that is there is replaced once the new one is whole.

    Args:
        path: the file.
        tensors: (shape, dtype) by name; the dtypes that the format has, `DTYPES`.
        arrays: the arrays, in the same order; each is asked for when it is written.
        metadata: strings by name.

    Raises:
        ValueError: a dtype has no name in the format, or an array is not what `tensors` says.

    >>> import tempfile
    >>> file = f"{tempfile.mkdtemp()}/a.safetensors"
    >>> write(file, {"a": ((2,), np.dtype("int8"))}, [np.ones(2, np.int8)])
    >>> Reader.of(file).mapped("a")
    array([1, 1], dtype=int8)
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, (shape, dtype) in tensors.items():
        if np.dtype(dtype) not in _NAMES:
            raise ValueError(
                f"tensor {name!r} is {dtype}, for which safetensors have no name: known "
                f"are {', '.join(str(d) for d in _NAMES)}."
            )
        end = begin + math.prod(shape) * np.dtype(dtype).itemsize
        where = {"shape": list(shape), "data_offsets": [begin, end]}
        header[name] = {"dtype": _NAMES[np.dtype(dtype)], **where}
        begin = end
    with replacing(os.fspath(path)) as file:
        file.write(_with_length(header))
        for (name, (shape, dtype)), array in zip(tensors.items(), arrays, strict=True):
            if array.shape != tuple(shape) or array.dtype != dtype:
                raise ValueError(
                    f"tensor {name!r} is {array.dtype}{list(array.shape)}, but was said "
                    f"to be {dtype}{list(shape)}."
                )
            flat = np.ascontiguousarray(array).reshape(-1)
            file.write(flat.view(np.uint8).data)


def _with_length(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _umask() -> int:
    mask = os.umask(0)  # there is no way to ask but to set it
    os.umask(mask)
    return mask


@contextlib.contextmanager
def replacing(path: str) -> Iterator[Any]:
    """Opens a file to write bytes to, which takes the place of `path` once it is whole.

    Where writing stops with an error, what was there stays, and nothing beside it.

    >>> file = os.path.join(tempfile.mkdtemp(), "a")
    >>> with replacing(file) as new:
    ...     new.write(b"whole")
    5
    >>> os.listdir(os.path.dirname(file))
    ['a']

    Args:
        path: the file.

    Returns:
        The file, open, for a `with` statement.
    """
    folder = os.path.dirname(os.path.abspath(path))
    prefix = f"{os.path.basename(path)}."
    with tempfile.NamedTemporaryFile(
        dir=folder, prefix=prefix, suffix=".partial", delete=False
    ) as file:
        try:
            yield file
            file.close()
            os.chmod(file.name, 0o666 & ~_umask())  # as any new file has it
            os.replace(file.name, path)
        except BaseException:
            file.close()
            os.unlink(file.name)
            raise


def _stored_as(record: Mapping[str, Any]) -> tuple[str, list[int]]:
    """Returns the dtype and shape that the file has for a part."""
    dtype = _NAMES.get(np.dtype(record["dtype"]))
    if record["bits"] < 8:
        return "U8", [m.stored_size(record)]
    return (dtype or "U8"), record["shape"]


def _header(described: dict, rules: list) -> bytes:
    sealed = m.seal(described, rules)
    header: dict[str, Any] = {"__metadata__": {"midtread": m.canonical(sealed)}}
    begin = 0
    for name, part, record in m.records(described):
        dtype, shape = _stored_as(record)
        end = begin + m.stored_size(record)
        header[m.full(name, part)] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [begin, end],
        }
        begin = end
    return _with_length(header)


def _format_of(record: Mapping[str, Any], qtype: str | None, part: str):
    """Returns the format by whose width a part is packed."""
    return as_format(qtype if part == "qvalue" and qtype else record["dtype"])


def _encode(name: str, part: str, record: Mapping, qtype: Any, array: Any) -> bytes:
    host = np.ascontiguousarray(jax.device_get(array))
    if record["bits"] >= 8:
        return host.tobytes()
    fmt = _format_of(record, qtype, part)
    packed = packing.pack(host, fmt)
    if fmt.is_emulated and not np.array_equal(
        packing.unpack(packed, fmt, host.shape), host
    ):
        raise ValueError(
            f"{m.full(name, part)}: codes beyond the range of {fmt.name} cannot be saved."
        )
    return packed.tobytes()


# --- reading ----------------------------------------------------------------------------------


def load(path: Any, target: Any = None) -> Any:
    """Reads what `save` wrote, and checks every bit of it.

    Without a target: nested dicts with QArrays (and WithAux boxes) in them, which a Linen
    model takes as it is.

    >>> file = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> save(file, {"layer": {"scale": np.ones(3, np.float32)}})
    >>> load(file)["layer"]["scale"].tolist()
    [1.0, 1.0, 1.0]

    Args:
        path: the file.
        target: a tree like the one saved, or its shapes (an NNX model, what
            jax.eval_shape(model.init, ...) gives): a tree of that kind is returned, with
            its shardings.

    Returns:
        The tree: nested dicts, or one like the target.

    Raises:
        ValueError: A file that is damaged, that `save` did not write, or that is of another
            model than the target.
    """
    file = os.fspath(path)
    want = None if target is None else trees.open_tree(target)
    with Reader(file) as reader:
        manifest = reader.manifest()
        if want is not None:
            m.match(file, manifest, want)

        def read(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
            like = {} if want is None else trees.parts(want.entries[name])
            host = reader.entry(name, entry)
            return {p: trees.place(a, like.get(p)) for p, a in host.items()}

        return m.rebuilt(file, manifest, want, read)


def load_float(path: Any, target: Any) -> Any:
    """Reads float tensors of any writer into a float, QAT or QT model's variables.

    Names are joined by slashes or dots, as in the target; shapes and dtypes must be its.

    >>> file = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> save(file, {"layer": {"scale": np.ones(3, np.float32)}})
    >>> target = {"layer": {"scale": jax.ShapeDtypeStruct((3,), np.float32)}}
    >>> load_float(file, target)["layer"]["scale"].shape
    (3,)

    Args:
        path: the file.
        target: the model's variables, or their shapes.

    Returns:
        A tree like the target.

    Raises:
        ValueError: A file that is damaged or quantized, or whose tensors are not the
            target's.
    """
    file = os.fspath(path)
    with Reader(file) as reader:
        arrays = {name: reader.raw(name) for name in reader.tensors}
        if "midtread" in reader.metadata:
            manifest = reader.manifest()
            m.require_floats(file, manifest)
            for name, entry in manifest["entries"].items():
                reader.entry(name, entry)  # checks its sum
        return trees.fill(file, arrays, trees.open_tree(target))


def read_manifest(path: Any) -> dict[str, Any]:
    """Returns what a checkpoint says of itself; no tensor is read.

    >>> import midtread as mt
    >>> file = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> save(file, {"kernel": mt.quantize(jax.numpy.ones((4, 2)), "int4")})
    >>> read_manifest(file)["entries"]["kernel"]["qtype"]
    'int4'

    Args:
        path: the file.

    Returns:
        The manifest: of each array its format, dtypes, shapes and sums; and the rules.

    Raises:
        ValueError: A file that is damaged, or that `save` did not write.
    """
    with Reader(os.fspath(path)) as reader:
        return reader.manifest()


def read_rules(path: Any) -> list[Any]:
    """Returns the rules that a checkpoint was saved with.

    >>> from midtread.model.rules import QuantizationRule
    >>> file = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> save(file, {"x": np.ones(3)}, rules=[QuantizationRule(weight_qtype="int4")])
    >>> read_rules(file)[0].weight_qtype
    'int4'

    Args:
        path: the file.

    Returns:
        The rules, in order; none where it was saved without.

    Raises:
        ValueError: A file that is damaged, or that `save` did not write.
    """
    return m.rules_from(read_manifest(path))


class Reader:
    """A file whose header has been checked: whatever it says is inside the file.

    `tensors` has (dtype, shape, first byte, last byte) of each by name.

    >>> file = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> save(file, {"scale": np.ones(3, np.float32)})
    >>> with Reader(file) as reader:
    ...     print(reader.raw("scale"))
    [1. 1. 1.]

    Args:
        file: its path.

    Raises:
        ValueError: A file that is not a whole safetensors file, when it is opened.
    """

    def __init__(self, file: str):
        self.file = file
        self.metadata: dict[str, str] = {}
        self.tensors: dict[str, tuple[np.dtype, tuple[int, ...], int, int]] = {}

    @classmethod
    def of(cls, file: str) -> Self:
        """Returns one that keeps no file open: it reads headers now, and tensors by `mapped`."""
        with cls(file) as reader:
            return reader

    def __enter__(self) -> Self:
        self._open = open(self.file, "rb")
        try:
            self._read_header()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *error) -> None:
        self._open.close()

    def _refuse(self, what: str) -> ValueError:
        return ValueError(f"{self.file} is not a whole safetensors file: {what}.")

    def _read_header(self) -> None:
        size = os.fstat(self._open.fileno()).st_size
        length = int.from_bytes(self._open.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER):
            raise self._refuse(f"a header of {length} bytes does not fit its {size}")
        try:
            header = json.loads(
                self._open.read(length).decode(), object_pairs_hook=no_duplicates
            )
        except (ValueError, RecursionError) as error:
            raise self._refuse(f"its header is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise self._refuse("its header is not an object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(
            isinstance(v, str) for v in metadata.values()
        ):
            raise self._refuse("its __metadata__ are not strings")
        self.metadata = metadata
        self._begin, data = 8 + length, size - 8 - length
        spans = sorted(self._check(name, record) for name, record in header.items())
        position = 0
        for begin, end, name in spans:
            if begin != position:
                raise self._refuse(f"tensor {name!r} begins at {begin}, not {position}")
            if end > data:
                raise self._refuse(
                    f"tensor {name!r} ends at byte {end} of data, and there are {data}"
                )
            position = end
        if position != data:
            raise self._refuse(f"{data - position} bytes belong to no tensor")

    def _check(self, name: str, record: Any) -> tuple[int, int, str]:
        if not isinstance(record, dict) or set(record) != {
            "dtype",
            "shape",
            "data_offsets",
        }:
            raise self._refuse(f"tensor {name!r} has no dtype, shape and data_offsets")
        is_size = lambda n: type(n) is int and 0 <= n < 2**63
        shape, offsets = record["shape"], record["data_offsets"]
        lists = isinstance(shape, list) and isinstance(offsets, list)
        if not lists or not all(map(is_size, (*shape, *offsets))) or len(offsets) != 2:
            raise self._refuse(f"tensor {name!r} has shape {shape} at {offsets}")
        if not isinstance(record["dtype"], str) or record["dtype"] not in DTYPES:
            raise self._refuse(
                f"tensor {name!r} has dtype {record['dtype']!r}; known are {', '.join(DTYPES)}"
            )
        dtype, (begin, end) = DTYPES[record["dtype"]], offsets
        if len(shape) > 32 or math.prod(shape) * dtype.itemsize != end - begin:
            raise self._refuse(
                f"tensor {name!r} of shape {shape} has {end - begin} bytes"
            )
        self.tensors[name] = dtype, tuple(shape), begin, end
        return begin, end, name

    def manifest(self) -> dict[str, Any]:
        try:
            text = self.metadata.get("midtread", "null")
            manifest = json.loads(text, object_pairs_hook=no_duplicates)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.file}: its manifest is damaged: {error}") from None
        manifest = m.check(self.file, manifest)
        listed = {m.full(n, p) for n, p, _ in m.records(manifest["entries"])}
        for name in sorted(listed ^ self.tensors.keys()):
            where = "file" if name in listed else "manifest"
            raise ValueError(
                f"{self.file}: tensor {name!r} is missing from the {where}."
            )
        if self.metadata.keys() != {"midtread"}:
            raise ValueError(
                f"{self.file}: its __metadata__ hold more than a manifest."
            )
        return manifest

    def bytes(self, name: str) -> bytes:
        _, _, begin, end = self.tensors[name]
        self._open.seek(self._begin + begin)
        return self._open.read(end - begin)

    def raw(self, name: str) -> np.ndarray:
        dtype, shape, *_ = self.tensors[name]
        return np.frombuffer(self.bytes(name), dtype).reshape(shape)

    def mapped(self, name: str) -> np.ndarray:
        """Returns a tensor whose bytes stay in the file until they are used."""
        dtype, shape, begin, end = self.tensors[name]
        if begin == end:  # nothing cannot be mapped
            return np.zeros(shape, dtype)
        where = self._begin + begin
        return np.asarray(np.memmap(self.file, dtype, "r", where, shape))

    def entry(self, name: str, entry: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the arrays of an entry, each with the sum it was written with."""
        arrays = {}
        for part, record in entry["parts"].items():
            full = m.full(name, part)
            dtype, shape, *_ = self.tensors[full]
            if (_NAMES[dtype], list(shape)) != _stored_as(record):
                raise ValueError(
                    f"{self.file}: tensor {full!r} is stored as {_NAMES[dtype]}{list(shape)}, "
                    f"but its manifest says {_stored_as(record)}."
                )
            data = self.bytes(full)
            if m.digest(data) != record["sha256"]:
                raise ValueError(
                    f"{self.file}: the bytes of tensor {full!r} do not have the sum they were "
                    "written with: the file is damaged, or tensors were exchanged."
                )
            arrays[part] = _decode(data, record, entry.get("qtype"), part)
        return arrays


def _decode(data: bytes, record: Mapping, qtype: str | None, part: str) -> np.ndarray:
    shape = tuple(record["shape"])
    if record["bits"] >= 8:
        return np.frombuffer(data, np.dtype(record["dtype"])).reshape(shape)
    fmt = _format_of(record, qtype, part)
    return packing.unpack(np.frombuffer(data, np.uint8), fmt, shape)


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a dict of the keys and values of an object in JSON, for `object_pairs_hook`.

    >>> json.loads('{"a": 1}', object_pairs_hook=no_duplicates)
    {'a': 1}

    Args:
        pairs: keys and values.

    Returns:
        The dict.

    Raises:
        ValueError: A key that appears twice.
    """
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError("a key appears twice")
    return unique
