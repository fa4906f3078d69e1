"""Convert: a float checkpoint becomes a quantized one, and a quantized one a model.

`quantize` never holds the float model: it reads one parameter, quantizes it as the model
under `PtqProvider` says, and keeps the codes; so memory is that of the quantized model and
one float parameter (all layers of it, where layers are scanned). What is written has the
float weights no more:

    <folder>/config.yml    the model, and `quantization`, which says how to read the rest
            /params        codes and scales, every file with its digest (interop/orbax.py)
            /sizes.json    bytes of weights, before and after, and the float checkpoint
            /calibration.json   with an algorithm: what it did to every weight
            /data.json     what the float weights were trained on

`load` builds the same model from shapes and puts the arrays into it: what then runs is
what quantizing in memory would have given, bit for bit. A damaged file is refused. With a
mesh, every device reads its own part.
"""

import dataclasses
import json
import logging
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import flax
import jax
from flax import nnx

from midtread.interop import orbax as interop
from midtread.lm import checkpoint, codes, huggingface, quantization, room, settings
from midtread.lm import model as models
from midtread.lm.build import some_tokens
from midtread.lm.config import Config, Model, section
from midtread.lm.mesh import Layout, serving_layout
from midtread.lm.usage import UsageError, first_line, require
from midtread.model import flaxlib
from midtread.model.boxes import WithAux
from midtread.model.quantize import quantize_model
from midtread.providers.params import quantize_params
from midtread.report.quantized import write as write_calibration

FILE = "sizes.json"  # only a quantized checkpoint has this file


def is_quantized(path: str) -> bool:
    """Returns whether `path` is a quantized checkpoint."""
    return (pathlib.Path(path) / FILE).is_file()


def sizes_of(path: str) -> dict[str, Any]:
    """Returns what a quantized checkpoint notes of itself: bytes, and the float one.

    Raises:
        UsageError: the file is damaged.
    """
    file = pathlib.Path(path) / FILE
    try:
        sizes = json.loads(file.read_text())
        return {**sizes, "source": sizes["source"], "bytes": sizes["bytes"]}
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{file} is damaged: quantize the float run again.") from None


def abstract(config: Config) -> nnx.Module:
    """Returns the model to serve, with shapes in place of arrays: float weights, or codes
    and scales."""
    m, provider = section(config, Model), quantization.serving(config)
    if provider is None:
        return models.abstract(m)
    make = lambda: quantize_model(
        models.Transformer(m, nnx.Rngs(0)), provider, some_tokens(config), donate=True
    )
    return nnx.eval_shape(make)


def in_memory(config: Config, model: nnx.Module) -> nnx.Module:
    """Quantizes a float model to be served as the config says."""
    provider = quantization.serving(config)
    if provider is None:
        return model
    return quantize_model(model, provider, some_tokens(config), donate=True)


def require_room(config: Config, path: str) -> None:
    """Refuses to load a model that the device has no room for, and says what would fit. A
    float checkpoint is there in float before it is quantized."""
    if not config.check_memory or config.mesh:
        return
    needed = _bytes_to_load(config, path)
    if room.fits(needed):
        return
    helps = {}
    if not is_quantized(path):
        changes: dict[str, Any] = {"weight_dtype": "bfloat16"}
        helps["weight_dtype=bfloat16"] = _float_bytes(config, **changes)
        for value in ("int8w", "int4w"):
            served = dataclasses.replace(config, quantization=value, quant=())
            word = (
                f"`midtread quantize {path} quantization={value}`, and its checkpoint"
            )
            helps[word] = nbytes(nnx.state(abstract(served), nnx.Param))
    raise UsageError(room.no_weights(needed, helps))


def _bytes_to_load(config: Config, path: str) -> int:
    """Returns the bytes of weights that are there at once while a checkpoint is loaded."""
    if is_quantized(path):
        return sizes_of(path)["bytes"]
    published, needed = huggingface.folder_in(path), _float_bytes(config)
    if published is None:
        return needed
    is_file = published.is_file()
    on_disk = published.stat().st_size if is_file else checkpoint.nbytes(published)
    return min(needed, on_disk)  # codes, maybe: these take what the files do


