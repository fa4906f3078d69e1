"""Hugging Face folders as runs: their config as keys, their weights as ours, and back.

    midtread import <folder or .gguf>    a run that has the weights as they were published
    load_parameters_path=<folder>        the folder itself, wherever a run is taken
    midtread export <run> format=hf      a folder that others read

What an imported run keeps is the folder: shards are copied as they are, after every name,
shape and dtype in them has been held against the model, so importing is as fast as copying,
needs no memory to speak of, and loses no bit. What reads a run reads those files, one array
of our model at a time (`lm/checkpoint.py`).

    <run>/config.yml       the model as our keys, the tokenizer
         /data.json        where it came from
         /weights/         config.json, safetensors, tokenizer files: a Hugging Face folder

A model computes in bfloat16 if it was published in bfloat16, in float32 otherwise; dtype
and weight_dtype on the command line say so differently.
"""

import contextlib
import dataclasses
import json
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from midtread.interop import export as others
from midtread.interop import gguf, gguf_export, gguf_tokenizer, quantized, targets
from midtread.interop import huggingface as hf
from midtread.lm import architectures, config_json
from midtread.lm.config import Config, Model, section
from midtread.lm.usage import UsageError, require
from midtread.model import flaxlib
from midtread.model.boxes import WithAux
from midtread.model.rules import did_you_mean
from midtread.numerics.dtypes import is_wide
from midtread.numerics.qarray import QArray

WEIGHTS = "weights"  # inside an imported run
GGUF = ".gguf"
QUANTIZED = ("quantization_config", "quantization")  # of config.json
LENGTH = 2048  # max_target_length, where a model was made for more
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja",
    "special_tokens_map.json", "generation_config.json", "added_tokens.json",
    "vocab.json", "merges.txt",
)  # fmt: skip
DTYPES = {"bfloat16": "bfloat16", "float32": "float32", "float16": "float32"}
BYTES = (
    "It has no tokenizer.json: text is read byte by byte. Unless it was trained on bytes, "
    "put the file beside its config.json and import it again."
)
BYTES_OF_GGUF = (
    "It has no tokenizer: text is read byte by byte. Unless it was trained on bytes, give "
    "tokenizer_type=huggingface and tokenizer_path=<tokenizer.json>, and import it again."
)
# tensors of multi-token prediction, which the model of the folder does without
AHEAD = r"model\.layers\.{layer}\..*"


def folder_in(path: Any) -> pathlib.Path | None:
    """Returns the Hugging Face folder, or .gguf file, that a path is or an imported run has."""
    root = pathlib.Path(path)
    if root.suffix == GGUF and root.is_file():
        return root
    if (root / WEIGHTS).is_dir() and (root / "config.yml").is_file():
        return root / WEIGHTS
    is_run = (root / "config.yml").is_file() or (root / "checkpoints").is_dir()
    return root if not is_run and hf.is_folder(root) else None


def open_model(path: Any) -> Any:
    """Returns a folder or .gguf file, float or quantized, by the names of a Hugging Face
    folder."""
    path = pathlib.Path(path)
    inside = sorted(path.glob(f"*{GGUF}")) if path.is_dir() else []
    with refusing():
        return quantized.open_model(inside[0] if inside else path)


def keys_of(folder: Any) -> dict[str, Any]:
    """Returns the keys that a folder's config.json and tokenizer say.

    Raises:
        UsageError: it is of an architecture, or has an option, that the model lacks.
    """
    folder = pathlib.Path(folder)
    is_gguf = folder.suffix == GGUF
    with refusing():
        config = (
            open_model(folder).config
            if is_gguf
            else hf.read_json(folder / "config.json")
        )
    out = config_json.settings_of(config, str(folder))
    longest = config.get("max_position_embeddings")
    is_size = isinstance(longest, int) and longest > 1
    out["max_target_length"] = min(longest, LENGTH) if is_size else LENGTH
    stored = config.get("dtype", config.get("torch_dtype"))
    dtype = DTYPES.get(stored, "float32") if isinstance(stored, str) else "float32"
    out |= {"dtype": dtype, "weight_dtype": dtype, "run_name": folder.resolve().stem}
    has_codes = is_gguf or any(key in config for key in QUANTIZED)
    if has_codes and quantized.is_mixed(open_model(folder)):
        out["scan_layers"] = False  # no stack holds two formats
    if is_gguf:
        if gguf_tokenizer.has_tokenizer(gguf.GGUF(folder).metadata):
            out |= {"tokenizer_type": "huggingface", "tokenizer_path": str(folder)}
    elif (folder / "tokenizer.json").is_file():
        path = str(folder / "tokenizer.json")
        out |= {"tokenizer_type": "huggingface", "tokenizer_path": path}
    elif (folder / "tokenizer.model").is_file():
        path = str(folder / "tokenizer.model")
        out |= {"tokenizer_type": "sentencepiece", "tokenizer_path": path}
    return out


