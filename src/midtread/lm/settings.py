"""Settings: from a YAML file and `key=value` words to a Config, strictly.

    defaults  <  the shipped config `model_name`  <  the file  <  key=value

OmegaConf reads and merges (so `${run_name}` works in files), pydantic turns what was
written into the types of `lm/config.py`. What is wrong is said in one line with the key,
what was given, and the nearest key or the values there are.
"""

import contextlib
import dataclasses
import json
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from midtread.lm import contradictions, huggingface
from midtread.lm.config import SECTIONS, Config, Quantization, Sharding, keys, kind
from midtread.lm.usage import UsageError, first_line, require
from midtread.model.rules import did_you_mean

TYPES = {
    "int",
    "float",
    "bool",
    "str",
    "null",
    "list",
}  # what `kind` says of keys without named values
LISTS_OF_TEXT = ("prompt", "stop")  # one text alone is a list of one
SHIPPED = pathlib.Path(__file__).parent / "configs"


def shipped() -> list[str]:
    """Returns the names of the configs that come with the package."""
    return sorted(p.stem for p in SHIPPED.glob("*.yml") if p.stem != "base")


def load(words: Sequence[str], under: Mapping[str, Any] | None = None) -> Config:
    """Reads `["file.yml", "steps=10"]` as a Config; the file is optional.

    Args:
        under: values that replace the defaults, those of a checkpoint.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    files = [w for w in words if "=" not in w]
    for word in files:
        require(word not in keys(), f"{word} is a key: write {word}=<value>.")
    require(
        len(files) <= 1,
        f"two config files, {' and '.join(files)}: give one, then key=value.",
    )
    written = _overrides([w for w in words if "=" in w])
    read = _file(files[0]) if files else {}
    name = written.get("model_name", read.get("model_name", ""))
    model = _file(name) if name else {}
    start = written.get("load_parameters_path", read.get("load_parameters_path", ""))
    if start and (folder := huggingface.folder_in(start)):
        says = {k: v for k, v in huggingface.keys_of(folder).items() if k != "run_name"}
        under = {**says, **(under or {})}
    off = _switched_off(written)
    rest = [
        {k: v for k, v in x.items() if k not in off} for x in (under or {}, model, read)
    ]
    try:
        merged = OmegaConf.merge(*(OmegaConf.create(x) for x in (*rest, written)))
        values = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise UsageError(first_line(error)) from None
    return validate(values)


def _switched_off(written: Mapping[str, Any]) -> set[str]:
    """Returns the keys of parts that the words switch off: `demo temperature=0` says nothing
    of top_k, and the one of the file goes with the temperature."""
    from pydantic import TypeAdapter, ValidationError

    off: set[str] = set()
    for switch, without, _, names in (*contradictions.PARTS, *contradictions.OPTIONS):
        if switch in written:
            takes = TypeAdapter(get_type_hints(Config)[switch])
            with contextlib.suppress(ValidationError):  # `validate` says it better
                if takes.validate_python(written[switch]) == without:
                    off |= {*names}
    return off


def require_used(verb: str, words: Sequence[str]) -> None:
    """Refuses `key=value` words that a verb would ignore. Files are for several verbs, and
    may say more."""
    names = [w.partition("=")[0].lstrip("-") for w in words if "=" in w]
    contradictions.check_verb(verb, names)


def load_checkpoints(words: Sequence[str]) -> list[tuple[str, Config]]:
    """Reads `["runs/a", "runs/b", "seed=1"]` as checkpoints, each with its own config
    changed by the words. A float checkpoint is served in float unless the words say
    otherwise, however it was trained."""
    from midtread.lm import checkpoint, convert

    is_one = lambda w: pathlib.Path(w).is_dir() or w.endswith(huggingface.GGUF)
    paths = [w for w in words if "=" not in w and is_one(w)]
    rest = [w for w in words if w not in paths]
    name = "load_parameters_path="
    paths += [w.removeprefix(name) for w in rest if w.startswith(name)]
    rest = [w for w in rest if not w.startswith(name)]
    files = {*shipped(), *(w for w in rest if w.endswith((".yml", ".yaml")))}
    missing = [w for w in rest if "=" not in w and w not in files]
    require(not missing, f"no such run or checkpoint: {' '.join(missing)}.")
    require(
        paths, "which checkpoint? Give its folder, or load_parameters_path=<folder>."
    )
    rest += _kind_of_data(rest)
    given = dict(w.split("=", 1) for w in rest if "=" in w)
    checkpoints = []
    for path in paths:
        weights, file = checkpoint.locate(path)
        is_published = file.suffix != ".yml"
        own = huggingface.keys_of(weights) if is_published else _file(str(file))
        tokenizer_copy = weights / pathlib.Path(own.get("tokenizer_path") or ".").name
        # The run may have been moved, and its tokenizer with it.
        if own.get("tokenizer_path") and tokenizer_copy.is_file():
            own["tokenizer_path"] = str(tokenizer_copy)
        dropped = {"load_parameters_path", "save_quantized_params_path", "overwrite"}
        dropped |= {"remat_policy", *keys(Sharding)}  # for training
        if not convert.is_quantized(path):
            dropped |= set(keys(Quantization))
        else:
            _require_as_quantized(path, own, given)
        if kind_of_data := given.get("dataset_type"):  # what the run's own data needed
            reads = contradictions.READS.items()
            dropped |= {name for name, kinds in reads if kind_of_data not in kinds}
        under = {k: v for k, v in own.items() if k not in dropped}
        checkpoints.append((path, load(rest, under)))
        checkpoint.require_same_model(checkpoints[-1][1], path)
    return checkpoints


def _require_as_quantized(
    path: str, own: Mapping[str, Any], given: Mapping[str, str]
) -> None:
    """Refuses another format than the one that a checkpoint is quantized to."""
    for name in ("quantization", "group_size"):
        stored = str(own.get(name, ""))
        require(
            given.get(name, stored) == stored,
            f"{path} is quantized already, with {name}={stored}: drop {name}="
            f"{given.get(name)}, or give the float run.",
        )


def _kind_of_data(words: Sequence[str]) -> list[str]:
    """Guesses dataset_type by the names of the files, where only dataset_path is given."""
    given = dict(w.split("=", 1) for w in words if "=" in w)
    if "dataset_path" not in given or "dataset_type" in given:
        return []
    suffix = pathlib.Path(given["dataset_path"]).suffix
    kinds = {".jsonl": "jsonl", ".parquet": "parquet"}
    return [f"dataset_type={kinds.get(suffix, 'text')}"]


def validate(values: Mapping[str, Any]) -> Config:
    """Turns values as they come out of YAML into a Config."""
    from pydantic import TypeAdapter, ValidationError

    for name in values:
        _require_key(name)
    lists = {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
    lists |= {
        k: (v,) for k, v in values.items() if k in LISTS_OF_TEXT and isinstance(v, str)
    }
    try:
        return TypeAdapter(Config).validate_python({**values, **lists})
    except ValidationError as error:
        raise UsageError(_first(error.errors()[0], values)) from None


def _first(error: Any, values: Mapping[str, Any]) -> str:
    """Says the first error that pydantic found, in one line."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, UsageError):
        return str(cause)
    name = error["loc"][0]
    given, field = values[name], keys()[name]
    takes = kind(name)
    named = [v for v in takes.split(" | ") if v not in TYPES]
    hint = did_you_mean(given, named, lambda v: f"{name}={v}", "")
    if name == "quantization" and _is_format(given):
        hint = (
            f"{given} is a format of weights, which rules take: write "
            f"quant=\"[{{module_path: 'decoder/.*', weight_qtype: {given}}}]\"."
        )
    return (
        f"{name}={given!s} is not one of its values: it takes {takes} "
        f"({field.metadata['meaning']}). {hint}"
    ).rstrip()