def _float_bytes(config: Config, **changes: Any) -> int:
    m = dataclasses.replace(section(config, Model), **changes)
    return nbytes(nnx.state(models.abstract(m), nnx.Param))


def load(config: Config, path: str) -> nnx.Module:
    """Loads the model at `path`. A quantized checkpoint is taken as it is; a float one is
    quantized in memory if the config asks for it."""
    layout = serving_layout(config)
    if folder := huggingface.folder_in(path):
        published = huggingface.arrays(folder, section(config, Model))
        if codes.has_codes(published):
            return on_devices(layout, codes.load(config, published))
    if not is_quantized(path):
        model = on_devices(layout, models.abstract(section(config, Model)))
        state = nnx.state(model, nnx.Param)
        nnx.update(model, checkpoint.load_weights(path, state))
        return on_devices(layout, in_memory(config, model))
    try:
        params = pathlib.Path(path) / "params"
        target = _with_factors(abstract(config), interop.read_manifest(params))
        return interop.load(params, on_devices(layout, target))
    except ValueError as error:
        raise UsageError(first_line(error)) from None


def _with_factors(target: nnx.Module, manifest: Mapping[str, Any]) -> nnx.Module:
    """Returns the model to serve, with room for factors and rotations of inputs, and for
    zero points that are fractions (HQQ), where the checkpoint holds some: rules do not say
    which weights have them."""
    for path, module in nnx.iter_modules(target):
        for name, box in list(vars(module).items()):
            entry = manifest["entries"].get("/".join(map(str, (*path, name))), {})
            for part in ("zero_point", "pre_scale", "pre_rotation"):
                record = entry.get("parts", {}).get(part)
                if record is None or not isinstance(box, WithAux):
                    continue
                if part == "zero_point" and "float" not in record["dtype"]:
                    continue
                shape = jax.ShapeDtypeStruct(tuple(record["shape"]), record["dtype"])
                factors = flaxlib.like(box.array.scale, shape)
                box = box.replace(array=box.array.replace(**{part: factors}))
                setattr(module, name, box)
    return target


def on_devices(layout: Layout | None, model: nnx.Module) -> nnx.Module:
    """Puts the arrays of a model, or their shapes, where the layout has them."""
    if layout is None:
        return model

    def put(x: Any, where: jax.sharding.Sharding) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        return jax.device_put(x, where)

    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(put, state, layout.shardings(state)))


def destination(config: Config, source: str) -> pathlib.Path:
    """Returns the folder of the quantized checkpoint of `source`."""
    if config.save_quantized_params_path:
        return pathlib.Path(config.save_quantized_params_path)
    root = checkpoint.locate(source)[1].parent
    return root.parent / f"{root.name}-{config.quantization or 'quant'}"


