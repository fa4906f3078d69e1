"""What others make of SmolLM2-135M in few bits, on the chunks that ours is judged by.

    python benchmarks/ptq_peers.py FOLDER ["row" ...] [tune=64] [judge=16] [layers=30]

FOLDER is that of benchmarks/ptq_quality.py. A row is a peer, a format and a method with its
options, in words: "llm-compressor int4/64 gptq observer=memoryless_mse". Without rows all of
ROWS are run. A peer is given the float weights and `tune` chunks of 512 tokens; the model that
it returns is run as it stands on `judge` other chunks, against the float model.

Rows of PyTorch's peers run in a process of their own, on the GPU where torch sees one, by the
python that PEERS_PYTHON names (or this one):

    python -m venv peers && peers/bin/pip install torch llmcompressor auto-round
    PEERS_PYTHON=peers/bin/python python benchmarks/ptq_peers.py FOLDER

Qwix's rows need qwix beside Midtread. The float model is judged in both, so that a difference
between the two programs would show. The column "values" holds the most distinct values in a
group of any weight that the model multiplies with: at most 2 to the number of bits.
"""

import ast
import functools
import os
import pathlib
import re
import subprocess
import sys
import time

import numpy as np
from ptq_formats import FORMATS

HF = {  # of a layer: our name -> transformers', which holds [out, in]
    "self_attention/query/kernel": "self_attn.q_proj",
    "self_attention/key/kernel": "self_attn.k_proj",
    "self_attention/value/kernel": "self_attn.v_proj",
    "self_attention/out/kernel": "self_attn.o_proj",
    "mlp/wi_0/kernel": "mlp.gate_proj",
    "mlp/wi_1/kernel": "mlp.up_proj",
    "mlp/wo/kernel": "mlp.down_proj",
    "pre_self_attention_layer_norm/scale": "input_layernorm",
    "post_self_attention_layer_norm/scale": "post_attention_layernorm",
}
PEERS = ("llm-compressor", "auto-round", "qwix")
HEADER = (
    "| row | perplexity | of float's | KL | values | time |\n|---|---|---|---|---|---|"
)
ROWS = (
    "llm-compressor int4/64 round",
    "llm-compressor int4/64 gptq",
    "llm-compressor int4/64 gptq observer=memoryless_mse",
    "llm-compressor int4/64 gptq observer=imatrix_mse",
    "llm-compressor int4/64 awq",
    "llm-compressor int4/64 awq observer=memoryless_mse",
    "llm-compressor int4/64 awq+gptq",
    "llm-compressor int4/64 spin+gptq",
    "llm-compressor int4 gptq",
    "llm-compressor int4 gptq observer=memoryless_mse",
    "llm-compressor int4 awq",
    "llm-compressor int3/64 gptq",
    "llm-compressor int3/64 gptq observer=memoryless_mse",
    "llm-compressor int3/64 awq",
    "llm-compressor nvfp4 gptq",
    "llm-compressor nvfp4 gptq observer=fouroversix",
    "llm-compressor nvfp4 awq",
    "llm-compressor mxfp4 gptq",
    "llm-compressor mxfp4 awq",
    "llm-compressor w8a8 smooth+round",
    "llm-compressor w8a8 smooth+gptq",
    "auto-round int4/64 iters=0",
    "auto-round int4/64 iters=200",
    "auto-round int4/64 iters=200 enable_alg_ext=True",
    "auto-round int4/64 iters=1000",
    "auto-round int4 iters=200",
    "auto-round int3/64 iters=200",
    "auto-round nvfp4 iters=200",
    "auto-round mxfp4 iters=200",
    "auto-round w8a8 iters=200",
    "qwix int4/64 round",
    "qwix int4/64 awq",
    "qwix int4/64 gptq",
    "qwix int4/64 qep",
    "qwix w8a8 smooth",
)


def options_of(words: list[str]) -> dict:
    """{"iters": 200, "observer": "mse"} of ["iters=200", "observer=mse"]."""
    options: dict = {}
    for word in words:
        name, _, value = word.partition("=")
        is_text = value.replace("_", "").isalpha() and value not in ("True", "False")
        options[name] = value if is_text else ast.literal_eval(value)
    return options


# --- PyTorch's peers --------------------------------------------------------------------------


