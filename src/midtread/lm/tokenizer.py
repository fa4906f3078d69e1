"""Tokenizers: text to numbers and back.

    byte             256 bytes and an end mark; needs nothing
    huggingface      a tokenizer.json; its end mark is the first of END_MARKS that it has
    sentencepiece    a .model file; its end mark is the model's own

A document is ended by its tokenizer's end mark. A tokenizer with more tokens than the
model has rows is refused.
"""

import dataclasses
import hashlib
import importlib
import os
import pathlib
from typing import Any

import numpy as np

from midtread.lm.config import Config, UsageError, require


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to numbers and back."""

    name: str
    size: int
    end: int  # the mark after a document
    encode: Any  # str -> sequence of int
    decode: Any  # sequence of int -> str
    digest: str = ""  # SHA-256 of its file

    @property
    def about(self) -> dict[str, str]:
        """What a run keeps, to know it again."""
        held = {"tokenizer": self.name}
        return {**held, "tokenizer_sha256": self.digest} if self.digest else held


def _bytes(path: str) -> Tokenizer:
    encode = lambda text: np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
    plain = lambda ids: bytes(i for i in map(int, ids) if i < 256)
    return Tokenizer(
        "byte", 257, 256, encode, lambda i: plain(i).decode(errors="replace")
    )


END_MARKS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|eos|>", "[SEP]")


def _huggingface(path: str) -> Tokenizer:
    tokenizers = need("tokenizers", "tokenizer_type=huggingface")
    try:
        held = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # noqa: BLE001  a bare Exception is what the library raises
        raise UsageError(
            f"tokenizer_path={path} is no tokenizer.json: {error}."
        ) from None
    ends = [held.token_to_id(mark) for mark in END_MARKS]
    end = next((i for i in ends if i is not None), None)
    require(
        end is not None,
        f"tokenizer_path={path} has no end mark: none of {', '.join(END_MARKS)}.",
    )
    encode = lambda text: held.encode(text, add_special_tokens=False).ids
    return Tokenizer(
        path, held.get_vocab_size(), end, encode, lambda ids: held.decode(list(ids))
    )


def _sentencepiece(path: str) -> Tokenizer:
    library = need("sentencepiece", "tokenizer_type=sentencepiece")
    try:
        held = library.SentencePieceProcessor(model_file=path)
    except (RuntimeError, OSError):
        raise UsageError(f"tokenizer_path={path} is no sentencepiece model.") from None
    decode = lambda ids: held.decode([int(i) for i in ids])
    return Tokenizer(path, held.vocab_size(), held.eos_id(), held.encode, decode)


TOKENIZERS = {
    "byte": _bytes,
    "huggingface": _huggingface,
    "sentencepiece": _sentencepiece,
}


def tokenizer(config: Config) -> Tokenizer:
    path = config.tokenizer_path
    if config.tokenizer_type != "byte":
        require(os.path.isfile(path), f"tokenizer_path={path}: no such file.")
    made = TOKENIZERS[config.tokenizer_type](path)
    if config.tokenizer_type != "byte":
        digest = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
        made = dataclasses.replace(made, digest=digest)
    require(
        made.size <= config.vocab_size,
        f"the tokenizer {made.name} has {made.size} tokens, but vocab_size="
        f"{config.vocab_size}: write vocab_size={-(-made.size // 8) * 8}.",
    )
    return made


def need(module: str, what: str) -> Any:
    """A package that not everyone has."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0].replace("_", "-")
        raise UsageError(f"{what} needs {package}: pip install {package}.") from None
