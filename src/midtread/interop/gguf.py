"""GGUF: llama.cpp's files, one file with the model, its tokenizer and what it is called.

    "GGUF", version, number of tensors, number of keys
    keys         name, kind, value: the architecture, its sizes, the tokenizer
    tensors      name, extents (the innermost first), kind of block, offset
    data         every tensor at a multiple of `general.alignment`

The file is mapped, never read as a whole: `GGUF(path)` reads the header, and every number
in it is checked before it is used; `file[name]` reads one tensor.

    file.metadata["general.architecture"]      'llama'
    file["blk.0.ffn_up.weight"]                QArray(int4 ...): codes stay codes
    file.floats("blk.0.ffn_up.weight")         float32, as llama.cpp dequantizes

`header` makes all of a file but the tensors, which gguf_export.py writes behind it.

Shapes are as in numpy, [rows, columns]; blocks lie along columns. Llama's query and key rows
lie in the order of llama.cpp's rotary embedding, which turns neighbours; `half_turned` puts
them in the order of everyone else's, which turns the two halves of a head.
"""

import math
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from midtread.interop import gguf_blocks
from midtread.numerics.qarray import QArray

MAGIC = b"GGUF"
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?",
            10: "<Q", 11: "<q", 12: "<d"}  # fmt: skip
_STRING, _ARRAY = 8, 9
# kinds of tensors that are arrays of numbers
PLAIN = {
    0: ("F32", np.float32), 1: ("F16", np.float16), 24: ("I8", np.int8), 25: ("I16", np.int16),
    26: ("I32", np.int32), 27: ("I64", np.int64), 28: ("F64", np.float64),
    30: ("BF16", ml_dtypes.bfloat16),
}  # fmt: skip
_BLOCKS = {block.number: block for block in gguf_blocks.ROWS}
# kinds that exist and are not read here, to be refused by their names
_OTHERS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip


class Tensor(NamedTuple):
    """Where a tensor lies: the name of its kind, shape as in numpy, its bytes."""

    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


