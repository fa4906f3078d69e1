"""Tokenizers: text to numbers and back.

    byte             256 bytes and an end mark; needs nothing
    huggingface      a tokenizer.json, or a .gguf file with one inside
    sentencepiece    a .model file; its end mark is the model's own

A document is ended by its tokenizer's end mark: what the files beside tokenizer.json call
eos_token, or else the first of END_MARKS that it has, or else the number that they call
eos_token_id. `begin` is what a text begins with, if the tokenizer puts something there. A
tokenizer with more tokens than the model has rows is refused.

`chat` is the template of a model that was taught to talk, in jinja2: text that the model
was published with, run in a sandbox, with messages in and a prompt out.
"""

import dataclasses
import hashlib
import importlib
import json
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from midtread.interop import gguf
from midtread.lm.config import Config
from midtread.lm.usage import UsageError, require


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Turns text into numbers and back."""

    name: str
    size: int
    end: int  # the mark after a document
    encode: Any  # str -> sequence of int
    decode: Any  # sequence of int -> str
    digest: str = ""  # SHA-256 of its file
    begin: tuple[int, ...] = ()  # tokens that every text begins with
    ends: tuple[int, ...] = ()  # further tokens that end what a model says
    chat: str = ""  # its template for conversations
    # The texts of its marks, which the template may use.
    marks: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def stops(self) -> tuple[int, ...]:
        """Every token that ends what a model says."""
        return (self.end, *self.ends)

    def asked(self, prompt: str) -> str:
        """Returns a prompt in the model's own chat template, ready to be answered.

        Raises:
            UsageError: the template does not run.
        """
        jinja2 = need("jinja2", "a chat template")
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise UsageError(f"{self.name}: its chat template says: {message}")

        runs = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        runs.filters["tojson"] = lambda x, **_: json.dumps(x, ensure_ascii=False)
        runs.globals |= {"raise_exception": refuse, "strftime_now": time.strftime}
        said = [{"role": "user", "content": prompt}]
        try:
            return runs.from_string(self.chat).render(
                messages=said, add_generation_prompt=True, **self.marks
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise UsageError(
                f"{self.name}: its chat template does not run ({error}): write "
                "use_chat_template=false."
            ) from None

    @property
    def about(self) -> dict[str, str]:
        """The facts that a run keeps to recognize its tokenizer."""
        name_alone = {"tokenizer": self.name}
        return (
            {**name_alone, "tokenizer_sha256": self.digest}
            if self.digest
            else name_alone
        )


def _bytes(path: str) -> Tokenizer:
    encode = lambda text: np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
    plain = lambda ids: bytes(i for i in map(int, ids) if i < 256)
    return Tokenizer(
        "byte", 257, 256, encode, lambda i: plain(i).decode(errors="replace")
    )


END_MARKS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|eos|>", "[SEP]")


def _huggingface(path: str) -> Tokenizer:
    tokenizers = need("tokenizers", "tokenizer_type=huggingface")
    says = _beside(path)
    try:
        if path.endswith(".gguf"):
            inner = tokenizers.Tokenizer.from_str(_inside_gguf(path))
        else:
            inner = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # noqa: BLE001  a bare Exception is what the library raises
        raise UsageError(
            f"tokenizer_path={path} is no tokenizer.json: {str(error).rstrip('.')}."
        ) from None
    marks = [says.marks.get("eos_token", ""), *END_MARKS]
    ends = [inner.token_to_id(mark) for mark in marks if mark]
    ends += [i for i in says.ends if 0 <= i < inner.get_vocab_size()]
    end = next((i for i in ends if i is not None), None)
    require(
        end is not None,
        f"tokenizer_path={path} has no end mark: none of {', '.join(END_MARKS)}. "
        "Name it as eos_token in a tokenizer_config.json beside that file.",
    )
    encode = lambda text: inner.encode(text, add_special_tokens=False).ids
    # An empty text is encoded to what the tokenizer puts around every text.
    first = says.begin or tuple(inner.encode("").ids[:1])
    more = tuple(i for i in says.ends if i != end and i < inner.get_vocab_size())
    return Tokenizer(
        path, inner.get_vocab_size(), end, encode, lambda ids: inner.decode(list(ids)),
        begin=first, ends=more, chat=says.chat, marks=says.marks,
    )  # fmt: skip


class Beside(NamedTuple):
    """What the files beside a tokenizer.json say."""

    marks: dict[str, str]  # bos_token, eos_token ...
    ends: tuple[int, ...]
    chat: str
    begin: tuple[int, ...] = ()


def _beside(path: str) -> Beside:
    """Reads the files beside a tokenizer.json, or the same facts from a .gguf file."""
    folder = pathlib.Path(path).parent
    if path.endswith(".gguf"):
        metadata = gguf.GGUF(path).metadata
        chat = metadata.get("tokenizer.chat_template", "")
        ends = [metadata.get("tokenizer.ggml.eos_token_id")]
        begins = bool(metadata.get("tokenizer.ggml.add_bos_token"))
        first = _ids([metadata.get("tokenizer.ggml.bos_token_id")] * begins)
        return Beside(_gguf_marks(metadata), _ids(ends), chat or "", first)
    says = _json(folder / "tokenizer_config.json")
    text = lambda x: x.get("content", "") if isinstance(x, dict) else x
    marks = {k: text(v) for k, v in says.items() if k.endswith("_token")}
    marks = {k: v for k, v in marks.items() if isinstance(v, str)}
    ends = [
        _json(folder / name).get("eos_token_id")
        for name in ("generation_config.json", "config.json")
    ]
    chat = says.get("chat_template", "")
    if isinstance(chat, list):  # several templates, by name
        named = [x for x in chat if isinstance(x, dict)]
        chat = next(
            (x.get("template") for x in named if x.get("name") == "default"), ""
        )
    file = folder / "chat_template.jinja"
    if file.is_file():
        chat = file.read_text(encoding="utf-8", errors="replace")
    return Beside(marks, _ids(ends), chat if isinstance(chat, str) else "")


def _ids(given: Sequence[Any]) -> tuple[int, ...]:
    """Returns the token numbers among what files gave, each once."""
    flat = [i for x in given for i in (x if isinstance(x, list) else [x])]
    return tuple(dict.fromkeys(i for i in flat if type(i) is int))


def _json(file: pathlib.Path) -> dict[str, Any]:
    """Returns what a JSON file says, or {} if it is not there or is no object."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _gguf_marks(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of the begin and end marks of a .gguf file."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    numbers = {k: metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("bos", "eos")}
    return {
        f"{k}_token": tokens[i]
        for k, i in numbers.items()
        if type(i) is int and i < len(tokens)
    }