def arrays(folder: Any, m: Model) -> hf.Arrays:
    """Returns the arrays of our model, by path, each read from a folder when it is asked for.

    Raises:
        UsageError: the folder is not whole, or not of this model, by name.
    """
    source = open_model(folder)
    with refusing():
        arch = architectures.architecture(source.config, source.name)
        table = architectures.table(m, arch)
        ignored = [*architectures.IGNORED]
        if m.logits_via_embedding:
            _check_tied(source)
            ignored.append(r"lm_head\.weight")
        for layer in range(_layers_ahead(source.config)):
            ignored.append(AHEAD.format(layer=m.num_decoder_layers + layer))
        published = _Arrays(source, table, architectures.shapes(m), ignored)
        for path in published:
            _check_floats(source, published.names(path))
        return published


class _Arrays(hf.Arrays):
    """Arrays of a folder; what is damaged in it is one line for the command line."""

    def __getitem__(self, path: str) -> Any:
        with refusing():
            return super().__getitem__(path)


def _check_floats(source: Any, names: list[str]) -> None:
    """Refuses codes that nothing says the scales of, which are no weights by themselves."""
    for name in names:
        dtype = source.tensors[name].dtype
        if not is_wide(dtype):
            raise ValueError(
                f"{source.name}: tensor {name!r} is {dtype}, and no weight: its scales are "
                "missing, or config.json does not say how it is quantized."
            )


def _layers_ahead(config: Mapping[str, Any]) -> int:
    """Returns DeepSeek-V3's layers after the last, which predict a token further."""
    count = config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 0))
    return min(count, 16) if isinstance(count, int) else 0


def _check_tied(source: Any) -> None:
    """A head beside an embedding that is said to be the head must be the same."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if {head, embedding} <= source.tensors.keys():
        same = source.tensors[head] == source.tensors[embedding]
        if not same or not np.array_equal(source.read(head), source.read(embedding)):
            raise ValueError(
                f"{source.name}: config.json has tie_word_embeddings=true, but {head} is "
                f"not {embedding}: write false there."
            )


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Turns a ValueError of the library into one line for the command line."""
    try:
        yield
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from None


# --- in ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Imported:
    """What was imported, for the terminal."""

    folder: pathlib.Path
    tensors: int
    nbytes: int
    architecture: str
    notes: tuple[str, ...]  # what the folder asks for and is not done here


def import_folder(config: Config, source: str) -> Imported:
    """Makes a run of a folder: base_output_directory/run_name.

    Raises:
        UsageError: the folder is not one that can be read, or the run is there already.
    """
    from midtread.lm import settings
    from midtread.lm.tokenizer import digest_of, tokenizer

    origin = pathlib.Path(source)
    run = pathlib.Path(config.base_output_directory) / config.run_name
    require(
        not run.exists() or (config.overwrite and (run / WEIGHTS).is_dir()),
        f"{run} is there already: choose another run_name, or write overwrite=true, which "
        "replaces an imported run.",
    )
    require(
        origin.suffix == GGUF or not (origin / "config.yml").is_file(),
        f"{origin} is a run already: give it to quantize, eval, generate or export. import "
        "takes a folder with config.json and .safetensors, or a .gguf file.",
    )
    opened = arrays(origin, section(config, Model)).source
    if config.tokenizer_type != "byte":
        tokenizer(config)  # refuses one that does not read, or has too many tokens
    partial = run.with_name(f"{run.name}.partial")  # until it is whole
    shutil.rmtree(partial, ignore_errors=True)
    (partial / WEIGHTS).mkdir(parents=True)
    for file in _files(origin, opened):
        shutil.copyfile(file, partial / WEIGHTS / file.name)
    if origin.suffix == GGUF:  # what the file says, for whoever looks
        hf.write_json(partial / WEIGHTS / "config.json", opened.config)
    about: dict[str, Any] = {"imported_from": str(origin), "tokenizer": "none"}
    if config.tokenizer_path:
        copied = pathlib.Path(config.tokenizer_path).name
        about |= {
            "tokenizer": copied,
            "tokenizer_sha256": digest_of(config.tokenizer_path),
        }
        copied = str(run / WEIGHTS / copied)
        config = dataclasses.replace(config, tokenizer_path=copied)
    settings.save(config, partial / "config.yml")
    (partial / "data.json").write_text(json.dumps(about, indent=1))
    if run.exists():
        shutil.rmtree(run)
    partial.rename(run)
    nbytes = sum(p.stat().st_size for p in (run / WEIGHTS).iterdir())
    kind = str(architectures.architecture(opened.config, str(origin)))
    notes = tuple(getattr(opened, "notes", ()))
    if config.tokenizer_type == "byte":
        notes += (BYTES_OF_GGUF if origin.suffix == GGUF else BYTES,)
    return Imported(run, len(opened.tensors), nbytes, kind, notes)


