"""Tunix's models, tiny, under `import qwix`: LoRA, QLoRA and PTQ. Prints one JSON object.

{model/use: [relative error of the output against the float model, parameters in codes], or
the name of what was raised}
"""

import dataclasses
import importlib
import json
import warnings

import jax
import jax.numpy as jnp
import qwix
from flax import nnx

warnings.simplefilter("ignore")

SIZES = {"num_layers": 2, "vocab_size": 64, "num_embed": 64, "embed_dim": 32, "hidden_dim": 64,
         "num_heads": 4, "head_dim": 16, "num_kv_heads": 2, "rope_theta": 10_000, "norm_eps": 1e-6,
         "param_dtype": jnp.float32}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen3": ("qwen3", "Qwen3", {}),
    "qwen3-moe": ("qwen3", "Qwen3", EXPERTS),
    "llama3": ("llama3", "Llama3", {}),
    "gemma3": ("gemma3", "Gemma3", {"sliding_window_size": 4}),
    "gemma4": ("gemma4", "Gemma4", {"sliding_window_size": 4, "global_key_size": 16}),
    "gemma4-moe": ("gemma4", "Gemma4", {
        "sliding_window_size": 4, "global_key_size": 16, "enable_moe": True, "expert_dim": 32,
        "moe_dense_hidden_dim": 32, **EXPERTS}),
}  # fmt: skip
PATHS = ".*(q_einsum|kv_einsum|q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|lm_head)"


def build(module, name, fields):
    lib = importlib.import_module(f"tunix.models.{module}.model")
    known = {field.name for field in dataclasses.fields(lib.ModelConfig)}
    fields = {k: v for k, v in {**SIZES, **fields}.items() if k in known}
    model = getattr(lib, name)(lib.ModelConfig(**fields), rngs=nnx.Rngs(0))
    tokens = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
    positions = jnp.tile(jnp.arange(4, dtype=jnp.int32), (2, 1))
    mask = jnp.tril(jnp.ones((2, 4, 4), bool))
    return model, (tokens, positions, None, mask)


def adapted(model, inputs, qtype):
    given = {} if qtype is None else {"weight_qtype": qtype, "tile_size": 16}
    provider = qwix.LoraProvider(module_path=PATHS, rank=4, alpha=2.0, **given)
    names = list(model.get_model_input())
    inputs = dict(zip(names, inputs))
    model = qwix.apply_lora_to_model(model, provider, **inputs, rngs=nnx.Rngs(1))
    graph, factors, rest = nnx.split(model, qwix.LoRAParam if hasattr(qwix, "LoRAParam")
                                     else nnx.LoRAParam, ...)  # fmt: skip

    def loss(factors):
        return jnp.sum(nnx.merge(graph, factors, rest)(**inputs)[0] ** 2)

    grads = jax.tree.leaves(jax.grad(loss)(factors))
    assert grads and all(bool(jnp.isfinite(g).all()) for g in grads)
    return model


def served(model, inputs):
    rules = [qwix.QuantizationRule(module_path=".*", weight_qtype="int8")]
    return qwix.quantize_model(model, qwix.PtqProvider(rules), *inputs)


USES = {
    "lora": lambda model, inputs: adapted(model, inputs, None),
    "qlora": lambda model, inputs: adapted(model, inputs, "int8"),
    "ptq": served,
}


def run(use, module, name, fields):
    model, inputs = build(module, name, fields)
    wanted = model(*inputs)[0]
    model = use(model, inputs)
    codes = [x for x in jax.tree.leaves(nnx.state(model)) if x.dtype == jnp.int8]
    error = jnp.linalg.norm(model(*inputs)[0] - wanted) / jnp.linalg.norm(wanted)
    return [float(error), len(codes)]


found = {}
for name, what in MODELS.items():
    for word, use in USES.items():
        try:
            found[f"{name}/{word}"] = run(use, *what)
        except Exception as error:  # noqa: BLE001, it is what is compared
            text = str(error).strip().splitlines() or [""]
            found[f"{name}/{word}"] = f"{type(error).__name__}: {text[0][:200]}"
print(json.dumps(found))
