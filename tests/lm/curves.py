"""Twenty steps of training on the synthetic batch, for every value of `quantization`.

`python -m tests.lm.curves [case ...]` writes tests/golden/losses/jax-<minor>.json anew for
the installed JAX, all cases or those named; a change there has to be explained.
"""

import json
import pathlib
import sys

import tests.conftest  # noqa: F401  the flags that tests are compiled with

import jax  # isort: skip

from midtread.lm import build, data, model, quantization, settings, step
from midtread.lm.config import Model, Training, section

FOLDER = pathlib.Path(__file__).parents[1] / "golden" / "losses"
MINOR = ".".join(jax.__version__.split(".")[:2])
PATH = FOLDER / f"jax-{MINOR}.json"
BASE = ["tiny", "dtype=float32", "dataset_type=synthetic", "vocab_size=64", "steps=20"]
BASE += ["learning_rate=0.001"]  # roundings that fall the other way stay small
MORE = {"intmp": ["quant_cfg_path=dense_llm_weight_only_scale"]}
CASES = {
    f"{name or 'float'}{'' if value.route != 'qwix' else ' (qwix)'}": (
        [f"quantization={name}", *MORE.get(name, [])]
        + (["use_qwix_quantization=true"] if value.route == "qwix" else [])
    )
    for name, values in quantization.VALUES.items()
    for value in values
}


def curve(words, prepare=build.for_training, steps=20):
    """The losses of a run; `prepare(config, model)` quantizes it."""
    config = settings.load([*BASE, *words])
    m, t = section(config, Model), section(config, Training)
    net = prepare(config, model.create(m, config.seed))
    state, parts = step.initial(net, t)
    batch = data.held_out(data.splits(config).train, config)[0]
    run = step.make_step(m, t, parts, config.seed)
    losses = []
    for _ in range(steps):
        state, metrics = run(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # optax mixes dtypes
    cases = {"float": [], **CASES}
    golden = json.loads(PATH.read_text()) if sys.argv[1:] else {}
    for name in sys.argv[1:] or cases:
        words = cases[name]
        golden[name] = [round(x, 6) for x in curve(words)]
        print(name, golden[name][0], golden[name][-1], flush=True)
        PATH.write_text(json.dumps(golden, indent=1) + "\n")