def _is_format(name: Any) -> bool:
    from midtread.numerics.formats import as_format

    try:
        return bool(as_format(name))
    except (TypeError, ValueError):
        return False


def _require_key(name: str, where: str = "") -> None:
    """Refuses a key that does not exist, and says which one may be meant."""
    known = keys()
    if name in known:
        return
    show = lambda n: f"{n!r} ({kind(n)}, now {known[n].default!r})"
    hint = did_you_mean(name, known, show, "`midtread train --help` lists all of them.")
    raise UsageError(f"{where}unknown key {name!r}. {hint}")


def _overrides(words: Sequence[str]) -> dict[str, Any]:
    """Reads `key=value` words."""
    import yaml

    out: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        name = name.lstrip("-")
        _require_key(name)
        require(name not in out, f"{name} is given twice on the command line.")
        takes = kind(name)
        if text in ("null", "None") and "null" in takes:
            out[name] = None
        elif name in LISTS_OF_TEXT and not text.startswith("["):
            out[name] = [text]
        elif takes == "list":
            # Texts stay what they are: [3, yes] is two of them, no number and no truth.
            loader = yaml.BaseLoader if name in LISTS_OF_TEXT else yaml.SafeLoader
            try:
                out[name] = yaml.load(text, loader)
            except yaml.YAMLError:
                raise UsageError(f"{name}={text} does not read as a list.") from None
        else:
            out[name] = text  # pydantic turns it into what the key takes
    return out


