"""The command line: `midtread <verb> [file.yml | shipped config] [key=value ...]`.

Dispatch only: what each verb does is in lm/ and report/. What the user got wrong is one
line and exit code 2.
"""

import sys
from collections.abc import Callable, Sequence

VERBS = {
    "train": "train a language model, or go on with a run",
    "explain": "what would be quantized, in which formats, and why the rest is not",
}


def _train(words: Sequence[str]) -> None:
    from midtread.lm import settings
    from midtread.lm.train import train

    train(settings.load(words))


def _explain(words: Sequence[str]) -> None:
    from midtread.lm import build, settings
    from midtread.lm import model as models
    from midtread.lm.config import Model, section

    config = settings.load(words)
    print(build.coverage(config))
    print(f"quantization: {build.mode(config)}")
    model = models.abstract(section(config, Model))
    print(f"{models.parameters(model):,} parameters")


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "train": _train,
    "explain": _explain,
}


def usage() -> str:
    verbs = "\n".join(f"  {name:<9} {what}" for name, what in VERBS.items())
    return (
        "usage: midtread <verb> [file.yml or a shipped config] [key=value ...]\n\n"
        f"{verbs}\n\n`midtread <verb> --help` lists every key."
    )


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    verb, rest = words[0], words[1:]
    if verb not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(verb, COMMANDS, 1)
        hint = (
            f"Did you mean {near[0]!r}?"
            if near
            else f"There are: {', '.join(COMMANDS)}."
        )
        print(f"error: unknown verb {verb!r}. {hint}", file=sys.stderr)
        return 2
    try:
        from midtread.lm.config import UsageError

        if any(w in ("-h", "--help") for w in rest):
            from midtread.lm import settings

            print(f"midtread {verb}: {VERBS[verb]}\n{settings.help_text()}")
            print(f"\nshipped configs: {', '.join(settings.shipped())}")
            return 0
        COMMANDS[verb](rest)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("midtread", "jax"):
            raise
        print(
            f"error: this needs the package {error.name}: pip install 'midtread[train]'.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint.")
        return 130
    return 0
