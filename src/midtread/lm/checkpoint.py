"""Checkpoint: what a run keeps, so that a killed one goes on as if nothing had happened.

    <run>/checkpoints/<step>/params    the weights, as a tree named like the model
                            /rest      the optimizer, histories, statistics
                            /meta      where the data stood, checksums, seconds so far

Orbax writes them, in the background, and gives a folder its name only once it is complete:
what a kill leaves behind is not taken for a checkpoint. Every array has a checksum, made on
the device it is on. When a run goes on, a checkpoint with one that does not match, or does
not read, is put aside and said so, and the one before it is used; whoever reads weights
alone refuses it.
"""

import contextlib
import dataclasses
import gc
import io
import json
import logging
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
from flax import nnx

from midtread.interop.huggingface import as_floats
from midtread.lm import huggingface
from midtread.lm import model as models
from midtread.lm.config import Config, Model, keys, section
from midtread.lm.step import State
from midtread.lm.tokenizer import Tokenizer
from midtread.lm.usage import UsageError, first_line, require


def params_of(learned: nnx.State) -> dict[str, Any]:
    """Returns the weights alone, as nested dicts."""
    return nnx.to_pure_dict(nnx.filter_state(learned, nnx.Param))


def _rest(state: State) -> dict[str, Any]:
    """Returns everything but the weights, by names that do not depend on the model."""
    others = {
        "step": state.step,
        "learned": _others(state.learned),
        "kept": jax.tree.leaves(state.kept),
        "masks": state.masks,
        "optimizer": jax.tree.leaves(state.optimizer),
    }
    flat, _ = jax.tree_util.tree_flatten_with_path(others)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in flat
    }


def _others(learned: nnx.State) -> list[jax.Array]:
    return jax.tree.leaves(nnx.filter_state(learned, nnx.Not(nnx.Param)))


def checksum(x: jax.Array) -> jax.Array:
    """Returns a number that changes if an element does: the sum of its bits, each word
    times an odd number that depends on its position."""
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    if x.dtype in (jnp.int4, jnp.uint4):  # the moments of optimizer_states=int4
        x = x.astype(jnp.int8)
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    words = jax.lax.bitcast_convert_type(x, bits).reshape(-1).astype(jnp.uint32)
    places = 2 * jax.lax.iota(jnp.uint32, words.size) + 1
    return jnp.sum(words * places, dtype=jnp.uint32)


@jax.jit
def _checksums(tree: Any) -> Any:
    return jax.tree.map(checksum, tree)


def sums(tree: Any) -> dict[str, int]:
    """Returns the checksum of every array of `tree` by its path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(_checksums(tree))
    return {jax.tree_util.keystr(path): int(x) for path, x in flat}


def check_sums(name: str, tree: Any, wanted: dict[str, int]) -> None:
    wrong = [k for k, v in sums(tree).items() if wanted.get(k) != v]
    if wrong:
        raise ValueError(f"{name}{wrong[0]} does not match its checksum")


def without_noise(restore: Callable[[], Any]) -> Any:
    """Calls `restore`, and turns any error into a ValueError with its first line. Where a
    file does not read, orbax's threads and coroutines would print pages besides the
    error."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            return restore()
        except Exception as error:  # noqa: BLE001  whatever a library raises
            reason = first_line(error).split(" See full")[0][:200].rstrip(".")
        gc.collect()  # abandoned coroutines print a complaint when they are freed
        time.sleep(0.2)  # and so do threads, a moment later
    raise ValueError(reason)


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, folder: pathlib.Path, config: Config, say=print):
        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.ERROR)
        self.folder, self.say, self.ocp = folder.resolve(), say, ocp
        self.options = ocp.CheckpointManagerOptions(
            max_to_keep=config.max_num_checkpoints_to_keep,
            enable_async_checkpointing=config.async_checkpointing,
            create=True,
        )
        self.manager = self._open()

    def _open(self) -> Any:
        names = ("params", "rest", "meta")
        return self.ocp.CheckpointManager(
            self.folder, options=self.options, item_names=names
        )

    def save(self, state: State, meta: dict[str, Any]) -> None:
        args = self.ocp.args
        params, rest = params_of(state.learned), _rest(state)
        meta = {**meta, "checksums": {"params": sums(params), "rest": sums(rest)}}
        self.manager.save(
            int(state.step),
            args=args.Composite(
                params=args.StandardSave(params),
                rest=args.StandardSave(rest),
                meta=args.JsonSave(meta),
            ),
        )

    def restore(self, state: State) -> tuple[State, dict[str, Any]] | None:
        """Returns the newest checkpoint that is whole, in the shapes of `state`, or None if
        there is none."""
        for step in sorted(self.manager.all_steps(), reverse=True):
            try:
                return self._restore(state, step)
            except Exception as error:  # noqa: BLE001  whatever a damaged file makes a library raise
                self._set_aside(step, error)
        return None

    def _restore(self, state: State, step: int) -> tuple[State, dict[str, Any]]:
        args = self.ocp.args
        params, rest = params_of(state.learned), _rest(state)
        shapes = lambda tree: jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
        )
        wanted = args.Composite(
            params=args.StandardRestore(shapes(params)),
            rest=args.StandardRestore(shapes(rest)),
            meta=args.JsonRestore(),
        )
        got = without_noise(lambda: self.manager.restore(step, args=wanted))
        for item in ("params", "rest"):
            check_sums(item, got[item], got.meta["checksums"][item])
        return _put_back(state, got.params, got.rest), got.meta

    def _set_aside(self, step: int, error: Exception) -> None:
        """Renames a damaged checkpoint, so that it is not tried again, and says so."""
        self.manager.close()
        broken = self.folder / f"broken-{step}"
        shutil.rmtree(broken, ignore_errors=True)
        (self.folder / str(step)).rename(broken)
        self.manager = self._open()
        self.say(
            f"checkpoint {step} is damaged ({first_line(error)[:200]}): put aside as {broken.name}, "
            "going back to the one before"
        )

    def latest(self) -> int | None:
        return self.manager.latest_step()

    def close(self) -> None:
        self.manager.wait_until_finished()
        self.manager.close()