def torch_model(folder: pathlib.Path):
    """SmolLM2 in transformers, with the float weights that were written for it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with np.load(folder / "float.npz") as file:
        state = {name: torch.from_numpy(file[name]) for name in file.files}
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536,
        num_hidden_layers=sum(name.endswith("q_proj.weight") for name in state),
        num_attention_heads=9, num_key_value_heads=3, head_dim=64, rms_norm_eps=1e-5,
        max_position_embeddings=2048, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    model.load_state_dict(state, strict=True)
    # Peers look for a folder beside the model.
    saved = folder / "transformers"
    if not saved.exists():
        model.save_pretrained(saved)
        tokenizer().save_pretrained(saved)
    return LlamaForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()


def tokenizer():
    """Peers want one; it encodes nothing, since chunks are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    codec = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    return PreTrainedTokenizerFast(tokenizer_object=codec, pad_token="x", eos_token="x")


def llm_compressor(model, form: str, method: str, chunks, device, **options):
    """Transforms and a quantizer, "awq+gptq", in one call of `oneshot`."""
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers import quantization
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.transform import awq, smoothquant, spinquant
    from torch.utils.data import DataLoader

    preset = {"int4/64": "W4A16", "int4": "W4A16", "int3/64": "W3A16", "nvfp4": "NVFP4A16",
              "mxfp4": "MXFP4A16", "w8a8": "W8A8"}[form]  # fmt: skip
    scheme = preset_name_to_scheme(preset, ["Linear"])
    changed = {"strategy": "channel", "group_size": None} if form == "int4" else {}
    if form.endswith("/64"):
        changed = {"group_size": 64}
    if "observer" in options:
        changed["observer"] = options.pop("observer")
    weights = type(scheme.weights)(
        **scheme.weights.model_dump(exclude_unset=True) | changed
    )
    scheme = QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=scheme.input_activations
    )
    *before, last = method.split("+")
    if last == "awq":  # a transform alone, rounded afterwards
        before, last = [*before, last], "round"
    transforms = {
        "awq": awq.AWQModifier,
        "smooth": lambda: smoothquant.SmoothQuantModifier(smoothing_strength=0.5),
        "spin": lambda: spinquant.SpinQuantModifier(transform_block_size=64),
    }
    quantizer = {"round": quantization.QuantizationModifier, "gptq": GPTQModifier}[last]
    recipe = [transforms[name]() for name in before]
    recipe.append(quantizer(config_groups={"all": scheme}, ignore=["lm_head"], **options))  # fmt: skip
    batches = [{"input_ids": c, "attention_mask": c * 0 + 1} for c in chunks.split(8)]
    oneshot(
        model=model.to(device), dataset=DataLoader(batches, batch_size=None), recipe=recipe,
        processor=tokenizer(), num_calibration_samples=len(batches), tie_word_embeddings=False,
    )  # fmt: skip
    return model


def auto_round(model, form: str, chunks, device, **options):
    """Sign descent on rounding and ranges, with float32 throughout."""
    from auto_round import AutoRound

    scheme, changed = {
        "int4/64": ("W4A16", {"group_size": 64}),
        "int4": ("W4A16", {"group_size": -1}),
        "int3/64": ("W3A16", {"group_size": 64}),
        "nvfp4": ("NVFP4", {"act_bits": 16}),
        "mxfp4": ("MXFP4", {"act_bits": 16}),
        "w8a8": ("INT8", {}),
    }[form]
    batches = [{"input_ids": c[None], "attention_mask": c[None] * 0 + 1} for c in chunks]  # fmt: skip
    model, _ = AutoRound(
        model, tokenizer(), scheme=scheme, dataset=batches, nsamples=len(chunks), seqlen=512,
        batch_size=8, device_map=device, **{"amp": False, **changed, **options},
    ).quantize()  # fmt: skip
    return model


def torch_values(model, width: int | None) -> int:
    """The most distinct values that a group of a layer's weight has."""
    import torch

    most = 0
    for name, module in model.named_modules():
        module = getattr(module, "orig_layer", module)  # AutoRound's, with activations
        w = getattr(module, "weight", None)
        if not name.startswith("model.layers") or w is None or w.ndim != 2:
            continue
        scale = getattr(module, "weight_scale", None)
        if scale is not None and hasattr(module, "quantization_scheme"):
            from compressed_tensors.quantization.lifecycle.forward import fake_quantize

            zero = getattr(module, "weight_zero_point", None)
            w = fake_quantize(
                w, scale, zero, module.quantization_scheme.weights,
                global_scale=getattr(module, "weight_global_scale", None),
            )  # fmt: skip
        groups = torch.sort(w.detach().float().reshape(-1, width or w.shape[1]))[0]
        most = max(most, int((groups.diff() > 0).sum(1).max()) + 1)
    return most


