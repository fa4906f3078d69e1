"""The tokenizer inside a GGUF file, from and to a tokenizer.json.

llama.cpp keeps a byte-level BPE ("gpt2") as lists under `tokenizer.ggml.`: tokens, kinds of
tokens (1 normal, 3 control, 4 the user's), merges, and `pre`, the name of the expression
that cuts text into words. The expressions are llama.cpp's; those of `SPLITS` are known here
in both directions. A tokenizer of another kind is not written: the file then says
`tokenizer.ggml.model = none`, and llama.cpp runs it on numbers of tokens alone.
"""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# llama.cpp's name -> the expressions that split text, in order; none: ByteLevel's own
SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (),
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "smollm": ("digits",),
}
_NAMES = {"default": "gpt-2", "smaug-bpe": "llama-bpe", "llama-v3": "llama-bpe"}
_NORMAL, _CONTROL, _USER = 1, 3, 4


def tokenizer_json(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns what tokenizer.json would hold.

    Args:
        metadata: of a GGUF file.
        where: the file, to call it by in errors.

    Raises:
        ValueError: the file has another kind of tokenizer, or none.
    """
    get = lambda key: metadata.get(f"tokenizer.ggml.{key}")
    model, pre = get("model"), get("pre") or "default"
    pre = _NAMES.get(pre, pre)
    if model != "gpt2" or pre not in SPLITS:
        raise ValueError(
            f"{where}: its tokenizer ({model!r}, {pre!r}) is not read; 'gpt2' is, with "
            f"{', '.join(SPLITS)}. Give tokenizer_path."
        )
    tokens, merges = get("tokens"), get("merges")
    kinds = get("token_type") or [_NORMAL] * len(tokens or ())
    plain = lambda x: isinstance(x, list) and all(isinstance(t, str) for t in x)
    if not plain(tokens) or not plain(merges) or len(kinds) != len(tokens):
        raise ValueError(f"{where}: its lists of tokens and merges do not read.")
    added = [
        {"id": i, "content": token, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False, "special": kinds[i] == _CONTROL}
        for i, token in enumerate(tokens) if kinds[i] in (_CONTROL, _USER)
    ]  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": _pre_tokenizer(SPLITS[pre]),
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                    "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None,
            "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": pre == "llama-bpe",
            "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges,
        },
    }  # fmt: skip


def _pre_tokenizer(splits: Sequence[str]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": not splits or splits == ("digits",)}  # fmt: skip
    if not splits:
        return byte_level
    if splits == ("digits",):
        first = {"type": "Digits", "individual_digits": True}
    else:
        first = {"type": "Split", "pattern": {"Regex": splits[0]}, "behavior": "Isolated",
                 "invert": False}  # fmt: skip
    return {"type": "Sequence", "pretokenizers": [first, byte_level]}


def has_tokenizer(metadata: Mapping[str, Any]) -> bool:
    """Returns whether a GGUF file has a tokenizer, of whatever kind, or takes numbers of
    tokens alone."""
    return metadata.get("tokenizer.ggml.model") not in (None, "none")


def metadata(
    files: Sequence[Any], vocab_size: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Keys for a GGUF file, from the tokenizer.json (and its config) among some files."""
    by_name = {pathlib.Path(file).name: pathlib.Path(file) for file in files}
    none = {"tokenizer.ggml.model": "none"}
    if "tokenizer.json" not in by_name:
        say("The file has no tokenizer: llama.cpp takes numbers of tokens alone.")
        return none
    about = json.loads(by_name["tokenizer.json"].read_text())
    model = about.get("model", {})
    pre = _split_name(about.get("pre_tokenizer"))
    if model.get("type") != "BPE" or pre is None:
        say(
            f"The tokenizer ({model.get('type')}) is none that llama.cpp has under a name "
            "known here: the file is without one, and takes numbers of tokens alone."
        )
        return none
    tokens, kinds = _tokens(model["vocab"], about.get("added_tokens", ()), vocab_size)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    }
    return keys | _special(by_name, {t: i for i, t in enumerate(tokens)})


def _split_name(pre: Any) -> str | None:
    if not isinstance(pre, Mapping):
        return None
    inner = pre.get("pretokenizers", [pre]) if pre.get("type") == "Sequence" else [pre]
    steps = []
    for one in inner:
        if one.get("type") == "Split":
            steps.append(one.get("pattern", {}).get("Regex", ""))
        elif one.get("type") == "Digits":
            steps.append("digits")
        elif one.get("type") != "ByteLevel":
            return None
    return next(
        (name for name, splits in SPLITS.items() if tuple(steps) == splits), None
    )


def _tokens(vocab, added, vocab_size: int) -> tuple[list[str], list[int]]:
    """Returns every token by its number; numbers without one are unused."""
    size = max([vocab_size, *(i + 1 for i in vocab.values())])
    tokens = [f"[PAD{i}]" for i in range(size)]
    kinds = [5] * size  # unused
    for token, i in vocab.items():
        tokens[i], kinds[i] = token, _NORMAL
    for one in added:
        if one["id"] < size:
            tokens[one["id"]] = one["content"]
            kinds[one["id"]] = _CONTROL if one.get("special") else _USER
    return tokens, kinds


def _special(files: Mapping[str, pathlib.Path], numbers: Mapping[str, int]):
    if "tokenizer_config.json" not in files:
        return {}
    about = json.loads(files["tokenizer_config.json"].read_text())
    keys: dict[str, Any] = {}
    for name, key in (
        ("bos", "bos"),
        ("eos", "eos"),
        ("pad", "padding"),
        ("unk", "unknown"),
    ):
        token = about.get(f"{name}_token")
        token = token.get("content") if isinstance(token, Mapping) else token
        if token in numbers:
            keys[f"tokenizer.ggml.{key}_token_id"] = numbers[token]
    if isinstance(about.get("add_bos_token"), bool):
        keys["tokenizer.ggml.add_bos_token"] = about["add_bos_token"]
    if isinstance(about.get("chat_template"), str):
        keys["tokenizer.chat_template"] = about["chat_template"]
    return keys
