"""The command line: `midtread <verb> [file.yml | shipped config] [key=value ...]`.

Dispatch only: what each verb does is in lm/ and report/. What the user got wrong is one
line and exit code 2. When nobody reads the output any more (`| head`) it ends quietly.
"""

import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

VERBS = {
    "train": "train a language model, or go on with a run",
    "import": "make a run of a published model: midtread import <folder or .gguf>",
    "quantize": "write a quantized checkpoint of a run: midtread quantize runs/a ...",
    "generate": "text from a checkpoint: midtread generate runs/a prompt=...",
    "eval": "held-out loss of checkpoints, side by side: midtread eval runs/a runs/b",
    "export": "weights of a run for others: midtread export runs/a format=hf",
    "report": "one page of runs and checkpoints, or what is in a .tflite file",
    "bench": "time and memory of a training step and of decoding, beside the same in float; "
    "time=train or time=decode batches=1,8 lengths=512,4096 formats=int8w,int4w",
    "explain": "what would be quantized, in which formats, and why the rest is not; "
    "with kernels=true or kernels=h200 also by which kernels; serve=16: a checkpoint that is "
    "served to 16 sequences",
}


def _keep_compiled(folder: str) -> None:
    """Keeps programs that took a second or more to compile for the next command, unless
    JAX's own settings name another folder or turn this off."""
    import jax

    if not folder or jax.config.jax_compilation_cache_dir:
        return
    if jax.config.jax_enable_compilation_cache:
        cache = pathlib.Path(folder).expanduser()
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _refuse_cache(folder, error.strerror or str(error))
            return
        jax.config.update("jax_compilation_cache_dir", str(cache))


def _refuse_cache(folder: str, why: str) -> None:
    """Refuses a folder for compiled programs that was asked for; the one that nobody asked
    for may be missing."""
    from midtread.lm.config import keys
    from midtread.lm.usage import require

    require(
        folder == keys()["jax_cache_dir"].default,
        f"jax_cache_dir={folder}: {why}. Write another folder, or jax_cache_dir= for none.",
    )


def _train(words: Sequence[str]) -> None:
    from midtread.lm import processes, settings
    from midtread.lm.train import train

    config = settings.load(words)
    _keep_compiled(config.jax_cache_dir)
    processes.start()
    try:
        with processes.witness():
            train(config)
    except Exception as error:
        if not processes.is_loss_of_another(error):
            raise
        print(f"error: {processes.LOST}.", file=sys.stderr)
        processes.leave(2)


def _one_checkpoint(words: Sequence[str], otherwise: str) -> tuple[str, Any]:
    """Returns the path and config of the one checkpoint that the words name."""
    from midtread.lm import settings
    from midtread.lm.usage import require

    checkpoints = settings.load_checkpoints(words)
    require(len(checkpoints) == 1, otherwise)
    return checkpoints[0]


def _import(words: Sequence[str]) -> None:
    import time

    from midtread.lm import huggingface
    from midtread.report.terminal import Terminal

    path, config = _one_checkpoint(words, "import takes one folder at a time.")
    started = time.perf_counter()
    imported = huggingface.import_folder(config, path)
    rate = imported.nbytes / (time.perf_counter() - started) / 1e6
    terminal = Terminal()
    terminal.say(
        f"{imported.folder}: {imported.architecture}, {imported.tensors:,} tensors, "
        f"{imported.nbytes:,} bytes, {rate:,.0f} MB/s"
    )
    for note in imported.notes:
        terminal.say(note)


def _quantize(words: Sequence[str]) -> None:
    from midtread.lm import build, convert, settings
    from midtread.lm.usage import require
    from midtread.report.terminal import Terminal

    terminal = Terminal()
    checkpoints = settings.load_checkpoints(words)
    _keep_compiled(checkpoints[0][1].jax_cache_dir)
    one = checkpoints[0][1].save_quantized_params_path
    require(
        not one or len(checkpoints) == 1,
        f"save_quantized_params_path={one} is for one checkpoint, and {len(checkpoints)} "
        "are given: quantize them one by one, or drop it.",
    )
    for path, config in checkpoints:
        folder = convert.quantize(config, path, terminal.say)
        coverage = build.coverage(config, serve=True)
        mode = build.mode(config, serve=True)
        terminal.coverage(mode, build.summary(coverage), coverage.totals)
        (folder / "coverage.txt").write_text(f"{mode}\n\n{coverage}\n")


