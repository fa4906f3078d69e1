"""Orbax: quantized trees in a directory, sharded, written and read by many hosts.

    <path>/arrays/<name>/...     one folder of chunks per array, orbax's own layout
    <path>/midtread.json         the manifest, written last

Orbax stores arrays, not what they are codes of, and refuses some dtypes (uint4, uint2,
float8_e4m3); those go in as uint8, element by element, so that a sharded array stays
sharded. The manifest (interop/manifest.py) holds the rest, and a SHA-256 of every file:
`load` looks at all of them before orbax looks at any.

Arrays come back on the devices of the target's shardings. Needs `orbax-checkpoint`.
"""

import concurrent.futures
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from midtread.interop import manifest as m
from midtread.interop import trees
from midtread.interop.safetensors import no_duplicates, replacing

_FILE, _ARRAYS = "midtread.json", "arrays"
# dtypes that orbax refuses -> (to store, to load)
_AS_BYTES = {
    "uint2": (lambda x: x.astype(jnp.uint8), lambda x: x.astype(jnp.uint2)),
    "uint4": (lambda x: x.astype(jnp.uint8), lambda x: x.astype(jnp.uint4)),
    "float8_e4m3": (
        lambda x: jax.lax.bitcast_convert_type(x, jnp.uint8),
        lambda x: jax.lax.bitcast_convert_type(x, jnp.float8_e4m3),
    ),
}


def _orbax():
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            "midtread.interop.orbax needs orbax: "
            "run `pip install '.[orbax]'` in Midtread's folder."
        ) from error
    return ocp


def save(path: Any, tree: Any, *, rules: Any = None) -> None:
    """Writes a tree of arrays and QArrays to a new directory; every process calls it.

    >>> import os, tempfile
    >>> folder = os.path.join(tempfile.mkdtemp(), "checkpoint")
    >>> save(folder, {"scale": jnp.ones(3)})
    >>> load(folder)["scale"].tolist()
    [1.0, 1.0, 1.0]

    Args:
        path: the directory, which must not be there.
        tree: Linen variables, an NNX model, any pytree.
        rules: the rules, or the provider, that quantized it; `read_rules` gives them back.

    Raises:
        ValueError: A directory that is there, two arrays of one name, or a leaf that is no
            array.
        TypeError: A tree that holds no arrays, such as a Linen module or an nnx.State.
    """
    folder = pathlib.Path(path).absolute()
    if folder.exists():
        raise ValueError(
            f"{folder} exists already: a checkpoint needs a new directory."
        )
    entries = trees.open_tree(tree).entries
    rules = getattr(rules, "_rules", rules) or ()
    described = {k: m.describe(k, v, rules) for k, v in entries.items()}
    listed = m.rules_json(rules)
    arrays = {}
    for name, part, record in m.records(described):
        array = jnp.asarray(trees.parts(entries[name])[part])
        store, _ = _AS_BYTES.get(record["dtype"], (None, None))
        key = _key(name, part)
        if key in arrays:
            raise ValueError(
                f"two tensors would be stored as {key!r}: rename {name!r}."
            )
        arrays[key] = array if store is None else store(array)
    ocp = _orbax()
    with ocp.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(folder / _ARRAYS, arrays)
    if jax.process_index() == 0:
        _write_manifest(folder, described, listed)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(f"midtread: {folder} is complete")


def _key(name: str, part: str) -> str:
    return m.full(name, part).replace("/", ".")


def _write_manifest(folder: pathlib.Path, described: dict, rules: list) -> None:
    sums = _sums(folder / _ARRAYS, _files(folder / _ARRAYS))
    for name, part, record in m.records(described):
        own = f"{_key(name, part)}/"
        mine = {k: v for k, v in sums.items() if k.startswith(own)}
        record["files"] = mine
        sums = {k: v for k, v in sums.items() if k not in mine}
    sealed = m.seal(described, rules, files=sums)
    with replacing(str(folder / _FILE)) as file:
        file.write(m.canonical(sealed).encode())


def _files(folder: pathlib.Path) -> list[str]:
    return sorted(
        p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()
    )


def _sums(folder: pathlib.Path, names: list[str]) -> dict[str, str]:
    def sum_of(name):
        with open(folder / name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(sum_of, names)))


# --- reading ----------------------------------------------------------------------------------