def run_torch(folder: pathlib.Path, rows: list[str]) -> None:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    floats = torch_model(folder).to(device)
    with np.load(folder / "chunks.npz") as file:
        tune, others = (torch.from_numpy(file[k].astype(np.int64)) for k in ("tune", "judge"))  # fmt: skip

    @torch.no_grad()
    def judge(model) -> tuple[float, float]:
        sums = []
        for chunk in others.to(device):
            logs, wanted = (
                torch.log_softmax(m(input_ids=chunk[None, :-1]).logits[0].float(), -1)
                for m in (model, floats)
            )
            nll = -logs.gather(1, chunk[1:, None]).mean()
            kl = (wanted.exp() * (wanted - logs)).sum(-1).mean()
            sums.append((nll.item(), kl.item()))
        nll, kl = np.mean(sums, axis=0)
        return float(np.exp(nll)), float(kl)

    best, _ = judge(floats)
    print(f"| float, torch {torch.__version__}, {device} | {best:.3f} | 1 | 0 | | |", flush=True)  # fmt: skip
    for row in rows:
        peer, form, *rest = row.split()
        began = time.time()
        try:
            if peer == "llm-compressor":
                method, *rest = rest
                model = llm_compressor(torch_model(folder), form, method, tune[:, :-1], device, **options_of(rest))  # fmt: skip
            else:
                model = auto_round(torch_model(folder), form, tune[:, :-1], device, **options_of(rest))  # fmt: skip
            seconds = time.time() - began
            model = model.to(device).float().eval()
            perplexity, kl = judge(model)
            values = torch_values(model, FORMATS[form].get("tile_size"))
        except Exception as error:  # a peer that fails leaves the others their turn
            print(f"| {row} | failed: {error!r:.300} | | | | |", flush=True)
            if "PEERS_DEBUG" in os.environ:
                raise
            continue
        print(f"| {row} | {perplexity:.3f} | {perplexity / best:.4f} | {kl:.4f} | {values} | {seconds:.0f} s |", flush=True)  # fmt: skip


# --- Qwix ---------------------------------------------------------------------------------------