def _generate(words: Sequence[str]) -> None:
    import jax

    from midtread.lm import checkpoint, convert, decode
    from midtread.lm.generate import generate
    from midtread.lm.tokenizer import tokenizer
    from midtread.report.quantized import note_speed
    from midtread.report.terminal import Terminal

    path, config = _one_checkpoint(words, "generate takes one checkpoint at a time.")
    terminal = Terminal()
    _keep_compiled(config.jax_cache_dir)
    codec = tokenizer(config)
    checkpoint.require_same_tokenizer(path, codec)
    convert.require_room(config, path)
    model = convert.load(config, path)
    if not config.mesh:  # on a mesh, layers are gathered one by one as they are scanned
        model = decode.prepare(model)
    is_chat = bool(codec.chat) and config.use_chat_template
    # The prompt is printed with the first piece: before that comes what is wrong.
    waiting = [config.prompt[0] + ("\n" if is_chat else "")]
    on_text = lambda piece: (
        terminal.stream("".join([*waiting, piece])) or waiting.clear()
    )
    result = generate(model, codec, config, on_text=on_text)
    on_text("\n")
    for text in result.texts[1:]:
        terminal.stream(f"---\n{text}\n")
    terminal.say(
        f"{result.tokens_per_second:,.1f} tokens/s, cache of {result.cache_bytes:,} bytes"
    )
    if convert.is_quantized(path):
        device, rate = jax.devices()[0].device_kind, result.tokens_per_second
        note_speed(pathlib.Path(path), device, rate, len(result.texts))


def _eval(words: Sequence[str]) -> None:
    from midtread.lm import eval as evals
    from midtread.lm import settings
    from midtread.report.terminal import Terminal

    terminal, checkpoints = Terminal(), settings.load_checkpoints(words)
    _keep_compiled(checkpoints[0][1].jax_cache_dir)
    judged = evals.evaluate(checkpoints)
    terminal.table(*evals.COLUMNS, rows=evals.rows(judged))
    for x, (_, config) in zip(judged, checkpoints):
        if x.steps_to_target is not None:
            terminal.say(
                f"{x.name}: target_loss after {x.steps_to_target} steps, "
                f"{x.seconds_to_target:.1f} s"
            )
        elif config.target_loss:
            terminal.say(
                f"{x.name}: no step with target_loss={config.target_loss:g} in its metrics"
            )


def _export(words: Sequence[str]) -> None:
    from midtread.lm import huggingface
    from midtread.report.terminal import Terminal

    path, config = _one_checkpoint(words, "export takes one run at a time.")
    terminal = Terminal()
    terminal.say(f"{huggingface.export(config, path, terminal.say)}")


def _report(words: Sequence[str]) -> None:
    files = [w for w in words if w.endswith(".tflite")]
    for file in files:
        _report_tflite(file)
    if not files or len(files) < len(words):
        _report_runs([w for w in words if w not in files])


def _report_tflite(file: str) -> None:
    from midtread.lm.usage import UsageError, first_line, require
    from midtread.report.tflite import describe

    require(pathlib.Path(file).is_file(), f"no such file: {file}.")
    try:
        print(describe(file))
    except ValueError as error:
        raise UsageError(f"{file}: {first_line(error)}") from None


def _report_runs(words: Sequence[str]) -> None:
    from midtread.lm import eval as evals
    from midtread.lm import settings
    from midtread.report import run
    from midtread.report.terminal import Terminal

    checkpoints = settings.load_checkpoints(words)
    _keep_compiled(checkpoints[0][1].jax_cache_dir)
    first = pathlib.Path(checkpoints[0][0])
    is_folder = len(checkpoints) == 1 and first.is_dir()
    folder = first if is_folder else first.parent
    page = run.write(evals.reported(checkpoints), folder / "report.html")
    Terminal().say(f"report: {page}")


def _bench(words: Sequence[str]) -> None:
    from midtread.lm import bench, settings
    from midtread.report.terminal import Terminal

    asked, words = bench.asked_for(words)
    config, terminal = settings.load(words), Terminal()
    if asked.time != "decode":
        timed = bench.bench(config)
        terminal.table(*bench.COLUMNS, rows=bench.rows(timed))
        for x in timed:
            if x.gathered:
                terminal.say(f"{x.name}\n{x.gathered}")
    if asked.time == "decode" or (asked.time == "all" and not config.mesh):
        decoding = bench.decoding(config, asked)
        terminal.table(*bench.DECODING, rows=bench.decoding_rows(decoding))
        for note in bench.decoding_notes(decoding):
            terminal.say(note)


def _explain(words: Sequence[str]) -> None:
    import contextlib

    from midtread.kernels.environment import pretended
    from midtread.lm import attend, build, mesh, room, settings, stacks
    from midtread.lm import model as models
    from midtread.lm.config import Model, Training, section

    words, options = _options_of_explain(words)
    config = settings.load(words)
    on = mesh.sizes(config.mesh)
    if config.mesh:
        mesh.check(config, on)
    print(build.coverage(config, **options))
    print(f"quantization: {build.mode(config, options.get('serve', False))}")
    model = models.abstract(section(config, Model))
    print(f"{models.parameters(model):,} parameters")
    device = options.get("device")
    if "serve" not in options:
        asked, config = config, room.settle(config, on=on)
        if asked != config:
            print(f"remat_policy=auto: {config.remat_policy} on this machine")
        is_pruned = config.weight_sparsity_n is not None
        facts = {"is_pruned": is_pruned, "is_on_mesh": bool(config.mesh)}
        both = section(config, Model), section(config, Training)
        with pretended(device) if device else contextlib.nullcontext():
            print(stacks.describe(*both, **facts))
            print(attend.describe(section(config, Model), config.batch_size))
    if config.mesh:
        from midtread.lm import memory, roofline

        print(memory.describe(config, on))
        print(roofline.describe(config, on))


