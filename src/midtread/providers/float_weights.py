"""Float weights: those that stay float though a rule is about them, and why.

PtqProvider notes here what it meets while a model runs for the first time, and says it in
one text afterwards:

    note(...)            a weight whose codes cannot follow what is done to it
    note_bridged(...)    a weight of a Linen module inside an NNX model
    note_computed(...)   operands that are functions of weights, or of nobody knows what
    note_met(...)        whether a rule for weights has met one
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from midtread.model import flaxlib
from midtread.model.boxes import WithAux
from midtread.model.moves import ancestors
from midtread.model.rules import QuantizationRule, recipe_of
from midtread.model.running import Call
from midtread.model.weights import computed_from, origin_is_hidden, params_near
from midtread.numerics.qarray import QArray


class FloatWeights:
    """What one provider has noted.

    Attributes:
        reasons: {path of a weight: what the operand does to it, "cuts the tiles of" say}
    """

    def __init__(self):
        self.reasons: dict[str, str] = {}
        self._bridged: set[str] = set()
        self._contained: set[str] = (
            set()
        )  # paths of weights in Python's dicts and lists
        # path -> (shape, number of shards) of operands whose origin is not known
        self._hidden: dict[str, set[tuple[tuple[int, ...], int]]] = {}
        # index of a weight rule that matched -> (it met a weight, a path where it matched)
        self._met: dict[int, tuple[bool, str]] = {}

    def note(self, owner: Any, name: str, why: str) -> None:
        self.reasons.setdefault(param_path(owner, name), why)

    def note_bridged(self, owner: Any, name: str) -> None:
        self._bridged.add(param_path(owner, name))

    def note_met(self, index: int, is_met: bool, module: Any) -> None:
        before, path = self._met.get(index, (False, flaxlib.path_of(module)))
        self._met[index] = before or is_met, path

    def note_computed(self, call: Call, module: Any, operands: list[jax.Array]) -> None:
        known = params_near(call, module)
        for x in operands:
            sources = computed_from(call, known, x)
            for array, owner, name in sources:
                if not _is_contained(owner, name):
                    self.note(owner, name, "is computed from")
                elif array.ndim > 1:
                    self._contained.add(param_path(owner, name))
            *_, (last, _) = ancestors(flaxlib.unbox(x))
            if not sources and origin_is_hidden(last, flaxlib.params_of(module)):
                shape = tuple(x.shape), _num_shards()
                path = flaxlib.path_of(module)
                self._hidden.setdefault(path, set()).add(shape)

    def text(self, model: Any, rules: Sequence[QuantizationRule]) -> str:
        """Says which weights of the model stay float, and what to do; '' if none does."""
        texts = []
        float_params = {
            "/".join(map(str, path)): tuple(param.shape)
            for path, param in flaxlib.all_params(model)
            if not isinstance(param, WithAux | QArray)
        }
        left = {name: shape for name, shape in float_params.items() if len(shape) > 1}
        computed = [
            name
            for name in self.reasons
            if name in float_params and name not in self._bridged
        ]
        # A vector is a weight where nothing else is: else it scales one, or centres it.
        if names := [name for name in computed if name in left] or computed:
            texts.append(
                f"weights that stay float: {', '.join(names)}. What is multiplied "
                f"{self.reasons[names[0]]} them: codes follow casts, reshapes, "
                "transposes, slices at whole tiles, indices, repeats and signs of one "
                "parameter, and nothing else"
            )
        if names := sorted(self._bridged):
            texts.append(
                f"weights that stay float: {', '.join(names)}. They are in a Linen module "
                "bridged to NNX, whose variables go back to Linen: quantize it as a Linen "
                "model (mt.quantize_variables), or write its layers in NNX"
            )
        if names := sorted(self._contained):
            texts.append(
                f"weights that stay float: {', '.join(names)}. They are in a dict, list or "
                "tuple of Python's, where no codes can take their place: hold them in an "
                "nnx.Dict or nnx.List"
            )
        for path, seen in self._hidden.items():
            names = [
                name
                for name, shape in left.items()
                if any(_is_shard(part, shape, shards) for part, shards in seen)
            ]
            if names:
                texts.append(
                    f"weights that stay float: {', '.join(names)}, or arrays of that shape. "
                    f"They reach a matmul in {path!r} as arguments of a jit, scan or shard_map, "
                    "where nobody knows whose they are: pass the module, or let the "
                    "function close over the parameter"
                )
        for index, (is_met, path) in self._met.items():
            rule = rules[index]
            is_idle = not is_met and recipe_of(rule, False, True).fwd.lhs is None
            if is_idle and left:
                texts.append(
                    f"rule {index}, module_path={rule.module_path!r}, quantized no weight: "
                    f"nothing that {path!r} multiplies by is a parameter. Float are "
                    f"{', '.join(left)}: match where one of them is multiplied as it is "
                    "stored, or drop the rule"
                )
        return ". ".join(texts)


def param_path(module: Any, name: str) -> str:
    """Returns the path of a parameter, 'encoder/kernel'."""
    return "/".join(filter(None, (flaxlib.path_of(module), name)))


def _is_contained(owner: Any, name: str) -> bool:
    """Whether a parameter is in a dict, list or tuple that an NNX module holds."""
    is_nnx = isinstance(owner, nnx.Module)
    return is_nnx and name in flaxlib.params_in_containers(owner)


def _num_shards() -> int:
    """Returns how many shards an array may be cut into here: 1 outside of shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in mesh.manual_axes)


def _is_shard(part: tuple[int, ...], shape: tuple[int, ...], shards: int) -> bool:
    """Whether an array of shape `part` can be a shard, of so many, of one of `shape`, or one
    matrix of a stack of that shape, which a scan takes one after the other."""
    if len(part) > 1 and part == shape[1:]:
        return True
    if len(part) != len(shape) or 0 in part:
        return False
    cut = [divmod(whole, one) for whole, one in zip(shape, part)]
    return not any(rest for _, rest in cut) and not shards % math.prod(
        n for n, _ in cut
    )
