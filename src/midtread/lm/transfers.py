"""Transfers: what a compiled step gathers of each weight, read from its HLO.

Under fsdp a weight is gathered before it is used: as codes of 8 bits (`lm/gather.py`), or by
XLA in the compute dtype, or not at all, where XLA multiplies the part that lies on a device
and adds up. Codes are gathered in a scope that has the weight's name; what XLA gathers has
the name of the op that wanted it, in a module, and the shape of a weight of that module.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from midtread.lm import memory
from midtread.lm import mesh as meshes
from midtread.lm.config import Config
from midtread.model.coverage import human, table
from midtread.model.prove import Collective, read


class Gathered(NamedTuple):
    """A weight that is cut along fsdp, and what arrived of it in a step."""

    weight: str
    shape: tuple[int, ...]  # of one layer, on a device once gathered
    # The dtypes that are sent; none if it is multiplied where it lies.
    sent: tuple[str, ...]
    times: int
    nbytes: int

    @property
    def is_coded(self) -> bool:
        return self.sent == ("u8",)


def weights(config: Config, on: Mapping[str, int], text: str) -> list[Gathered]:
    """Returns every weight that a mesh cuts along fsdp, in a step whose optimised HLO is
    `text`."""
    sent = [c for c in read(text).collectives if c.kind == "all-gather"]
    shapes = dict(_cut_along_fsdp(config, on))
    transfers_of: dict[str, list[Collective]] = {name: [] for name in shapes}
    for transfer in sent:
        name = _whose(transfer, shapes)
        if name is not None:
            transfers_of[name].append(transfer)
    return [
        Gathered(
            name,
            shapes[name],
            tuple(dict.fromkeys(c.dtype for c in transfers)),
            sum(c.times for c in transfers),
            sum(c.nbytes for c in transfers),
        )
        for name, transfers in transfers_of.items()
    ]


def _cut_along_fsdp(config: Config, on: Mapping[str, int]):
    """Yields the name of each weight, and the shape of one layer of it on a device once
    gathered."""
    for path, var in memory.weights_of(config):
        names, shape = var.get_metadata().get("out_sharding"), var.shape
        cut = meshes.spec(on, names, shape)
        if "fsdp" not in cut:
            continue
        here = [
            n if axis in (None, "fsdp") else n // on[axis]
            for n, axis in zip(shape, cut)
        ]
        yield "/".join(map(str, path)), tuple(here[names[0] == "layers" :])


def _whose(transfer: Collective, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Returns the weight that a transfer belongs to: it has the same size, though its shape
    may be transposed or folded, and shares most of its name with the transfer, at least its
    module."""
    size = math.prod(transfer.dims)
    parts = set(re.split(r"[/()]", transfer.name))
    met = lambda name: sum(part in parts for part in name.split("/"))
    alike = [
        name for name, shape in shapes.items()
        if math.prod(shape) == size and met(name) >= name.count("/")
    ]  # fmt: skip
    return max(alike, key=met, default=None)


def describe(gathered: list[Gathered]) -> str:
    """Returns a table with a line for each weight that travels in the compute dtype, and
    one for all codes together."""
    coded = [g for g in gathered if g.is_coded]
    rows = [["all-gathers of weights", "array", "sent as", "times", "bytes"]]
    if coded:
        rows.append([f"{len(coded)} quantized weights", "", "codes of 8 bits",
                     str(sum(g.times for g in coded)),
                     human(sum(g.nbytes for g in coded), "B")])  # fmt: skip
    for g in sorted((g for g in gathered if not g.is_coded), key=lambda g: -g.nbytes):
        array = f"[{','.join(map(str, g.shape))}]"
        sent = ", ".join(g.sent) or "not gathered"
        rows.append([g.weight, array, sent, str(g.times), human(g.nbytes, "B")])
    return table(rows, {3, 4})