def _options_of_explain(words: Sequence[str]) -> tuple[list[str], dict]:
    """Returns the words besides kernels=... and serve=..., and the options of `coverage`
    that those ask for."""
    from midtread.lm.usage import require

    own = {"kernels": "false", "serve": ""}
    pairs = [w.partition("=")[::2] for w in words]
    for name in own:
        times = sum(name == each for each, _ in pairs)
        require(times < 2, f"{name} is given twice on the command line.")
    own |= {name: text for name, text in pairs if name in own}
    others = [w for w, (name, _) in zip(words, pairs) if name not in own]
    options: dict[str, Any] = {}
    if own["kernels"] != "false":
        device = None if own["kernels"] == "true" else own["kernels"]
        options = {"kernels": True, "device": device}
    if own["serve"]:
        rows = own["serve"]
        require(
            rows.isdecimal() and int(rows) > 0,
            f"serve={rows}: a number of sequences, as in serve=16.",
        )
        options |= {"serve": True, "rows": int(rows)}
    return others, options


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "train": _train,
    "import": _import,
    "quantize": _quantize,
    "generate": _generate,
    "eval": _eval,
    "export": _export,
    "report": _report,
    "bench": _bench,
    "explain": _explain,
}


def usage() -> str:
    """Returns the help text: every verb with one line about it."""
    verbs = "\n".join(f"  {name:<9} {what}" for name, what in VERBS.items())
    return (
        "usage: midtread <verb> [file.yml or a shipped config] [key=value ...]\n\n"
        f"{verbs}\n\n`midtread <verb> --help` lists every key."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the words ask for and returns the exit code."""
    try:
        code = _main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if _is_read():  # another pipe broke, which is an error
            raise
        _drop_output()
        return 1


def _is_read() -> bool:
    """Returns whether somebody still reads standard output, by writing an empty line to
    it."""
    try:
        print(flush=True)
    except BrokenPipeError:
        return False
    return True


def _drop_output() -> None:
    """Discards what could not be written, because Python would try to write it again at
    exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _joined(words: Sequence[str]) -> list[str]:
    """Turns `--steps 5`, as other programs have it, into `steps=5`.

    >>> _joined(["tiny", "--steps", "5", "seed=1"])
    ['tiny', 'steps=5', 'seed=1']
    """
    out: list[str] = []
    for word in words:
        before = out[-1] if out else ""
        is_value = "=" not in word and not word.startswith("-")
        if before.startswith("--") and "=" not in before and is_value:
            out[-1] = f"{before[2:]}={word}"
        else:
            out.append(word)
    return out


# What to write where a verb ran out of memory.
LESS = {
    "train": "a smaller batch_size, remat_policy=full or optimizer_states=int8",
    "generate": "fewer decode_slots or max_new_tokens, quantize_kvcache=true, or fewer bits",
}


# What a command that was stopped goes on from, when it is given again.
KEPT = {
    "train": "the last checkpoint",
    "quantize": "the weights that an algorithm has solved",
}


def _out_of_memory(verb: str, error: Exception) -> str:
    """Returns what a device said when its memory was used up, and what would help."""
    from midtread.lm.usage import first_line

    said = first_line(error).rpartition("RESOURCE_EXHAUSTED:")[2].strip().rstrip(".")
    return f"{said}. What would help: {LESS.get(verb, 'a smaller batch_size')}."


def _main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] in ("--version", "-V", "version"):
        from midtread import __version__

        print(f"midtread {__version__}")
        return 0
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            print(f"error: {word!r} is not text in UTF-8: rename it.", file=sys.stderr)
            return 2
    verb, rest = words[0], _joined(words[1:])
    if verb not in COMMANDS:
        from midtread.model.rules import did_you_mean

        hint = did_you_mean(verb, COMMANDS)
        print(f"error: unknown verb {verb!r}. {hint}", file=sys.stderr)
        return 2
    try:
        from midtread.lm.usage import UsageError

        if any(w in ("-h", "--help") for w in rest):
            from midtread.lm import settings

            print(f"midtread {verb}: {VERBS[verb]}\n{settings.help_text()}")
            print(f"\nshipped configs: {', '.join(settings.shipped())}")
            return 0
        from midtread.lm import settings

        settings.require_used(verb, rest)
        COMMANDS[verb](rest)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        package = (error.name or "").split(".")[0]
        if package in ("midtread", "jax", "flax"):
            raise
        advice = "run `pip install '.[train]'` in Midtread's folder."
        what = f"this needs the package {package}: {advice}" if package else error
        print(f"error: {what}", file=sys.stderr)
        return 2
    except OSError as error:  # a folder that cannot be written, a disk that is full
        if error.filename is None or not error.strerror:
            raise
        print(f"error: {error.filename}: {error.strerror}.", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"error: {_out_of_memory(verb, error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        goes_on = (
            f"; the same command goes on from {KEPT[verb]}" if verb in KEPT else ""
        )
        print(f"stopped{goes_on}.")
        return 130
    return 0