def _files(origin: pathlib.Path, source: Any) -> list[pathlib.Path]:
    """Returns what an imported run keeps: weights as they are, config and tokenizer."""
    if origin.suffix == GGUF:
        return [origin]
    folder = source if isinstance(source, hf.Folder) else source.folder
    beside = [origin / name for name in (*TOKENIZER, "config.json")]
    return [*folder.files, *(file for file in beside if file.is_file())]


# --- out --------------------------------------------------------------------------------------


def formats() -> list[str]:
    """Returns what `midtread export` writes: hf, and the targets of interop/targets.py."""
    return ["hf", *targets.TARGETS, *gguf_export.KINDS]


def export(
    config: Config, run: str, say: Callable[[str], None] = print
) -> pathlib.Path:
    """Writes the weights of a run for others, as `format` says.

    With format=hf a float folder that transformers load: what was imported has its own names
    and config, and its tensors bit for bit; what was trained here is the architecture that
    its keys amount to. With the others a quantized one (interop/export.py): what is float is
    rounded on the way, and what `midtread quantize` made keeps its codes.

    Raises:
        UsageError: the folder is there already, the format is not known, or the model is no
            architecture that others have.
    """
    from midtread.lm import convert

    kind = config.format
    if kind not in formats():  # of no kind by itself: GGUF
        hint = did_you_mean(kind, formats())
        kinds = f"A .gguf file has a kind, one of {', '.join(gguf_export.KINDS)}."
        raise UsageError(
            f"format={kind} is none that is written. {kinds if kind == 'gguf' else hint}"
        )
    suffix = GGUF if kind in gguf_export.KINDS else ""
    path = config.export_path or f"{run.rstrip('/').removesuffix(GGUF)}-{kind}{suffix}"
    folder = pathlib.Path(path)
    require(
        not folder.exists(), f"{folder} is there already: give another export_path."
    )
    origin, is_coded = folder_in(run), convert.is_quantized(run)
    if kind == "hf":
        require(
            not is_coded,
            f"{run} is quantized, and format=hf holds floats: give the float run, or a "
            f"format that holds codes: {', '.join(formats()[1:])}.",
        )
        require(
            not config.group_size, "group_size says nothing with format=hf: drop it."
        )
    with refusing():
        if origin is not None:
            source: Any = open_model(origin)
            arrays(origin, section(config, Model))  # refuses what does not fit
        elif is_coded:
            origin = _origin_of(run)
            source = _quantized(config, run, origin)
        else:
            source = _trained(config, run)
    if kind == "hf":
        return _floats_out(config, source, origin, folder)
    with tempfile.TemporaryDirectory() as scratch, refusing():
        _write_tokenizer(config, origin, pathlib.Path(scratch))
        also = sorted(pathlib.Path(scratch).iterdir())
        # a run that `midtread quantize` made has the groups that its config says
        size = None if is_coded else config.group_size or None
        return others.export(source, folder, kind, group_size=size, also=also, say=say)


def _floats_out(
    config: Config, source: Any, origin: pathlib.Path | None, folder: pathlib.Path
) -> pathlib.Path:
    about = {k: v for k, v in source.config.items() if k not in QUANTIZED}
    about["dtype"] = about["torch_dtype"] = config.weight_dtype
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with refusing():
        hf.write_tensors(
            partial, hf.Floats(source, jnp.dtype(config.weight_dtype)), about
        )
    _write_tokenizer(config, origin, partial)
    partial.rename(folder)
    return folder