def _inside_gguf(path: str) -> str:
    """Returns the tokenizer.json that a .gguf file amounts to."""
    from midtread.interop import gguf_tokenizer

    return json.dumps(gguf_tokenizer.tokenizer_json(gguf.GGUF(path).metadata, path))


def _sentencepiece(path: str) -> Tokenizer:
    library = need("sentencepiece", "tokenizer_type=sentencepiece")
    try:
        processor = library.SentencePieceProcessor(model_file=path)
    except (RuntimeError, OSError):
        raise UsageError(f"tokenizer_path={path} is no sentencepiece model.") from None
    decode = lambda ids: processor.decode([int(i) for i in ids])
    return Tokenizer(
        path, processor.vocab_size(), processor.eos_id(), processor.encode, decode
    )


TOKENIZERS = {
    "byte": _bytes,
    "huggingface": _huggingface,
    "sentencepiece": _sentencepiece,
}


def tokenizer(config: Config) -> Tokenizer:
    """Returns the tokenizer that a config names."""
    path = config.tokenizer_path
    if config.tokenizer_type != "byte":
        require(os.path.isfile(path), f"tokenizer_path={path}: no such file.")
    codec = TOKENIZERS[config.tokenizer_type](path)
    if config.tokenizer_type != "byte":
        digest = digest_of(path)
        codec = dataclasses.replace(codec, digest=digest)
    require(
        codec.size <= config.vocab_size,
        f"the tokenizer {codec.name} has {codec.size} tokens, but vocab_size="
        f"{config.vocab_size}: write vocab_size={-(-codec.size // 8) * 8}{_of_folders(path)}.",
    )
    return codec


def _of_folders(path: str) -> str:
    """Says what to write for a published model whose folder has no tokenizer."""
    if path:
        return ""
    return (
        " for a new model. A published one whose folder has no tokenizer.json takes "
        "tokenizer_type=huggingface and tokenizer_path=<its tokenizer.json>"
    )


def files_of_gguf(path: str) -> tuple[str, dict[str, Any]]:
    """Returns the tokenizer.json and tokenizer_config.json that a .gguf file amounts to."""
    says = _beside(path)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **says.marks}
    return _inside_gguf(path), {**about, "chat_template": says.chat or None}


def digest_of(path: str) -> str:
    """Returns the SHA-256 of a tokenizer: of its file, or of what a .gguf file has of
    it."""
    is_gguf = path.endswith(".gguf")
    content = (
        _inside_gguf(path).encode() if is_gguf else pathlib.Path(path).read_bytes()
    )
    return hashlib.sha256(content).hexdigest()


def need(module: str, what: str) -> Any:
    """Imports a package that not everyone has."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0].replace("_", "-")
        raise UsageError(f"{what} needs {package}: pip install {package}.") from None
