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
import hashlib
import json
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from midtread.interop import huggingface as hf
from midtread.lm import architectures
from midtread.lm.config import Config, Model, UsageError, require

WEIGHTS = "weights"  # inside an imported run
LENGTH = 2048  # max_target_length, where a model was made for more
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja",
    "special_tokens_map.json", "generation_config.json", "added_tokens.json",
    "vocab.json", "merges.txt",
)  # fmt: skip
DTYPES = {"bfloat16": "bfloat16", "float32": "float32", "float16": "float32"}
# tensors of multi-token prediction, which the model of the folder does without
AHEAD = r"model\.layers\.{layer}\..*"


def folder_in(path: Any) -> pathlib.Path | None:
    """The Hugging Face folder that a path is, or that an imported run has inside."""
    root = pathlib.Path(path)
    if (root / WEIGHTS).is_dir() and (root / "config.yml").is_file():
        return root / WEIGHTS
    is_run = (root / "config.yml").is_file() or (root / "checkpoints").is_dir()
    return root if not is_run and hf.is_folder(root) else None


def keys_of(folder: Any) -> dict[str, Any]:
    """The keys that a folder's config.json and tokenizer say.

    Raises:
        UsageError: it is of an architecture, or has an option, that the model lacks.
    """
    folder = pathlib.Path(folder)
    with refusing():
        config = hf.read_json(folder / "config.json")
    out = architectures.settings_of(config, str(folder))
    longest = config.get("max_position_embeddings")
    is_size = isinstance(longest, int) and longest > 1
    out["max_target_length"] = min(longest, LENGTH) if is_size else LENGTH
    stored = config.get("dtype", config.get("torch_dtype"))
    dtype = DTYPES.get(stored, "float32") if isinstance(stored, str) else "float32"
    out |= {"dtype": dtype, "weight_dtype": dtype, "run_name": folder.resolve().name}
    if (folder / "tokenizer.json").is_file():
        path = str(folder / "tokenizer.json")
        out |= {"tokenizer_type": "huggingface", "tokenizer_path": path}
    elif (folder / "tokenizer.model").is_file():
        path = str(folder / "tokenizer.model")
        out |= {"tokenizer_type": "sentencepiece", "tokenizer_path": path}
    return out


def arrays(folder: Any, m: Model) -> hf.Arrays:
    """The arrays of our model, by path, each read from a folder when it is asked for.

    Raises:
        UsageError: the folder is not whole, or not of this model, by name.
    """
    with refusing():
        source = hf.Folder(folder)
        arch = architectures.architecture(source.config, source.name)
        table = architectures.table(m, arch)
        ignored = [*architectures.IGNORED]
        if m.logits_via_embedding:
            _check_tied(source)
            ignored.append(r"lm_head\.weight")
        for layer in range(_layers_ahead(source.config)):
            ignored.append(AHEAD.format(layer=m.num_decoder_layers + layer))
        return hf.Arrays(source, table, architectures.shapes(m), ignored)


def _layers_ahead(config: Mapping[str, Any]) -> int:
    """DeepSeek-V3's layers after the last, which predict a token further."""
    count = config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 0))
    return min(count, 16) if isinstance(count, int) else 0


def _check_tied(source: hf.Folder) -> None:
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
    """A ValueError of the library, as one line for the command line."""
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


def import_folder(config: Config, source: str) -> Imported:
    """Makes a run of a folder: base_output_directory/run_name.

    Raises:
        UsageError: the folder is not one that can be read, or the run is there already.
    """
    from midtread.lm import settings
    from midtread.lm.config import section
    from midtread.lm.tokenizer import tokenizer

    origin = pathlib.Path(source)
    run = pathlib.Path(config.base_output_directory) / config.run_name
    require(
        not run.exists() or (config.overwrite and (run / WEIGHTS).is_dir()),
        f"{run} is there already: choose another run_name, or write overwrite=true, which "
        "replaces an imported run.",
    )
    found = arrays(origin, section(config, Model))
    folder: Any = found.source
    if config.tokenizer_type != "byte":
        tokenizer(config)  # refuses one that does not read, or has too many tokens
    partial = run.with_name(f"{run.name}.partial")  # until it is whole
    shutil.rmtree(partial, ignore_errors=True)
    (partial / WEIGHTS).mkdir(parents=True)
    taken = [*folder.files, *(origin / name for name in TOKENIZER)]
    for file in (*taken, origin / "config.json"):
        if file.is_file():
            shutil.copyfile(file, partial / WEIGHTS / file.name)
    if config.tokenizer_path:
        held = run / WEIGHTS / pathlib.Path(config.tokenizer_path).name
        config = dataclasses.replace(config, tokenizer_path=str(held))
    settings.save(config, partial / "config.yml")
    about = {"imported_from": str(origin), "tokenizer": "none"}
    if config.tokenizer_type != "byte":
        digest = hashlib.sha256((partial / WEIGHTS / held.name).read_bytes())
        about |= {"tokenizer": held.name, "tokenizer_sha256": digest.hexdigest()}
    (partial / "data.json").write_text(json.dumps(about, indent=1))
    if run.exists():
        shutil.rmtree(run)
    partial.rename(run)
    kind = str(architectures.architecture(folder.config, source))
    return Imported(run, len(folder.tensors), folder.nbytes, kind)