def _put_back(state: State, params: dict, rest: dict[str, Any]) -> State:
    learned = jax.tree.map(lambda x: x, state.learned)
    weights, others = nnx.split_state(learned, nnx.Param, ...)
    nnx.replace_by_pure_dict(weights, params)
    group = lambda name, like: jax.tree.unflatten(
        jax.tree.structure(like),
        [rest[f"{name}.{i}"] for i in range(len(jax.tree.leaves(like)))],
    )
    others = group("learned", others)
    return State(
        rest["step"],
        nnx.merge_state(weights, others),
        group("kept", state.kept),
        group("optimizer", state.optimizer),
        {k: rest[f"masks.{k}"] for k in state.masks},
    )


# --- weights of another run -------------------------------------------------------------------


def locate(path: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the folder of the weights of a run or a checkpoint, and the config beside
    them."""
    root = pathlib.Path(path).resolve()
    if published := huggingface.folder_in(root):
        if published.is_file():
            return published, published
        is_run = published != root
        return published, root / ("config.yml" if is_run else "config.json")
    require(root.is_dir(), f"no such run or checkpoint: {path}.")
    if (root / "params").is_dir():  # one checkpoint of a run, or a quantized one
        return root / "params", _config_above(root, path)
    folder = root / "checkpoints" if (root / "checkpoints").is_dir() else root
    steps = sorted(
        (int(p.name) for p in folder.iterdir() if p.name.isdigit()), reverse=True
    )
    require(steps, f"{path} holds no checkpoint. {_what_is_one(root)}")
    return folder / str(steps[0]) / "params", _config_above(folder, path)


def _what_is_one(root: pathlib.Path) -> str:
    """Says what a checkpoint is, and names one that a folder has inside it."""
    inside = [p for p in sorted(root.iterdir()) if _is_model(p)]
    if inside:
        return f"Did you mean {inside[0]}?"
    return (
        "A run has a config.yml, a published model a config.json beside its .safetensors, "
        "or is a .gguf file."
    )


def _is_model(path: pathlib.Path) -> bool:
    is_run = path.is_dir() and (path / "config.yml").is_file()
    return is_run or huggingface.folder_in(path) is not None


def _config_above(folder: pathlib.Path, path: str) -> pathlib.Path:
    for above in (folder, *folder.parents[:2]):
        if (above / "config.yml").is_file():
            return above / "config.yml"
    raise UsageError(f"{path} has no config.yml beside its checkpoints.")


def config_of(path: str) -> Config:
    """Returns the config that a checkpoint was made with, or that a published model stands
    for."""
    from midtread.lm import settings

    weights, file = locate(path)
    if file.suffix != ".yml":
        return settings.validate(huggingface.keys_of(weights))
    return settings.load([str(file)])


def require_same_model(config: Config, path: str) -> None:
    """Refuses weights at `path` of a model that differs from the config's."""
    other = config_of(path)
    free = {"max_target_length", "remat_policy", "attention", "scan_unroll", "dtype", "weight_dtype",
            "load_balance_loss_weight", "mtp_loss_scaling_factor", "rope_scaling"}  # fmt: skip
    if huggingface.folder_in(path):
        # A published model's layers are stacked when they are read.
        free.add("scan_layers")
    for name in keys(Model):
        here, there = getattr(config, name), getattr(other, name)
        require(
            here == there or name in free,
            f"{path} is from another model: {name}={there} there, {name}={here} here.",
        )


def read_about(file: pathlib.Path) -> dict[str, Any]:
    """Returns what a run's JSON file says (data.json, a checkpoint's metadata), or {}
    without one."""
    try:
        return json.loads(file.read_text()) if file.is_file() else {}
    except ValueError:
        raise UsageError(f"{file} does not read as JSON: remove it.") from None


def require_same_tokenizer(path: str, codec: Tokenizer) -> None:
    """Refuses a tokenizer other than the one that the model was trained with."""
    file = locate(path)[1].parent / "data.json"
    about = read_about(file) or {"tokenizer": "none"}
    there = about.get("tokenizer_sha256", "")
    require(
        about["tokenizer"] == "none" or there == codec.digest,
        f"{path} was trained with another tokenizer ({about['tokenizer']}) than "
        f"{codec.name}: drop tokenizer_type and tokenizer_path.",
    )


def stored(path: str) -> nnx.State:
    """Returns the shapes and dtypes of the weights of a run, as they were written."""
    return nnx.state(models.abstract(section(config_of(path), Model)), nnx.Param)


def load_weights(path: str, like: nnx.State) -> nnx.State:
    """Reads the weights of a run or checkpoint, in the shapes, dtypes and shardings of
    `like`."""
    weights, others = nnx.split_state(like, nnx.Param, ...)
    if folder := huggingface.folder_in(path):
        return nnx.merge_state(_published(path, folder, weights), others)
    shape = lambda x, there: jax.ShapeDtypeStruct(
        x.shape, there.dtype, sharding=getattr(x, "sharding", None) or _here()
    )
    pure = nnx.to_pure_dict(weights)
    got = read(path, jax.tree.map(shape, pure, nnx.to_pure_dict(stored(path))))
    weights = jax.tree.map(lambda x: x, weights)
    cast = jax.tree.map(lambda x, want: x.astype(want.dtype), got, pure)
    nnx.replace_by_pure_dict(weights, cast)
    return nnx.merge_state(weights, others)


def _published(path: str, folder: pathlib.Path, weights: nnx.State) -> nnx.State:
    """Reads the weights of a Hugging Face folder, one array after the other."""
    published = huggingface.arrays(folder, _stacked_as(path, weights))
    weights = jax.tree.map(lambda x: x, weights)
    nnx.replace_by_pure_dict(weights, _placed(published, nnx.to_pure_dict(weights)))
    return weights


def _placed(published: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Returns arrays of a Hugging Face folder in the dtypes, and on the devices, of those
    wanted."""
    flat = flax.traverse_util.flatten_dict(wanted, sep="/")
    for name, like in flat.items():
        where = getattr(like, "sharding", None) or _here()
        flat[name] = jax.device_put(as_floats(published[name], like.dtype), where)
    return flax.traverse_util.unflatten_dict(flat, sep="/")


def _stacked_as(path: str, weights: nnx.State) -> Model:
    """Returns the model of a folder, its layers stacked or in a list as `weights` has
    them."""
    from midtread.lm import architectures

    m = section(config_of(path), Model)
    names = {"/".join(map(str, p)) for p, _ in nnx.to_flat_state(weights)}
    scanned = dataclasses.replace(m, scan_layers=True)
    is_scanned = names == set(architectures.shapes(scanned))
    return dataclasses.replace(m, scan_layers=is_scanned)


def read(path: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """Reads those weights of a run that `wanted` names, and compares each with its
    checksum."""
    import orbax.checkpoint as ocp

    if folder := huggingface.folder_in(path):
        published = huggingface.arrays(folder, section(config_of(path), Model))
        return _placed(published, wanted)
    logging.getLogger("absl").setLevel(logging.ERROR)
    folder, _ = locate(path)
    arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
    args = ocp.args.PyTreeRestore(wanted, restore_args=arguments, partial_restore=True)
    reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    meta = read_about(folder.parent / "meta" / "metadata")
    try:
        got = without_noise(lambda: reader.restore(folder, args))
        if meta:
            check_sums("", got, meta["checksums"]["params"])
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {folder}: {error}.") from None
    return got


def _here() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def nbytes(folder: pathlib.Path) -> int:
    """Returns the bytes of all files in a folder."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