@functools.cache
def linen_layer():
    """A layer of SmolLM2 in Linen: QEP takes no other kind of model.

    What its projections read is there for the asking, in the collection "inputs".
    """
    import jax
    import jax.numpy as jnp
    from flax import linen as nn

    def turned(x):  # rotary positions, [batch, tokens, heads, 64]
        angles = jnp.arange(x.shape[1])[:, None] / 100000.0 ** (jnp.arange(32) / 32)
        cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
        a, b = x[..., :32], x[..., 32:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = lambda name, n: nn.Dense(n, use_bias=False, name=name)
            q, k, v = (
                dense(f"{name}_proj", n * 64)(x).reshape(*x.shape[:2], n, 64)
                for name, n in (("q", 9), ("k", 3), ("v", 3))
            )
            y = jax.nn.dot_product_attention(turned(q), turned(k), v, is_causal=True)
            y = y.reshape(*x.shape[:2], 576)
            self.sow("inputs", "qkv", x)
            self.sow("inputs", "o", y)
            return dense("o_proj", 576)(y)

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = lambda name, n: nn.Dense(n, use_bias=False, name=name)
            gate, up = dense("gate_proj", 1536)(x), dense("up_proj", 1536)(x)
            y = nn.silu(gate) * up
            self.sow("inputs", "gate_up", x)
            self.sow("inputs", "down", y)
            return dense("down_proj", 576)(y)

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            norm = lambda name: nn.RMSNorm(1e-5, name=name)
            x = x + Attention(name="self_attn")(norm("input_layernorm")(x))
            return x + Mlp(name="mlp")(norm("post_attention_layernorm")(x))

    return Layer


def linen_model(layers: int, head: bool):
    """SmolLM2 in Linen, with transformers' names."""
    from flax import linen as nn

    class SmolLM2(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(49152, 576, name="embed_tokens")(tokens)
            for i in range(layers):
                x = linen_layer()(name=f"layers_{i}")(x)
            x = nn.RMSNorm(1e-5, name="norm")(x)
            return nn.Dense(49152, use_bias=False, name="lm_head")(x) if head else x

    return SmolLM2()


def linen_params(arrays: dict[str, np.ndarray]) -> dict:
    """Weights under transformers' names as the parameters of `linen_model`."""
    import jax.numpy as jnp

    params: dict = {}
    for name, w in arrays.items():
        name = name.removeprefix("model.").removesuffix(".weight")
        module = params
        for key in re.sub(r"layers\.(\d+)", r"layers_\1", name).split("."):
            module = module.setdefault(key, {})
        leaf = "kernel" if w.ndim == 2 else "scale"
        leaf = "embedding" if name == "embed_tokens" else leaf
        module[leaf] = jnp.asarray(w.T if leaf == "kernel" else w)
    return params


@functools.cache
def block_solver(qtype):
    """A block of columns, one after another, as one program."""
    import jax
    import jax.numpy as jnp
    from qwix.contrib import gptq_core

    def column(i, carry):
        w, codes, errors, scales, inverse = carry
        code, value = gptq_core.quantize(w[:, i], qtype, scales[:, i], None)
        error = (w[:, i] - value) / inverse[i, i]
        later = jnp.where(jnp.arange(w.shape[1]) >= i, inverse[i], 0)
        codes, errors = codes.at[:, i].set(code), errors.at[:, i].set(error)
        return w - jnp.outer(error, later), codes, errors, scales, inverse

    @jax.jit
    def solve(w, scales, inverse):
        start = w, jnp.zeros_like(w, qtype), jnp.zeros_like(w), scales, inverse
        return jax.lax.fori_loop(0, w.shape[1], column, start)[1:3]

    return solve


def compiled_gptq(w, hessian, how, blocksize: int = 128, percdamp: float = 0.01):
    """Qwix's `gptq_core.quantize_weight`, step for step, a block of columns as one program.

    Its own runs every column as a dozen programs of their own, and compiles them for every
    number of columns that are left.
    """
    import jax.numpy as jnp
    from qwix._src.core import qarray
    from qwix.contrib import gptq_core

    columns = w.shape[1]
    group = how.tiled_axes.get(1, columns)
    dead = jnp.diag(hessian) == 0
    damp = percdamp * jnp.mean(jnp.diag(hessian))
    hessian = jnp.where(dead & jnp.eye(columns, dtype=bool), 1.0, hessian)
    hessian = hessian + damp * jnp.eye(columns)
    w = jnp.where(dead, 0.0, w)
    lower = jnp.linalg.cholesky(hessian)
    inverse = jnp.linalg.cholesky(gptq_core.cholesky_inverse(lower), upper=True)

    codes, scales = [], []
    for start in range(0, columns, blocksize):
        end = min(start + blocksize, columns)
        for first in range(-(-start // group) * group, end, group):
            scale, zero = gptq_core.find_params(w[:, first : first + group], how)
            assert zero is None
            scales.append(scale[:, 0])
        of_column = jnp.stack([scales[i // group] for i in range(start, end)], 1)
        code, errors = block_solver(how.qtype)(w[:, start:end], of_column, inverse[start:end, start:end])  # fmt: skip
        w = w.at[:, end:].subtract(errors @ inverse[start:end, end:])
        codes.append(code)
    return qarray.QArray(jnp.concatenate(codes, 1), jnp.stack(scales, 1), None), None


STAGES = {  # of a layer, in QEP's order: what projections read -> which ones do
    ("self_attn", "qkv"): ("q_proj", "k_proj", "v_proj"),
    ("self_attn", "o"): ("o_proj",),
    ("mlp", "gate_up"): ("gate_proj", "up_proj"),
    ("mlp", "down"): ("down_proj",),
}


def layered_qep(params: dict, abstract: dict, rule, tune) -> dict:
    """Qwix's `qep.quantize`, whose stages run one layer each, compiled, and not the model.

    Its own runs the whole model twice for every stage, op by op: 240 times for 30 layers. What
    a stage looks at are inputs of its own layer, and of those before nothing changes any more.
    """
    import jax
    from qwix._src import averaging
    from qwix._src.core import qarray
    from qwix.contrib import calibration, qep, qep_core

    layer, average = linen_layer()(), averaging.SimpleMovingAverage()

    @functools.partial(jax.jit, static_argnums=2)
    def inputs(held, x, place):  # [K, tokens]
        _, seen = layer.apply({"params": held}, x, mutable=["inputs"])
        (found,) = seen["inputs"][place[0]][place[1]]
        return found.reshape(-1, found.shape[-1]).T

    run = jax.jit(lambda held, x: layer.apply({"params": held}, x))
    stats_of = jax.jit(qep_core.compute_qep_stats)
    floats = quantized = params["embed_tokens"]["embedding"][tune]
    made = dict(params)
    for i in range(sum(name.startswith("layers_") for name in params)):
        own = params[f"layers_{i}"]
        held = {name: dict(module) for name, module in own.items()}
        made[f"layers_{i}"] = {name: dict(module) for name, module in own.items()}
        for place, names in STAGES.items():
            stats = stats_of(inputs(held, quantized, place), inputs(own, floats, place))
            stats = average.update(average.init(stats), stats)
            for name in names:
                path = f"layers_{i}", place[0], name, "kernel"
                goal = abstract[path[0]][path[1]][name]["kernel"]
                w = own[path[1]][name]["kernel"]
                context = calibration.extract_calibrated_quant_context(path, w, goal, stats)  # fmt: skip
                assert context is not None
                q = qep._quantize_weight(context, rule, 128, 0.01)
                made[path[0]][path[1]][name] = {"kernel": q}
                held[path[1]][name] = {"kernel": qarray.dequantize(q.array)}
        floats, quantized = run(own, floats), run(held, quantized)
        if i % 5 == 4:
            print(f"qep: {i + 1} layers", file=sys.stderr, flush=True)
    return made


def run_qwix(arrays: dict[str, np.ndarray], tune, others, rows: list[str]) -> None:
    """Rows of Qwix's: "awq", "gptq", "qep", "smooth", "round"; `solver=own` keeps its loops."""
    import jax
    import jax.numpy as jnp
    import qwix
    from qwix._src.core import qarray
    from qwix.contrib import awq, gptq, gptq_core, qep, smooth_quant

    jax.config.update("jax_default_matmul_precision", "highest")
    own = gptq_core.quantize_weight
    layers = sum(name.endswith("q_proj.weight") for name in arrays)
    model, params = linen_model(layers, True), linen_params(arrays)
    headless = linen_model(layers, False)  # enough to calibrate with
    tune, others = jnp.asarray(tune[:, :-1]), jnp.asarray(others)
    batches = [tune[i : i + 8] for i in range(0, len(tune), 8)]

    class PerToken(smooth_quant.SqInferenceProvider):
        """Qwix multiplies floats after smoothing; here codes, with a scale for every token."""

        def _apply_sq_scale(self, lhs, inv_sq_scale):
            lhs = super()._apply_sq_scale(lhs, inv_sq_scale)
            each = qarray.HowToQuantize(qtype="int8", channelwise_axes=(0, 1))
            return qarray.quantize(lhs, each)

    kinds = {  # module, rule, what watches, what serves
        "awq": (awq, awq.AwqRule, awq.AwqCalibrationProvider, awq.AwqInferenceProvider),
        "gptq": (gptq, gptq.GptqRule, gptq.GptqCalibrationProvider, qwix.PtqProvider),
        "smooth": (smooth_quant, smooth_quant.SqRule, smooth_quant.SqCalibrationProvider, PerToken),
    }  # fmt: skip

    def quantized(form: str, method: str, solver: str):
        rule = {"module_path": ".*_proj", **FORMATS[form]}
        plain = qwix.quantize_model(model, qwix.PtqProvider([qwix.QuantizationRule(**rule)]))  # fmt: skip
        if method == "qep" and solver == "own":
            # One batch: it runs the whole model twice for every batch of every stage.
            made = qep.quantize(
                headless, [tune], [qep.QepRule(**rule)], variables={"params": params},
                allow_extra_params=True,
            )  # fmt: skip
            return plain, params | made.params  # with the head
        abstract = jax.eval_shape(plain.init, jax.random.key(0), tune[:1])["params"]
        if method == "qep":
            return plain, layered_qep(params, abstract, qep.QepRule(**rule), tune)
        if method == "round":
            return plain, qwix.quantize_params(params, abstract)
        module, kind, watches, serves = kinds[method]
        watched = qwix.quantize_model(headless, watches([kind(**rule)]))
        step = jax.jit(functools.partial(watched.apply, mutable=["quant_stats"]))
        stats: dict = {}
        for batch in batches:
            _, stats = step({"params": params, **stats}, batch)
        solved = module.quantize_params(params, abstract, stats["quant_stats"])
        return qwix.quantize_model(model, serves([kind(**rule)])), solved

    @functools.partial(jax.jit, static_argnums=0)
    def logs(net, held, chunk):
        return jax.nn.log_softmax(net.apply({"params": held}, chunk[None, :-1])[0])

    def judge(net, held) -> tuple[float, float]:
        sums = []
        for chunk in others:
            found, wanted = logs(net, held, chunk), logs(model, params, chunk)
            nll = -jnp.mean(jnp.take_along_axis(found, chunk[1:, None], 1))
            kl = jnp.mean(jnp.sum(jnp.exp(wanted) * (wanted - found), -1))
            sums.append((nll.item(), kl.item()))
        nll, kl = np.mean(sums, axis=0)
        return float(np.exp(nll)), float(kl)

    best, _ = judge(model, params)
    print(f"| float, jax {jax.__version__}, {jax.devices()[0].device_kind} | {best:.3f} | 1 | 0 | | |", flush=True)  # fmt: skip
    for row in rows:
        _, form, method, *rest = row.split()
        solver = options_of(rest).get("solver", "compiled")
        gptq_core.quantize_weight = own if solver == "own" else compiled_gptq
        began = time.time()
        try:
            net, held = quantized(form, method, solver)
            jax.block_until_ready(held)
            seconds = time.time() - began
            perplexity, kl = judge(net, held)
        except Exception as error:  # a peer that fails leaves the others their turn
            print(f"| {row} | failed: {error!r:.300} | | | | |", flush=True)
            if "PEERS_DEBUG" in os.environ:
                raise
            continue
        print(f"| {row} | {perplexity:.3f} | {perplexity / best:.4f} | {kl:.4f} | | {seconds:.0f} s |", flush=True)  # fmt: skip


# --- the table --------------------------------------------------------------------------------


def exported(model, layers: int) -> dict[str, np.ndarray]:
    """Our float weights, under transformers' names and in its layout."""
    from flax import nnx

    flat = {"/".join(map(str, p)): np.asarray(v.get_value()) for p, v in nnx.to_flat_state(nnx.state(model))}  # fmt: skip
    arrays = {
        "model.embed_tokens.weight": flat["token_embedder/embedding"],
        "model.norm.weight": flat["decoder/decoder_norm/scale"],
        "lm_head.weight": flat["decoder/logits_dense/kernel"].T,
    }
    for layer in range(layers):
        for ours, theirs in HF.items():
            w = flat[f"decoder/layers/{layer}/{ours}"]
            arrays[f"model.layers.{layer}.{theirs}.weight"] = w.T
    return {name: np.ascontiguousarray(w) for name, w in arrays.items()}


def main(words: list[str]) -> None:
    import tempfile

    import smollm2

    folder, *words = words
    rows = [w for w in words if " " in w] or list(ROWS)
    settings = dict(w.split("=") for w in words if " " not in w)
    tune, others = smollm2.chunks(pathlib.Path(folder))
    tune = tune[: int(settings.pop("tune", 64))]
    others = others[: int(settings.pop("judge", 16))]
    layers = int(settings.pop("layers", 30))
    if settings:
        raise SystemExit(f"no such settings: {settings}.")
    for row in rows:  # a typing error is told before anything is run
        peer, form, *_ = row.split()
        formats = [name for name in FORMATS if name != "w4a8/64"]  # no peer's recipe
        if peer not in PEERS or form not in formats:
            raise SystemExit(f"{row!r}: peers are {PEERS}, formats {formats}.")
        if peer == "qwix" and not set(row.split()[3:]) <= {"solver=own"}:
            raise SystemExit(f"{row!r}: qwix has one option, 'solver=own'.")
    print(f"{len(tune)} chunks to calibrate, {len(others)} to judge\n{HEADER}", flush=True)  # fmt: skip
    arrays = exported(smollm2.load(pathlib.Path(folder)), layers)
    if torches := [row for row in rows if not row.startswith("qwix ")]:
        with tempfile.TemporaryDirectory() as name:
            np.savez(pathlib.Path(name, "float.npz"), **arrays)
            np.savez(pathlib.Path(name, "chunks.npz"), tune=tune, judge=others)
            python = os.environ.get("PEERS_PYTHON", sys.executable)
            subprocess.run([python, __file__, "--torch", name, *torches], check=True)
    if qwixes := [row for row in rows if row.startswith("qwix ")]:
        run_qwix(arrays, tune, others, qwixes)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--torch"]:
        run_torch(pathlib.Path(sys.argv[2]), sys.argv[3:])
    else:
        main(sys.argv[1:])