def quantize(config: Config, source: str, say=print) -> pathlib.Path:
    """Writes the quantized checkpoint of `source` and returns its folder."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    folder = _check(config, source)
    published = huggingface.folder_in(source)
    if published and codes.has_codes(
        huggingface.arrays(published, section(config, Model))
    ):
        say(
            f"{source} is quantized already: what its codes stand for is rounded again, "
            "and loses twice. Take the float model where there is one."
        )
    # Solved weights are kept here, to go on from after a kill.
    solved = folder.with_name(f"{folder.name}.solved")
    if config.algorithm:
        model, sizes, report = _calibrated(config, source, solved, say)
    else:
        (model, sizes), report = _from_floats(config, source), None
    partial = folder.with_name(f"{folder.name}.partial")  # renamed once it is whole
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}.") from None
    settings.save(config, partial / "config.yml")
    about = checkpoint.locate(source)[1].parent / "data.json"
    if about.is_file():
        shutil.copy(about, partial / about.name)
    interop.save(partial / "params", model)
    sizes["bytes_on_disk"] = checkpoint.nbytes(partial / "params")
    (partial / FILE).write_text(json.dumps(sizes, indent=1))
    if report is not None:
        (partial / "calibration.txt").write_text(f"{report}\n")
        write_calibration(partial, report)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    shutil.rmtree(solved, ignore_errors=True)
    say(
        f"{folder}: {sizes['bytes']:,} bytes of weights instead of "
        f"{sizes['float_bytes']:,} ({sizes['bytes_on_disk']:,} on disk)"
    )
    return folder


def _check(config: Config, source: str) -> pathlib.Path:
    """Returns the folder to write to, after refusing what cannot be done."""
    require(
        not is_quantized(source), f"{source} is quantized already: give the float one."
    )
    require(
        quantization.serving(config),
        "quantize needs quantization: int8w, int4w, int8, fp8 ... or quant.",
    )
    require(
        not config.mesh,
        f"mesh={config.mesh}: quantize works on one device, one parameter at a time. Drop "
        "it; generate and eval take it.",
    )
    folder = destination(config, source)
    require(
        not (folder.exists() and config.overwrite) or is_quantized(str(folder)),
        f"{folder} is no quantized checkpoint, so overwrite=true does not replace it: "
        "choose another save_quantized_params_path.",
    )
    require(
        not folder.exists() or config.overwrite,
        f"{folder} is there already: choose another save_quantized_params_path, or write "
        "overwrite=true, which replaces a quantized checkpoint.",
    )
    return folder


def _from_floats(config: Config, source: str) -> tuple[nnx.Module, dict[str, Any]]:
    """Quantizes one parameter at a time; returns the model to serve and its bytes."""
    served = abstract(config)
    floats = nnx.state(models.abstract(section(config, Model)), nnx.Param)
    flat = lambda state: flax.traverse_util.flatten_dict(nnx.to_pure_dict(state))
    stored, quantized, before = flat(checkpoint.stored(source)), {}, 0
    for path, shape in flat(floats).items():
        param = read_one(source, path, stored[path]).astype(shape.dtype)
        before += param.nbytes
        one = flax.traverse_util.unflatten_dict({path: param})
        quantized |= flax.traverse_util.flatten_dict(quantize_params(one, served))
        del param, one
    graph, params, rest = nnx.split(served, nnx.Param, ...)
    nnx.replace_by_pure_dict(params, flax.traverse_util.unflatten_dict(quantized))
    sizes = {"source": source, "float_bytes": before, "bytes": nbytes(quantized)}
    return nnx.merge(graph, params, rest), sizes


def _calibrated(config: Config, source: str, folder: pathlib.Path, say):
    """Solves for the codes from data; returns the model to serve, its bytes and a report of
    what that was worth."""
    from midtread.lm.calibrate import calibrated

    floats = models.abstract(section(config, Model))
    state = nnx.state(floats, nnx.Param)
    nnx.update(floats, checkpoint.load_weights(source, state))
    before = sum(x.nbytes for x in jax.tree.leaves(nnx.state(floats, nnx.Param)))
    model, report = calibrated(config, floats, folder, say)
    after = nbytes(jax.tree.leaves(nnx.state(model, nnx.Param)))
    sizes = {"source": source, "float_bytes": before, "bytes": after}
    return model, sizes, report


def read_one(source: str, path: tuple, shape: Any) -> jax.Array:
    """Reads one parameter of a checkpoint."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=here)
    got = checkpoint.read(source, flax.traverse_util.unflatten_dict({path: target}))
    return flax.traverse_util.flatten_dict(got)[path]


def nbytes(tree: Any) -> int:
    """Returns the bytes of all arrays at the bits of their dtypes: two int4 take one
    byte."""
    from midtread.numerics.formats import dtype_bits

    return sum(-(-x.size * dtype_bits(x.dtype) // 8) for x in jax.tree.leaves(tree))
