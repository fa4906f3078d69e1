"""Gemma's library, tiny models of its own classes, under `import qwix`. Prints one JSON object.

{model/use: [relative error of the logits against the float model, parameters in codes], or
the name of what was raised}
"""

import json
import warnings

import jax
import jax.numpy as jnp
import qwix
from gemma import gm
from gemma.gm.nn import _config, _modules

warnings.simplefilter("ignore")

LOCAL, GLOBAL = _modules.AttentionType.LOCAL_SLIDING, _modules.AttentionType.GLOBAL
SIZES = {"num_embed": 64, "embed_dim": 32, "hidden_dim": 64, "num_heads": 4, "head_dim": 16,
         "num_kv_heads": 2, "final_logit_softcap": 30.0, "use_post_attn_norm": True,
         "use_post_ffw_norm": True, "attention_types": (LOCAL, GLOBAL),
         "sliding_window_size": 4}  # fmt: skip
MODELS = {
    "gemma2": {"attn_logits_soft_cap": 50.0},
    "gemma3": {
        "use_qk_norm": True,
        "final_logit_softcap": None,
        "transpose_gating_einsum": True,
    },
    "one head": {"num_kv_heads": 1},
}
TOKENS = jnp.arange(8, dtype=jnp.int32).reshape(2, 4) + 1
RULE = {"module_path": ".*", "weight_qtype": "int8"}


def build(fields):
    config = _config.TransformerConfig(**{**SIZES, **fields})
    model = gm.nn.Transformer(config=config, dtype=jnp.float32)
    return model, jax.jit(model.init)(jax.random.key(0), TOKENS)


def served(model, variables):
    model = qwix.quantize_model(
        model, qwix.PtqProvider([qwix.QuantizationRule(**RULE)])
    )
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    return model, {"params": qwix.quantize_params(variables["params"], shapes)}


def trained(model, variables):
    rule = qwix.QtRule(**RULE, act_qtype="int8", bwd_qtype="int8")
    model = qwix.quantize_model(model, qwix.QtProvider([rule]))
    loss = lambda v: jnp.sum(model.apply(v, TOKENS).logits ** 2)
    grads = jax.tree.leaves(jax.jit(jax.grad(loss))(variables))
    assert all(bool(jnp.isfinite(g).all()) for g in grads)
    return model, variables


def adapted(model, variables):
    provider = qwix.LoraProvider(module_path=".*", rank=4, alpha=2.0)
    model = qwix.apply_lora_to_model(model, provider)
    made = jax.jit(model.init)(jax.random.key(1), TOKENS)["params"]
    merge = lambda new, old: (
        {k: merge(v, old[k]) if k in old else v for k, v in new.items()}
        if isinstance(new, dict)
        else old
    )
    return model, {"params": merge(made, variables["params"])}


USES = {"ptq": served, "qt": trained, "lora": adapted}


def run(use, fields):
    model, variables = build(fields)
    wanted = jax.jit(model.apply)(variables, TOKENS).logits
    model, variables = use(model, variables)
    codes = [x for x in jax.tree.leaves(variables) if x.dtype == jnp.int8]
    out = jax.jit(model.apply)(variables, TOKENS).logits
    error = jnp.linalg.norm(out - wanted) / jnp.linalg.norm(wanted)
    return [float(error), len(codes)]


found = {}
for name, fields in MODELS.items():
    for word, use in USES.items():
        try:
            found[f"{name}/{word}"] = run(use, fields)
        except Exception as error:  # noqa: BLE001, it is what is compared
            text = str(error).strip().splitlines() or [""]
            found[f"{name}/{word}"] = f"{type(error).__name__}: {text[0][:200]}"
print(json.dumps(found))
