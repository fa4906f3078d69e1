"""Mesh: where each array of a run lies when there is more than one device.

    mesh=data:2,fsdp:4            a name for each direction of a grid of devices

    data      the batch is cut; every device has all weights
    fsdp      the batch is cut, and so are weights, gradients and the optimizer
    tensor    heads, inner widths and the vocabulary are cut
    expert    the batch is cut, and so are the routed experts

Every weight names its axes (`lm/model.py`), and LOGICAL says which mesh axis cuts which;
one that a mesh axis does not divide is refused before anything is built. What belongs to
an array lies as it does: moments of the optimizer, masks of pruned weights, static ranges
and a QArray's codes and scales, along the axes where they have more than one. Vectors and
amax histories (one number per tensor and step) are whole everywhere.

XLA's partitioner does the rest, so the mathematics is that of one device: ranges are taken
over whole arrays, no token is dropped on its way to an expert, and numbers differ by the
order of sums alone. Two things can be written by hand instead, in shard_map: weights that
travel as codes (`lm/gather.py`) and tokens that travel to experts (`lm/ring.py`).
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from midtread.lm import quantization, ranges
from midtread.lm.config import Config, Model, section
from midtread.lm.usage import require
from midtread.numerics import calibration
from midtread.numerics.formats import as_format
from midtread.numerics.spec import Spec
from midtread.providers.qt import QtProvider

AXES = ("data", "fsdp", "tensor", "expert")
BATCH = ("data", "fsdp", "expert")  # rows of a batch are spread over these
LOGICAL = {
    "embed": "fsdp",
    "q_lora": "fsdp",
    "kv_lora": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "experts": "expert",
    "layers": None,
}


# --- sizes: what the config says, on any machine ----------------------------------------------


def sizes(text: str, devices: int | None = None) -> dict[str, int]:
    """Parses `data:2,fsdp:-1` to {axis: devices}; -1 takes what is left of `devices`."""
    counts = dict.fromkeys(AXES, 1)
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, number = part.partition(":")
        require(
            name in AXES,
            f"mesh={text}: no axis is called {name!r}. There are: {', '.join(AXES)}.",
        )
        is_number = number.removeprefix("-").isdigit() and (
            int(number) > 0 or number == "-1"
        )
        require(is_number, f"mesh={text}: {part} should be {name}:<devices>, or -1.")
        counts[name] = int(number)
    rest = [name for name, n in counts.items() if n == -1]
    require(len(rest) <= 1, f"mesh={text}: only one axis can be -1, the rest.")
    if rest:
        known = math.prod(n for n in counts.values() if n > 0)
        devices = devices or 0
        require(devices, f"mesh={text}: write a number for {rest[0]} here, not -1.")
        require(
            devices % known == 0,
            f"mesh={text}: {known} does not divide the {devices} devices there are.",
        )
        counts[rest[0]] = devices // known
    return counts


def spec(on: Mapping[str, int], names: Sequence | None, shape: Sequence[int]) -> P:
    """Returns how an array with these logical axes is cut. Vectors and axes of extent 1 (of
    a scale) are whole, and a mesh axis cuts an array only once."""
    if names is None or len(names) != len(shape):
        return P()
    if sum(name not in (None, "layers") for name in names) < 2 and len(
        [n for n in names if n != "layers"]
    ) < 2:  # fmt: skip
        return P()
    free, cuts = dict(on), []
    for name, extent in zip(names, shape):
        axis = LOGICAL.get(name) if name else None
        cut = free.get(axis, 1) if axis else 1
        fits = cut > 1 and extent % cut == 0
        cuts.append(axis if fits else None)
        # An axis of extent 1 uses its mesh axis up, as in the array that it scales.
        if axis and (fits or extent == 1):
            free.pop(axis, None)
    return P(*cuts)


def shard_size(on: Mapping[str, int], cut: P, shape: Sequence[int]) -> int:
    """Returns the number of elements of an array on one device."""
    ways = math.prod(on[axis] for part in cut for axis in _as_tuple(part))
    return math.prod(shape) // ways


def _as_tuple(part: Any) -> tuple[str, ...]:
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def names_of(tree: Any) -> list[tuple | None]:
    """Returns the logical axes of every array in `tree`, in the order of its leaves."""
    names_of_arrays: list[tuple | None] = []
    is_variable = lambda x: isinstance(x, nnx.Variable)
    for leaf in jax.tree.leaves(tree, is_leaf=is_variable):
        if not is_variable(leaf):
            names_of_arrays.append(None)
            continue
        names = leaf.get_metadata().get("out_sharding")
        names_of_arrays += [tuple(names) if names else None] * len(
            jax.tree.leaves(leaf)
        )
    return names_of_arrays


# --- layout: a mesh of devices ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layout:
    """A grid of devices, and how arrays are spread over it."""

    mesh: Mesh
    codes: Spec | None = None  # format of weights that travel as codes (lm/gather.py)
    wide: tuple[str, ...] = ()  # modules whose weights do not travel as codes
    dtype: str = "bfloat16"  # that weights are multiplied in
    split: int = 1  # number of parts of a batch (lm/split.py)
    dispatch: str = "xla"  # how tokens get to experts (lm/ring.py)
    whole_scales: bool = False  # every device has all scales, one per channel

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh.shape)

    def sharding(self, names: Sequence | None, shape: Sequence[int]) -> NamedSharding:
        return NamedSharding(self.mesh, spec(self.sizes, names, shape))

    def rows(self, ndim: int) -> NamedSharding:
        """Returns the sharding of an array whose first axis is the batch."""
        return NamedSharding(self.mesh, P(BATCH, *[None] * (ndim - 1)))

    def shardings(self, tree: Any, names: Sequence | None = None) -> Any:
        """Returns the sharding of every array of `tree`, by the axes that its variables
        name, or by `names` for all leaves."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        shardings = []
        for axes, (path, x) in zip(names or names_of(tree), leaves, strict=True):
            if self.whole_scales and _is_scale(path) and _is_rank_one(axes, x.shape):
                axes = None
            shardings.append(self.sharding(axes, x.shape))
        return jax.tree.unflatten(structure, shardings)

    def place(self, tree: Any, names: Sequence | None = None) -> Any:
        """Puts `tree` on its devices; every process has the same values."""
        return jax.tree.map(_put, tree, self.shardings(tree, names))

    def place_batch(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Puts a batch on the devices, its rows spread over them."""
        ways = math.prod(self.sizes[a] for a in BATCH)
        # The last rows of a small held-out split may not divide: every device has all.
        whole = NamedSharding(self.mesh, P())
        fits = lambda x: self.rows(x.ndim) if len(x) % ways == 0 else whole
        return {k: _put(x, fits(x)) for k, x in batch.items()}

    def keep(self, tree: Any, names: Sequence | None = None) -> Any:
        """Constrains `tree`, inside jit, to its shardings."""
        constrain = jax.lax.with_sharding_constraint
        return jax.tree.map(constrain, tree, self.shardings(tree, names))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Makes this the current layout of what is traced meanwhile."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


def _is_scale(path: tuple) -> bool:
    words = [str(getattr(k, "key", getattr(k, "name", ""))) for k in path]
    return "scale" in words


def _is_rank_one(names: Sequence | None, shape: Sequence[int]) -> bool:
    """Returns whether a scale varies along at most one axis besides the layers."""
    own = [n for name, n in zip(names or (), shape) if name != "layers"]
    return sum(n > 1 for n in own) <= 1


_current: contextvars.ContextVar[Layout | None] = contextvars.ContextVar(
    "layout", default=None
)


def current() -> Layout | None:
    """Returns the layout that is in use, or None."""
    return _current.get()


def using(layout: Layout | None) -> contextlib.AbstractContextManager:
    """Returns a context in which `layout`, if any, is the current one."""
    return layout.in_use() if layout else contextlib.nullcontext()


def keep_rows(x: jax.Array) -> jax.Array:
    """Spreads the batch of x [B, ...] over the devices of the current layout, if any."""
    layout = current()
    if layout is None:
        return x
    return jax.lax.with_sharding_constraint(x, layout.rows(x.ndim))


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _put(jax.random.key_data(x), NamedSharding(sharding.mesh, P()))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array) and x.sharding == sharding:
        return x
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.jit(lambda a: a, out_shardings=sharding)(x)
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    values = np.asarray(x)  # every process has all values, and keeps its part
    return jax.make_array_from_callback(values.shape, sharding, lambda at: values[at])


# --- from a config ----------------------------------------------------------------------------


def layout_of(config: Config) -> Layout | None:
    """Returns the devices of a run, or None for one device."""
    count = jax.device_count()
    check_recipe(config)
    if not config.mesh:
        require(
            jax.process_count() == 1,
            f"{jax.process_count()} processes need a mesh: write mesh=data:{count}, or "
            "fsdp, tensor, expert.",
        )
        if config.batch_split_factor == 1:
            return None
        count = 1
    on = _all_of(config, count)
    check(config, on)
    return plan(config, _grid(on))


def serving_layout(config: Config) -> Layout | None:
    """Returns the devices that weights are served from, or None for one device."""
    require(
        config.mesh or not config.replicate_quant_scale,
        "replicate_quant_scale=true is about the devices of a mesh: write mesh=fsdp:-1, "
        "say, or drop it.",
    )
    if not config.mesh:
        return None
    require(
        jax.process_count() == 1,
        f"mesh={config.mesh} with {jax.process_count()} processes: checkpoints are served "
        "by one.",
    )
    on = _all_of(config, jax.device_count())
    check_model(config, on)
    return Layout(_grid(on), whole_scales=config.replicate_quant_scale)


def _all_of(config: Config, count: int) -> dict[str, int]:
    """Parses the mesh, refusing one that does not use all `count` devices."""
    on = sizes(config.mesh, count)
    asked = math.prod(on.values())
    require(
        asked == count,
        f"mesh={config.mesh} is for {asked} devices, and there are {count}: write "
        "mesh=<axis>:-1 for all of them.",
    )
    return on


def _grid(on: Mapping[str, int]) -> Mesh:
    count = math.prod(on.values())
    devices = np.asarray(jax.devices()[:count]).reshape([on[a] for a in AXES])
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def plan(config: Config, grid: Mesh) -> Layout:
    """Returns the layout of a run: which weights travel as codes, and how batches are
    cut."""
    codes = None
    if config.fp8_weight_gather:
        method = _weight_method(config)
        codes = Spec(as_format("float8_e4m3fn"), calibration=method)
    quantized = {
        "gate": config.quantize_router_proj,
        "mtp_block": config.quantize_mtp,
    }
    wide = tuple(name for name, is_coded in quantized.items() if not is_coded)
    split, dispatch = config.batch_split_factor, config.expert_dispatch
    return Layout(grid, codes, wide, config.dtype, split, dispatch)


def _weight_method(config: Config) -> str:
    own = config.weight_quantization_calibration_method
    return own or config.quantization_calibration_method or "absmax"


def check_recipe(config: Config) -> None:
    """Refuses weights that travel as codes, tokens sent by hand, or a batch in parts, where
    the quantization does not allow it."""
    what = f"quantization={config.quantization or repr('')}"
    if config.fp8_weight_gather:
        require(
            config.quantization == "fp8_full",
            f"fp8_weight_gather=true with {what}: weights travel as codes of e4m3, which "
            "quantization=fp8_full alone multiplies by.",
        )
        if config.static == "calibrated":
            ranges.find(config)
        else:
            require(
                calibration.parse(_weight_method(config)).method == "fixed",
                "fp8_weight_gather=true needs weight_quantization_calibration_method="
                f"fixed,-a,a or static=calibrated: a range found in the data "
                f"({_weight_method(config)}) is not known before the weights are together.",
            )
        require(
            sizes(config.mesh, jax.device_count())["fsdp"] > 1,
            f"fp8_weight_gather=true with mesh={config.mesh or repr('')}: only an fsdp "
            "axis gathers weights. Write mesh=fsdp:-1, or drop it.",
        )
    if config.expert_dispatch != "xla":
        asked = f"expert_dispatch={config.expert_dispatch}"
        require(
            _keeps_nothing(config),
            f"{asked} with {what}: by hand each device has its own experts, which is for the "
            "values of Qwix's route that find ranges in the data, and for float. Write "
            "use_qwix_quantization=true, or expert_dispatch=xla.",
        )
        require(
            sizes(config.mesh, jax.device_count())["expert"] > 1,
            f"{asked} with mesh={config.mesh or repr('')}: tokens travel along an expert "
            "axis. Write mesh=expert:-1, or expert_dispatch=xla.",
        )
        require(
            config.static != "measure",
            f"{asked} with static=measure: by hand each device sees its own rows alone. "
            "Write expert_dispatch=xla to measure.",
        )
    if config.batch_split_factor > 1:
        require(
            config.quantization in ("", "fp8_full"),
            f"batch_split_factor={config.batch_split_factor} with {what}: the schedule is "
            "for quantization=fp8_full, or none.",
        )


def _keeps_nothing(config: Config) -> bool:
    """Returns whether a config is float, or quantized without state or noise that devices
    would have to share."""
    value = None if config.quant else quantization.value_of(config)
    if value is None:
        return not config.quant
    return value.route == "qwix" and value.provider is QtProvider


def check_model(config: Config, on: Mapping[str, int]) -> None:
    """Refuses a mesh that cuts weights where they cannot be cut."""
    m = section(config, Model)
    is_mla, sparse = m.attention_type == "mla", m.num_experts > 1
    tensor = {"num_query_heads": m.num_query_heads, "vocab_size": m.vocab_size}
    if not is_mla:
        tensor["num_kv_heads"] = m.num_kv_heads
    if not sparse or m.first_num_dense_layers:
        tensor["mlp_dim"] = m.mlp_dim
    fsdp = {"emb_dim": m.emb_dim}
    if is_mla:
        fsdp["kv_lora_rank"] = m.kv_lora_rank
        if m.q_lora_rank:
            fsdp["q_lora_rank"] = m.q_lora_rank
    if sparse:
        tensor["moe_mlp_dim"] = m.moe_mlp_dim
    cuts = {"tensor": tensor, "fsdp": fsdp, "expert": {"num_experts": m.num_experts}}
    for axis, extents in cuts.items():
        for name, extent in extents.items():
            require(
                extent % on[axis] == 0,
                f"mesh={config.mesh}: {axis}:{on[axis]} does not divide "
                f"{name}={extent}.",
            )
    _check_tiles(config, on)


def check(config: Config, on: Mapping[str, int]) -> None:
    """Refuses what `check_model` does, and a mesh that cuts batches where they cannot be
    cut."""
    check_model(config, on)
    rows = math.prod(on[a] for a in BATCH)
    parts = config.gradient_accumulation_steps
    require(
        config.batch_size % (rows * parts * config.batch_split_factor) == 0,
        f"mesh={config.mesh} spreads a batch over {rows} devices (data, fsdp, expert), in "
        f"gradient_accumulation_steps={parts} and batch_split_factor="
        f"{config.batch_split_factor} parts: they do not divide batch_size="
        f"{config.batch_size}.",
    )


def _check_tiles(config: Config, on: Mapping[str, int]) -> None:
    """Refuses a mesh that would cut through a tile, the elements that share a scale."""
    for number, rule in enumerate(config.quant):
        tile = rule.get("tile_size")
        if not isinstance(tile, int):
            continue
        for axis, name in (("fsdp", "emb_dim"), ("tensor", "mlp_dim")):
            part = getattr(config, name) // on[axis]
            require(
                part % tile == 0 or on[axis] == 1,
                f"mesh={config.mesh}: {axis}:{on[axis]} leaves {part} of {name}="
                f"{getattr(config, name)} to a device, which tile_size={tile} of quant "
                f"rule {number} does not divide.",
            )
