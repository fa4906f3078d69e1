"""Compare: a quantized checkpoint beside the float one that it was made from.

    loss          of both, on held-out text, in nats per token
    divergence    KL of the quantized model's next token from the float model's: what changed,
                  where a loss may stay the same by luck
    codes         how often each is used in a weight: ends that are full were clipped, codes
                  that nobody has were paid for in vain

The float checkpoint is found by the name that the quantized one was made under
(sizes.json); where it is gone, only codes are left to look at.
"""

import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from midtread.lm import convert, data, huggingface, quantization
from midtread.lm.calibrate import INPUTS
from midtread.lm.config import Config
from midtread.model import flaxlib
from midtread.model.boxes import WithAux
from midtread.numerics.qarray import QArray
from midtread.report import quantized
from midtread.report.html import Section

BARS = (
    32  # of a histogram: formats of 8 bits have more codes than a picture has room for
)


class Compared(NamedTuple):
    """Two models on the same text, in nats per token."""

    source: str
    float_loss: float
    loss: float
    divergence: float
    tokens: int


def compare(path: str, config: Config, model: nnx.Module) -> Compared | None:
    """Judges a quantized model by its float one; None where that is gone.

    Args:
        path: of the quantized checkpoint.
        config: its own.
        model: what it holds.
    """
    source = convert.sizes_of(path)["source"]
    if not pathlib.Path(source).exists():
        return None
    floats = convert.load(quantization.in_float(config), source)
    if huggingface.folder_in(source):
        batches, _ = data.windows(config)
    else:
        batches = data.held_out(data.splits(config).held_out, config)
    sums = [_sums(model, floats, batch) for batch in batches]
    float_loss, loss, far, tokens = (float(sum(part)) for part in zip(*sums))
    return Compared(
        source, float_loss / tokens, loss / tokens, far / tokens, int(tokens)
    )


@nnx.jit
def _sums(model: nnx.Module, floats: nnx.Module, batch: dict[str, Any]):
    """Sums over the tokens that count: both losses, the divergence, and their number."""
    logs = lambda net: jax.nn.log_softmax(
        net(*(batch[k] for k in INPUTS)).logits.astype(jnp.float32)
    )
    ours, theirs = logs(model), logs(floats)
    mask = batch["mask"].astype(jnp.float32)
    loss = lambda x: (
        -jnp.sum(mask * jnp.take_along_axis(x, batch["targets"][..., None], -1)[..., 0])
    )
    far = jnp.sum(mask * jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=-1))
    return loss(theirs), loss(ours), far, jnp.sum(mask)


def sections(path: str, config: Config) -> list[Section]:
    """Returns the parts of a report about a checkpoint; none if it is not a quantized one."""
    if not convert.is_quantized(path):
        return []
    folder = pathlib.Path(path)
    sizes = convert.sizes_of(path)
    model = convert.load(config, path)
    compared = compare(path, config, model)
    return quantized.sections(folder, sizes, compared, codes(model))


def codes(model: nnx.Module) -> dict[str, np.ndarray]:
    """Returns {name of a weight: how often its codes are used, the lowest first}."""
    counts = {}
    for path, module in nnx.iter_modules(model):
        for name, box in vars(module).items():
            array = flaxlib.unbox(box).array if isinstance(box, WithAux) else None
            if isinstance(array, QArray):
                values = np.asarray(array.qvalue.astype(jnp.float32)).ravel()
                bars = min(BARS, 2**array.format.bits)
                counts["/".join(map(str, (*path, name)))] = np.histogram(values, bars)[
                    0
                ]
    return counts
