"""Codes: a published model whose weights are quantized, run as it is.

Where a folder has codes (interop/quantized.py), the model gets boxes with those codes in
place of its kernels, and runs under `PtqProvider`, which multiplies by a box whatever is in
it: any format, any tile, zero points. Nothing is dequantized and rounded again. What is no
kernel (the embedding, norms, biases) is float in the model, so codes there become what they
stand for.

Activations stay in float, unless the folder says that they are quantized in every batch
(compressed-tensors' W8A8 and FP8): then a rule for that module says so, too. Adapters go on
top as on any quantized model (QLoRA): `apply_lora_to_model` with a `LoraProvider` whose rules
have no `weight_qtype`.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from midtread.interop import export
from midtread.lm import model as models
from midtread.lm.build import some_tokens
from midtread.lm.config import Config, Model, section
from midtread.lm.usage import require
from midtread.model import flaxlib
from midtread.model.boxes import WithAux
from midtread.model.quantize import quantize_model
from midtread.model.rules import QuantizationRule
from midtread.numerics import views
from midtread.numerics.qarray import QArray, dequantize
from midtread.numerics.spec import Spec
from midtread.providers.ptq import PtqProvider

KERNELS = ("kernel", "wi_0", "wi_1", "wo")  # parameters that a matmul takes as they are


def formats(model: nnx.Module) -> list[str]:
    """Returns the formats of the codes that a model has, by name."""
    nodes = (node for _, node in nnx.iter_graph(model))
    return sorted({n.how.format.name for n in nodes if isinstance(n, WithAux)})


def has_codes(arrays: Any) -> bool:
    """Whether some of a folder's arrays are quantized (`huggingface.arrays`)."""
    return any(
        export.is_quantized(arrays.source, name) for name in arrays.source.tensors
    )


def load(config: Config, arrays: Any) -> nnx.Module:
    """Returns the model that a folder's arrays amount to, with codes where the folder has them.

    Args:
        config: of the model; without quantization, which the folder has done.
        arrays: `huggingface.arrays` of the folder.

    Raises:
        UsageError: the config asks for quantization of its own.
    """
    given = {k: getattr(config, k) for k in ("quantization", "quant", "group_size")}
    asked = [f"{name}={value}" for name, value in given.items() if value]
    require(
        not asked,
        f"{arrays.source.name} is quantized already: drop {', '.join(asked)}. `midtread "
        "quantize` rounds what its codes stand for anew.",
    )
    model = models.abstract(section(config, Model))
    rules = []
    for path in arrays:
        *inside, name = path.split("/")
        module = flaxlib.value_at(model, tuple(inside))
        param = getattr(module, name)
        array = arrays[path]
        if not isinstance(array, QArray):
            value = jnp.asarray(array).astype(param.dtype)
            setattr(module, name, flaxlib.like(param, value))
            continue
        q = array.map(jnp.asarray)
        if name not in KERNELS:
            setattr(module, name, flaxlib.like(param, dequantize(q, param.dtype)))
            continue
        boxed = WithAux(q, spec_of(q))
        boxed = jax.tree.map(lambda v, param=param: flaxlib.like(param, v), boxed)
        setattr(module, name, boxed)
        rules += _activation_rules(arrays, path)
    provider = PtqProvider(rules)
    return quantize_model(model, provider, some_tokens(config), donate=True)


def spec_of(q: QArray) -> Spec:
    """Returns a Spec that says of a weight what its scales do; axes of a stack are not its
    own."""
    inner = q
    while inner.ndim > 2:
        inner = inner[0]
    tiles = views.tiled_axes(inner)
    own = [a for a, n in enumerate(inner.scale.shape) if n != 1 and a not in tiles]
    method = "absmax" if q.zero_point is None else "minmax"
    return Spec(q.format, tuple(own), tiles, method)


def _activation_rules(arrays: Any, path: str) -> list[QuantizationRule]:
    """Returns a rule for the module of a weight whose activations are quantized, too."""
    known = getattr(arrays.source, "activations", {})
    kinds = {known.get(name) for name in arrays.names(path)}
    kind = kinds.pop()
    if kinds or kind is None:
        return []
    qtype, tile = kind
    module = re.sub(r"/\d+/", "/[0-9]+/", path.rpartition("/")[0])
    return [QuantizationRule(module_path=module, act_qtype=qtype, tile_size=tile)]