class GGUF(Mapping[str, QArray | np.ndarray]):
    """A file, by names of tensors; only the tensor asked for is read.

    Args:
        path: of the file.

    Raises:
        ValueError: the file is damaged, or holds what is not read here.
    """

    def __init__(self, path: Any):
        self.path = os.fspath(path)
        size = os.path.getsize(self.path)
        if size < 24:
            raise ValueError(
                f"{self.path} is not a GGUF file: it has {size} bytes, and a header has 24."
            )
        self._map = np.memmap(self.path, np.uint8, "r")
        header = _Header(self.path, self._map)
        self.metadata: dict[str, Any] = header.metadata
        self.tensors: dict[str, Tensor] = header.tensors

    def __getitem__(self, name: str) -> QArray | np.ndarray:
        """Returns a tensor as it is stored: codes and scales, or an array of numbers."""
        tensor = self.tensors[name]
        if tensor.kind not in gguf_blocks.BLOCKS:
            return self._plain(tensor)
        block = gguf_blocks.BLOCKS[tensor.kind]
        return gguf_blocks.to_qarray(block, self._parts(tensor), tensor.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def floats(self, name: str) -> np.ndarray:
        """Returns a tensor in float32, dequantized with llama.cpp's own roundings."""
        tensor = self.tensors[name]
        if tensor.kind not in gguf_blocks.BLOCKS:
            return self._plain(tensor).astype(np.float32)
        return gguf_blocks.to_floats(self._parts(tensor)).reshape(tensor.shape)

    def _parts(self, tensor: Tensor) -> gguf_blocks.Parts:
        block = gguf_blocks.BLOCKS[tensor.kind]
        raw = self._map[tensor.begin : tensor.end].reshape(-1, block.nbytes)
        return block.read(np.asarray(raw))

    def _plain(self, tensor: Tensor) -> np.ndarray:
        dtype = next(d for name, d in PLAIN.values() if name == tensor.kind)
        raw = np.array(self._map[tensor.begin : tensor.end])
        return raw.view(dtype).reshape(tensor.shape)


class _Header:
    """Keys and tensors; every count is held against the bytes that are there."""

    def __init__(self, path: str, data: np.ndarray):
        self.path, self.data, self.at = path, data, 0
        self._read_first_lines()
        self.metadata: dict[str, Any] = {}
        for _ in range(self.num_keys):
            name = self._string("a key")
            if name in self.metadata:
                raise self._refuse(f"the key {name!r} appears twice")
            self.metadata[name] = self._value(self._number("<I"), name)
        parts = self.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise self._refuse(
                f"it is one of {parts} files. Join them with llama-gguf-split --merge"
            )
        self.tensors: dict[str, Tensor] = {}
        tensors = [self._tensor() for _ in range(self.num_tensors)]
        self._lay_out(tensors)

    def _refuse(self, what: str) -> ValueError:
        return ValueError(f"{self.path} cannot be read as GGUF: {what}.")

    def _read_first_lines(self) -> None:
        magic = bytes(self._take(4, "its first bytes"))
        if magic != MAGIC:
            raise self._refuse(f"it begins with {magic!r}, not {MAGIC!r}")
        version = self._number("<I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            is_big = swapped in (2, 3)
            raise self._refuse(
                "its bytes are in big-endian order"
                if is_big
                else f"it is of version {version}, and 2 and 3 are known"
            )
        self.num_tensors, self.num_keys = self._number("<Q"), self._number("<Q")
        # a key takes 13 bytes at least, and a tensor 24
        if self.num_keys * 13 + self.num_tensors * 24 > len(self.data):
            raise self._refuse(
                f"{self.num_keys} keys and {self.num_tensors} tensors do not fit its "
                f"{len(self.data)} bytes"
            )

    def _take(self, count: int, what: str) -> np.ndarray:
        if count > len(self.data) - self.at:
            raise self._refuse(f"{what} ends beyond the file")
        self.at += count
        return self.data[self.at - count : self.at]

    def _number(self, kind: str) -> Any:
        raw = self._take(struct.calcsize(kind), "a number of its header")
        return struct.unpack(kind, bytes(raw))[0]

    def _string(self, what: str) -> str:
        raw = bytes(self._take(self._number("<Q"), what))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._refuse(f"{what} is not text: {raw[:40]!r}") from None

    def _value(self, kind: int, name: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string(f"the value of {name!r}")
        if kind != _ARRAY or depth == 4:
            raise self._refuse(f"the key {name!r} has a value of unknown kind {kind}")
        inner, count = self._number("<I"), self._number("<Q")
        if inner in _SCALARS:
            each = struct.calcsize(_SCALARS[inner])
            raw = bytes(self._take(count * each, f"the list {name!r}"))
            return np.frombuffer(raw, np.dtype(_SCALARS[inner])).tolist()
        if count * 8 > len(self.data) - self.at:
            raise self._refuse(f"the list {name!r} of {count} ends beyond the file")
        return [self._value(inner, name, depth + 1) for _ in range(count)]

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int, int]:
        """Reads the name, kind, shape, offset and number of bytes of a tensor."""
        name = self._string("the name of a tensor")
        rank = self._number("<I")
        if rank > 8:
            raise self._refuse(f"tensor {name!r} has {rank} axes")
        shape = tuple(self._number("<Q") for _ in range(rank))[::-1]
        number, offset = self._number("<I"), self._number("<Q")
        if number in PLAIN:
            kind, dtype = PLAIN[number]
            return (
                name,
                kind,
                shape,
                offset,
                math.prod(shape) * np.dtype(dtype).itemsize,
            )
        if number not in _BLOCKS:
            kind = _OTHERS.get(number, f"number {number}")
            known = [*gguf_blocks.BLOCKS, *(n for n, _ in PLAIN.values())]
            raise self._refuse(
                f"tensor {name!r} is of kind {kind}; read are {', '.join(known)}. "
                "llama-quantize --allow-requantize makes one of those of it"
            )
        block = _BLOCKS[number]
        if not shape or shape[-1] % block.size:
            raise self._refuse(
                f"tensor {name!r} of shape {shape} is of kind {block.name}, whose rows are "
                f"multiples of {block.size}"
            )
        nbytes = math.prod(shape) // block.size * block.nbytes
        return name, block.name, shape, offset, nbytes

    def _lay_out(
        self, tensors: list[tuple[str, str, tuple[int, ...], int, int]]
    ) -> None:
        align = self.metadata.get("general.alignment", 32)
        if type(align) is not int or align <= 0 or align & (align - 1):
            raise self._refuse(f"general.alignment is {align!r}, not a power of two")
        start = -(-self.at // align) * align
        position = 0
        for name, kind, shape, offset, nbytes in sorted(tensors, key=lambda t: t[3]):
            if name in self.tensors:
                raise self._refuse(f"tensor {name!r} appears twice")
            if offset % align or offset < position:
                raise self._refuse(
                    f"tensor {name!r} begins at {offset}, inside another or not at a "
                    f"multiple of {align}"
                )
            begin, end = start + offset, start + offset + nbytes
            if end > len(self.data):
                raise self._refuse(
                    f"tensor {name!r} ends at byte {end}, and there are {len(self.data)}"
                )
            self.tensors[name] = Tensor(kind, shape, begin, end)
            position = offset + nbytes


# --- writing ---------------------------------------------------------------------------------

_ALIGN = 32
_NUMBERS = {name: number for number, (name, _) in PLAIN.items()}


def nbytes(kind: str, shape: tuple[int, ...]) -> int:
    """Returns the number of bytes of a tensor of some kind."""
    count = math.prod(shape)
    if kind in gguf_blocks.BLOCKS:
        block = gguf_blocks.BLOCKS[kind]
        return count // block.size * block.nbytes
    return count * np.dtype(PLAIN[_NUMBERS[kind]][1]).itemsize


def header(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> bytes:
    """Returns everything before the data.

    Args:
        metadata: numbers, text, and lists of either. A whole number becomes a u32, one in a
            list an i32, a float an f32: llama.cpp reads its keys so.
        tensors: kind and shape of each, in the order of the data.
    """
    out = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind, raw = _coded(value, key)
        out += [_text(key), struct.pack("<I", kind), raw]
    offset = 0
    for name, (kind, shape) in tensors.items():
        block = gguf_blocks.BLOCKS.get(kind)
        number = block.number if block else _NUMBERS[kind]
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        out += [_text(name), sizes, struct.pack("<IQ", number, offset)]
        offset += -(-nbytes(kind, shape) // _ALIGN) * _ALIGN
    joined = b"".join(out)
    return joined + bytes(-len(joined) % _ALIGN)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _coded(value: Any, key: str, inside: bool = False) -> tuple[int, bytes]:
    """Returns the number of a value's kind, and its bytes."""
    if isinstance(value, str):
        return _STRING, _text(value)
    if isinstance(value, list | tuple) and value and not inside:
        kinds, raws = zip(*(_coded(item, key, inside=True) for item in value))
        if len(set(kinds)) == 1:
            first = struct.pack("<IQ", kinds[0], len(value))
            return _ARRAY, first + b"".join(raws)
    for kind, number in ((bool, 7), (int, 5 if inside else 4), (float, 6)):
        if isinstance(value, kind):
            try:
                return number, struct.pack(_SCALARS[number], value)
            except (struct.error, OverflowError):
                break
    raise ValueError(f"the key {key!r} cannot be written to GGUF: {value!r:.60}.")


def half_turned(x: Any, num_heads: int) -> Any:
    """Returns the rows of a query or key projection, from llama.cpp's order to that of
    rotary embeddings which turn the two halves of a head.

    llama.cpp turns neighbours, rows (2i, 2i + 1) of a head; others turn (i, i + h / 2). So
    in each head the even rows come first, then the odd ones.

    Args:
        x: an array or QArray [num_heads * h, columns] (or [num_heads * h], a bias).
        num_heads: query heads for a query, key heads for a key.

    >>> half_turned(np.arange(8), 2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return x[_turned_rows(x.shape[0], num_heads).ravel()]


def neighbours_turned(x: Any, num_heads: int) -> Any:
    """Returns what `half_turned` undoes.

    >>> neighbours_turned(half_turned(np.arange(8), 2), 2).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return x[np.argsort(_turned_rows(x.shape[0], num_heads).ravel())]


def _turned_rows(rows: int, num_heads: int) -> np.ndarray:
    if num_heads < 1 or rows % (2 * num_heads):
        raise ValueError(
            f"{rows} rows are not {num_heads} heads of an even number of rows each."
        )
    return np.arange(rows).reshape(num_heads, -1, 2).swapaxes(1, 2)