def _file(name: str) -> dict[str, Any]:
    """Reads a YAML file, or the shipped config of that name."""
    import yaml
    from omegaconf import OmegaConf

    path = pathlib.Path(name)
    if not path.suffix and not path.exists():
        require(
            name in shipped(),
            f"no shipped config is called {name!r}. {did_you_mean(name, shipped(), str)}",
        )
        path = SHIPPED / f"{name}.yml"
    require(not path.is_dir(), f"{name} is a folder: give a file, {name}/config.yml.")
    require(path.is_file(), f"no such file: {name}.")
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        why = _reason(error)
        raise UsageError(f"{name}{line} does not read as YAML: {why}.") from None
    require(
        isinstance(content, dict),
        f"{name} should hold keys and values, not a {type(content).__name__}.",
    )
    assert isinstance(content, dict)
    for key in content:
        _require_key(str(key), f"{name}: ")
    return content


def _reason(error: Exception) -> str:
    """Returns the few words that YAML or the system has for what is wrong with a file."""
    said = [getattr(error, name, None) for name in ("problem", "reason", "strerror")]
    return next((text for text in said if text), first_line(error))


# --- writing ----------------------------------------------------------------------------------


def save(config: Config, path: pathlib.Path) -> None:
    """Writes every key and value to a file that `load` takes."""
    import yaml

    path.write_text(yaml.safe_dump(plain(config), sort_keys=False))


def plain(config: Config) -> dict[str, Any]:
    """Returns every key and value in types that YAML has."""
    values = {name: getattr(config, name) for name in keys()}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def changed(config: Config) -> dict[str, Any]:
    """Returns the keys that differ from their defaults."""
    return {
        k: v
        for k, v in plain(config).items()
        if getattr(config, k) != keys()[k].default
    }


def manual() -> str:
    """Returns the text of configs/base.yml: every key with its default and meaning."""
    lines = [
        "# Every key there is, at its default. Copy what you change into a file of your",
        "# own (`midtread train mine.yml`), or write it after the command (`steps=50`).",
    ]
    for part in SECTIONS:
        lines += ["", f"# --- {part.__doc__}", ""]
        for field in dataclasses.fields(part):
            value = (
                list(field.default)
                if isinstance(field.default, tuple)
                else field.default
            )
            takes = kind(field.name)
            note = f" ({takes})" if " | " in takes else ""
            words = textwrap.wrap(f"{field.metadata['meaning']}{note}", 86)
            lines += [f"# {line}" for line in words]
            lines.append(f"{field.name}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def help_text() -> str:
    """Returns every key, its default and its meaning, for the terminal."""
    lines = []
    for part in SECTIONS:
        lines += ["", f"{part.__doc__}:"]
        for field in dataclasses.fields(part):
            default = "null" if field.default is None else repr(field.default)
            lines.append(f"  {field.name}={default}  ({kind(field.name)})")
            lines.append(f"      {field.metadata['meaning']}")
    return "\n".join(lines)