def load(path: Any, target: Any = None) -> Any:
    """Reads what `save` wrote, after checking every file of it.

    Without a target: nested dicts with QArrays (and WithAux boxes) in them, on one device.

    >>> import os, tempfile
    >>> folder = os.path.join(tempfile.mkdtemp(), "checkpoint")
    >>> save(folder, {"scale": jnp.ones(3)})
    >>> load(folder, {"scale": jax.ShapeDtypeStruct((3,), jnp.float32)})["scale"].shape
    (3,)

    Args:
        path: the directory.
        target: a tree like the one saved, or its shapes, with the shardings wanted.

    Returns:
        The tree: nested dicts, or one like the target.

    Raises:
        ValueError: A directory that is damaged, that `save` did not write to its end, or
            that is of another model than the target.
    """
    folder = pathlib.Path(path).absolute()
    want = None if target is None else trees.open_tree(target)
    manifest = read_manifest(folder)
    _check_files(folder, manifest)
    if want is not None:
        m.match(str(folder), manifest, want)
    with _orbax().PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        args = _restore_args(manifest, want)
        stored = checkpointer.restore(folder / _ARRAYS, restore_args=args)

    def read(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        return {
            part: _back(stored[_key(name, part)], record)
            for part, record in entry["parts"].items()
        }

    return m.rebuilt(str(folder), manifest, want, read)


def _back(array: jax.Array, record: Mapping[str, Any]) -> jax.Array:
    _, load_ = _AS_BYTES.get(record["dtype"], (None, None))
    return array if load_ is None else load_(array)


def _restore_args(
    manifest: Mapping[str, Any], want: trees.Tree | None
) -> dict[str, Any]:
    ocp = _orbax()
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    args = {}
    for name, part, _ in m.records(manifest["entries"]):
        like = None if want is None else trees.parts(want.entries[name])[part]
        sharding = trees.sharding_of(like) or here
        args[_key(name, part)] = ocp.ArrayRestoreArgs(sharding=sharding)
    return args


def _check_files(folder: pathlib.Path, manifest: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first file that is not as it was written."""
    owner = {name: None for name in manifest["files"]}
    wanted = dict(manifest["files"])
    for name, part, record in m.records(manifest["entries"]):
        wanted |= record["files"]
        owner |= dict.fromkeys(record["files"], m.full(name, part))
    there = set(_files(folder / _ARRAYS))
    tensor = lambda f: f" of tensor {owner[f]!r}" if owner.get(f) else ""
    for file in sorted(wanted.keys() - there):
        raise ValueError(f"{folder / _ARRAYS / file}{tensor(file)} is missing.")
    for file in sorted(there - wanted.keys()):
        raise ValueError(
            f"{folder / _ARRAYS / file} does not belong to this checkpoint."
        )
    for file, digest in _sums(folder / _ARRAYS, sorted(wanted)).items():
        if digest != wanted[file]:
            raise ValueError(
                f"{folder / _ARRAYS / file}{tensor(file)} does not have the sum it was "
                "written with: the file is damaged, or files were exchanged."
            )


def read_manifest(path: Any) -> dict[str, Any]:
    """Returns what a checkpoint says of itself; no array is read.

    >>> import os, tempfile
    >>> folder = os.path.join(tempfile.mkdtemp(), "checkpoint")
    >>> save(folder, {"scale": jnp.ones(3)})
    >>> list(read_manifest(folder)["entries"])
    ['scale']

    Args:
        path: the directory.

    Returns:
        The manifest: of each array its format, dtypes and shapes; the rules; sums of files.

    Raises:
        ValueError: A directory that `save` did not write to its end, or a damaged manifest.
    """
    file = pathlib.Path(path).absolute() / _FILE
    try:
        manifest = json.loads(
            file.read_text(encoding="utf-8"), object_pairs_hook=no_duplicates
        )
    except FileNotFoundError:
        raise ValueError(
            f"{file} is not there: the directory was not written by midtread, or not to its "
            "end. Float checkpoints of other writers are read by load_float."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    return m.check(str(file), manifest, "files")


def read_rules(path: Any) -> list[Any]:
    """Returns the rules that a checkpoint was saved with.

    >>> import os, tempfile
    >>> from midtread.model.rules import QuantizationRule
    >>> folder = os.path.join(tempfile.mkdtemp(), "checkpoint")
    >>> rules = [QuantizationRule(weight_qtype="int4")]
    >>> save(folder, {"scale": jnp.ones(3)}, rules=rules)
    >>> read_rules(folder)[0].weight_qtype
    'int4'

    Args:
        path: the directory.

    Returns:
        The rules, in order; none where it was saved without.

    Raises:
        ValueError: A directory that `save` did not write to its end, or a damaged manifest.
    """
    return m.rules_from(read_manifest(path))


def load_float(path: Any, target: Any) -> Any:
    """Reads a float checkpoint that orbax wrote into a float, QAT or QT model's variables.

    >>> import os, tempfile
    >>> folder = os.path.join(tempfile.mkdtemp(), "checkpoint")
    >>> save(folder, {"scale": jnp.ones(3)})
    >>> load_float(folder, {"scale": jax.ShapeDtypeStruct((3,), jnp.float32)})["scale"].shape
    (3,)

    Args:
        path: the directory, of whichever writer.
        target: the model's variables, or their shapes.

    Returns:
        A tree like the target.

    Raises:
        ValueError: A directory that is quantized or not orbax's, or whose arrays are not
            the target's.
    """
    ocp = _orbax()
    folder = pathlib.Path(path).absolute()
    if (folder / _FILE).exists():
        m.require_floats(str(folder), read_manifest(folder))
        restored = load(folder)
        return trees.fill(str(folder), _flat(restored), trees.open_tree(target))
    with ocp.PyTreeCheckpointer() as checkpointer:
        try:
            shapes = checkpointer.metadata(folder).item_metadata.tree
        except (ValueError, FileNotFoundError, AttributeError) as error:
            raise ValueError(f"{folder} is not an orbax checkpoint: {error}") from None
        host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        restored = checkpointer.restore(folder, restore_args=host)
    return trees.fill(str(folder), _flat(restored), trees.open_tree(target))


def _flat(tree: Any) -> dict[str, Any]:
    return trees.open_tree(tree).entries