def _trained(config: Config, run: str) -> hf.Tree:
    """Returns a run of ours by the names of the architecture that it is one of."""
    from midtread.lm import checkpoint
    from midtread.lm import model as models

    m = section(config, Model)
    state = checkpoint.load_weights(run, nnx.state(models.abstract(m), nnx.Param))
    tree = flax.traverse_util.flatten_dict(nnx.to_pure_dict(state), sep="/")
    m, tree = _with_plain_embedding(m, tree)
    arch, about = config_json.config_of(m)
    about |= _ends(config)
    return hf.Tree(tree, architectures.table(m, arch), about, run, _files_of(run))


def _ends(config: Config) -> dict[str, Any]:
    """Returns the tokens that end a text, for config.json: without them transformers takes an
    architecture's own."""
    from midtread.lm import tokenizer as tokenizers

    if not config.tokenizer_path:
        return {}
    ends = [*dict.fromkeys(tokenizers.tokenizer(config).stops)]
    return {"eos_token_id": ends if len(ends) > 1 else ends[0]}


def _files_of(run: str) -> list[pathlib.Path]:
    """Returns the files that hold the weights of a run or checkpoint."""
    from midtread.lm import checkpoint

    return sorted(p for p in checkpoint.locate(run)[0].rglob("*") if p.is_file())


def _quantized(config: Config, run: str, origin: pathlib.Path | None) -> hf.Tree:
    """Returns a checkpoint of `midtread quantize` likewise, with its codes as they are."""
    from midtread.lm import convert

    m, model = section(config, Model), convert.load(config, run)
    tree = {}
    for path in architectures.shapes(m):
        *inside, name = path.split("/")
        value = flaxlib.unbox(getattr(flaxlib.value_at(model, tuple(inside)), name))
        tree[path] = value.array if isinstance(value, WithAux) else value
    m, tree = _with_plain_embedding(m, tree)
    arch, about = config_json.config_of(m)
    if origin is None:
        about |= _ends(config)
    else:  # what it was imported from says more
        about = open_model(origin).config
        arch = architectures.architecture(about, run)
    return hf.Tree(tree, architectures.table(m, arch), about, run, _files_of(run))


def _origin_of(run: str) -> pathlib.Path | None:
    """Returns the folder of others that a quantized checkpoint was made of, if it is still
    there."""
    from midtread.lm import checkpoint, convert

    source = checkpoint.read_about(pathlib.Path(run) / convert.FILE).get("source", "")
    return folder_in(source) if source else None


def _with_plain_embedding(m: Model, tree: dict[str, Any]) -> tuple[Model, dict]:
    """Returns the same model without a gain of embeddings, which only Gemma's have: it goes
    into the table, and a head that was the table becomes one of its own."""
    is_gemma = m.norm_scale_offset
    if is_gemma or m.embedding_gain == 1:
        return m, tree
    table = tree["token_embedder/embedding"]
    gain = m.emb_dim**0.5 if m.embedding_gain is None else m.embedding_gain
    if isinstance(table, QArray):
        louder = table.replace(scale=table.scale * jnp.asarray(gain, table.scale.dtype))
    else:
        louder = table * jnp.asarray(gain, table.dtype)
    tree = {**tree, "token_embedder/embedding": louder}
    if m.logits_via_embedding:
        tree["decoder/logits_dense/kernel"] = table.T
    return dataclasses.replace(m, embedding_gain=1.0, logits_via_embedding=False), tree


def _write_tokenizer(config: Config, origin: Any, folder: pathlib.Path) -> None:
    """Writes the files of a tokenizer, from wherever the run has it."""
    from midtread.lm import tokenizer as tokenizers

    if origin is not None and origin.is_dir():
        for name in TOKENIZER:
            if (origin / name).is_file():
                shutil.copyfile(origin / name, folder / name)
    path = config.tokenizer_path
    if path.endswith(GGUF):
        text, about = tokenizers.files_of_gguf(path)
        (folder / "tokenizer.json").write_text(text)
        hf.write_json(folder / "tokenizer_config.json", about)
    elif path and config.tokenizer_type == "huggingface":
        shutil.copyfile(path, folder / "tokenizer.json")
