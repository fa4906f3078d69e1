"""What others make of SmolLM2-135M in 4 bits, on the same chunks, judged by the same code.

    python benchmarks/ptq_peers.py FOLDER ["row" ...] [tune=64] [judge=16] [limit=1800]

FOLDER is that of benchmarks/ptq_quality.py. Without rows, all of ROWS are run. A row with a
peer of PyTorch's runs in an environment of its own, whose python PEERS_PYTHON names:

    python -m venv peers && peers/bin/pip install torch==2.13.0 llmcompressor auto-round
    PEERS_PYTHON=peers/bin/python python benchmarks/ptq_peers.py FOLDER

Qwix's rows need qwix 0.1.8 beside Midtread. A peer gets the float weights and `tune` chunks of
512 tokens, and gives back what its codes stand for; those weights are put into our float model
and judged on `judge` other chunks, as benchmarks/ptq_quality.py judges ours, so that no
difference of code counts. All rows are weights alone: none has quantized activations.
A row that takes more than `limit` seconds is ended and said to be.
"""

import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np

LAYERS = 30
HF = {  # of a layer: our name -> transformers', both of [in, out] and [out, in]
    "self_attention/query/kernel": "self_attn.q_proj",
    "self_attention/key/kernel": "self_attn.k_proj",
    "self_attention/value/kernel": "self_attn.v_proj",
    "self_attention/out/kernel": "self_attn.o_proj",
    "mlp/wi_0/kernel": "mlp.gate_proj",
    "mlp/wi_1/kernel": "mlp.up_proj",
    "mlp/wo/kernel": "mlp.down_proj",
}
NORMS = {
    "pre_self_attention_layer_norm/scale": "input_layernorm",
    "post_self_attention_layer_norm/scale": "post_attention_layernorm",
}
GROUP = 64


# --- peers of PyTorch's, in their own environment ---------------------------------------------


def torch_model(folder: pathlib.Path):
    """SmolLM2 in transformers, with the float weights that were written for it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=LAYERS,
        num_attention_heads=9, num_key_value_heads=3, head_dim=64, rms_norm_eps=1e-5,
        max_position_embeddings=2048, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    with np.load(folder / "float.npz") as file:
        state = {name: torch.from_numpy(file[name]) for name in file.files}
    model.load_state_dict(state, strict=True)
    # Peers look for a folder beside the model.
    model.save_pretrained(folder / "transformers")
    tokenizer().save_pretrained(folder / "transformers")
    return LlamaForCausalLM.from_pretrained(
        folder / "transformers", dtype=torch.float32
    ).eval()


def tokenizer():
    """Peers want one; it encodes nothing, since chunks are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    codec = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    return PreTrainedTokenizerFast(tokenizer_object=codec, pad_token="x", eos_token="x")


def batches(chunks: np.ndarray) -> list[dict]:
    import torch

    ids = [torch.from_numpy(row[None, :-1].astype(np.int64)) for row in chunks]
    return [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids]


def llm_compressor(model, chunks: np.ndarray, modifiers: list) -> None:
    from llmcompressor import oneshot
    from torch.utils.data import DataLoader

    data = DataLoader(batches(chunks), batch_size=None)
    oneshot(model=model, dataset=data, recipe=modifiers, processor=tokenizer(),
            num_calibration_samples=len(chunks), tie_word_embeddings=False)  # fmt: skip


def _scheme(symmetric: bool = True) -> dict:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(
        num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=GROUP
    )
    return {"group_0": QuantizationScheme(targets=["Linear"], weights=args)}


def llmcompressor_gptq(model, chunks) -> None:
    from llmcompressor.modifiers.gptq import GPTQModifier

    llm_compressor(
        model, chunks, [GPTQModifier(config_groups=_scheme(), ignore=["lm_head"])]
    )


def llmcompressor_awq(model, chunks) -> None:
    from llmcompressor.modifiers.awq import AWQModifier

    llm_compressor(
        model, chunks, [AWQModifier(config_groups=_scheme(), ignore=["lm_head"])]
    )


def auto_round(model, chunks, iters: int) -> None:
    from auto_round import AutoRound

    rounding = AutoRound(
        model, tokenizer(), scheme="W4A16", bits=4, group_size=GROUP, sym=True,
        dataset=batches(chunks), iters=iters, nsamples=len(chunks), seqlen=512, batch_size=1,
        device_map="cpu", low_gpu_mem_usage=False,
    )  # fmt: skip
    rounding.quantize()


TORCH = {
    "llm-compressor gptq": llmcompressor_gptq,
    "llm-compressor awq": llmcompressor_awq,
    "auto-round rtn": lambda model, chunks: auto_round(model, chunks, 0),
    "auto-round 50 steps": lambda model, chunks: auto_round(model, chunks, 50),
    "auto-round 200 steps": lambda model, chunks: auto_round(model, chunks, 200),
    "transformers": lambda model, chunks: None,  # the float weights: a check of the way
}


def run_torch(row: str, folder: pathlib.Path, tune: int) -> None:
    """Writes the weights that a peer's codes stand for, and how long it took."""
    import torch

    model = torch_model(folder)
    with np.load(folder / "chunks.npz") as file:
        chunks = file["tune"][:tune]
    began = time.time()
    TORCH[row](model, chunks)
    seconds = time.time() - began
    arrays = {}
    for name, module in model.named_modules():
        if (
            not name.startswith("model.layers")
            or getattr(module, "weight", None) is None
        ):
            continue
        w = module.weight
        scale = getattr(module, "weight_scale", None)
        if (
            scale is not None and w.ndim == 2
        ):  # frozen scales; the weight may be float still
            from compressed_tensors.quantization.lifecycle.forward import fake_quantize

            args = module.quantization_scheme.weights
            zero = getattr(module, "weight_zero_point", None)
            w = fake_quantize(w, scale, zero, args, g_idx=getattr(module, "weight_g_idx", None))  # fmt: skip
        arrays[f"{name}.weight"] = w.detach().to(torch.float32).numpy()
    np.savez(folder / "out.npz", **arrays)
    (folder / "seconds.json").write_text(json.dumps(seconds))


# --- Qwix, beside us --------------------------------------------------------------------------


def qwix_params(row: str, model, chunks, limit: float):
    """{path: what Qwix's codes stand for}."""
    import jax
    import jax.numpy as jnp
    import qwix
    from flax import nnx
    from qwix.contrib import awq, gptq

    kind, provider = {
        "qwix gptq": (gptq.GptqRule, gptq.GptqCalibrationProvider),
        "qwix awq": (awq.AwqRule, awq.AwqCalibrationProvider),
    }[row]
    where = {"module_path": "decoder/layers/.*", "weight_qtype": "int4", "tile_size": GROUP}  # fmt: skip
    tokens = jnp.asarray(chunks[:1, :-1])
    watched = qwix.quantize_model(model, provider([kind(**where)]), tokens)
    step = nnx.jit(lambda net, x: net(x).logits[0, 0, 0])
    for chunk in chunks:
        step(watched, jnp.asarray(chunk[None, :-1]))
    stats = nnx.to_pure_dict(nnx.state(watched, qwix.QuantStat))
    served = qwix.quantize_model(model, qwix.PtqProvider([qwix.QuantizationRule(**where)]), tokens)  # fmt: skip
    began = time.time()
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    out = {}
    # A layer at a time, so that one that is too slow is known to be.
    for number in range(LAYERS):
        key = next(k for k in params["decoder"]["layers"] if str(k) == str(number))
        part = {"decoder": {"layers": {key: params["decoder"]["layers"][key]}}}
        quantize = (gptq if row == "qwix gptq" else awq).quantize_params
        solved = jax.block_until_ready(quantize(part, served, stats))
        for path, w in _dequantized(solved["decoder"]["layers"][key]).items():
            out[f"{number}/{path}"] = w
        used = time.time() - began
        if used > limit:
            rest = used / (number + 1) * LAYERS
            raise TimeoutError(f"{number + 1} of {LAYERS} layers in {used:.0f} s: all would take {rest:.0f} s")  # fmt: skip
    return out


def _dequantized(tree, path: str = "") -> dict[str, np.ndarray]:
    """{path: weight} of a layer's boxes."""
    if "array" in tree:
        array = tree["array"]
        codes = np.asarray(array["qvalue"]).astype(np.float32)
        scale = np.asarray(array["scale"]).astype(np.float32)
        w = codes * np.repeat(scale, codes.shape[0] // scale.shape[0], axis=0)
        if "awq_scale" in tree:
            w = w / np.asarray(tree["awq_scale"]).reshape(-1, 1)
        return {path: w}
    found: dict[str, np.ndarray] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _dequantized(value, f"{path}/{key}".strip("/"))
    return found


# --- the table --------------------------------------------------------------------------------


def put(model, weights: dict[str, np.ndarray]):
    """Our float model with other weights, by our paths below decoder/layers."""
    import jax.numpy as jnp
    from flax import nnx

    model = nnx.clone(model)
    graph, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    for name, w in weights.items():
        path = ("decoder", "layers", *name.split("/"))
        path = next(p for p in flat if tuple(map(str, p)) == path)
        flat[path] = flat[path].replace(jnp.asarray(w))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def exported(model, folder: pathlib.Path, tune: np.ndarray) -> None:
    """What a peer of PyTorch's reads: weights under transformers' names, and chunks."""
    from flax import nnx

    flat = {"/".join(map(str, p)): np.asarray(v.get_value()) for p, v in nnx.to_flat_state(nnx.state(model))}  # fmt: skip
    arrays = {
        "model.embed_tokens.weight": flat["token_embedder/embedding"],
        "model.norm.weight": flat["decoder/decoder_norm/scale"],
        "lm_head.weight": flat["decoder/logits_dense/kernel"].T,
    }
    for layer in range(LAYERS):
        for ours, theirs in HF.items():
            w = flat[f"decoder/layers/{layer}/{ours}"]
            arrays[f"model.layers.{layer}.{theirs}.weight"] = w.T
        for ours, theirs in NORMS.items():
            w = flat[f"decoder/layers/{layer}/{ours}"]
            arrays[f"model.layers.{layer}.{theirs}.weight"] = w
    folder.mkdir(exist_ok=True)
    np.savez(folder / "float.npz", **{k: np.ascontiguousarray(v) for k, v in arrays.items()})  # fmt: skip
    np.savez(folder / "chunks.npz", tune=tune)


def from_torch(folder: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(folder / "out.npz") as file:
        weights = {
            f"{layer}/{ours}": file[f"model.layers.{layer}.{theirs}.weight"].T
            for layer in range(LAYERS)
            for ours, theirs in HF.items()
        }
        # AWQ folds its factors into norms.
        return weights | {
            f"{layer}/{ours}": file[f"model.layers.{layer}.{theirs}.weight"]
            for layer in range(LAYERS)
            for ours, theirs in NORMS.items()
        }


QWIX = ("qwix awq", "qwix gptq")
ROWS = (*(row for row in TORCH if row != "transformers"), *QWIX)
NOT_RUN = {
    "qwix qep": "it takes Linen models alone, and this one is of NNX; its solver is that of "
    "qwix gptq, a column at a time",
    "qwix smooth_quant": "its inference multiplies floats; int8 activations are not its own",
}


def main(words: list[str]) -> None:
    import jax
    import ptq_quality
    import smollm2

    jax.config.update("jax_default_matmul_precision", "highest")
    settings = dict(w.split("=") for w in words if "=" in w)
    folder, *rows = [w for w in words if "=" not in w]
    tune, others = smollm2.chunks(pathlib.Path(folder))
    tune = tune[: int(settings.get("tune", 64))]
    others = others[: int(settings.get("judge", 16))]
    limit = float(settings.get("limit", 1800))
    rows = rows or [*ROWS, *NOT_RUN]
    unknown = [row for row in rows if row not in (*TORCH, *QWIX, *NOT_RUN)]
    if unknown:
        raise SystemExit(f"no such rows: {unknown}. There are: {[*TORCH, *QWIX]}.")
    floats = smollm2.load(pathlib.Path(folder))
    work = pathlib.Path(folder) / "peers"
    exported(floats, work, tune)
    best, _ = ptq_quality.judge(floats, floats, others)
    print(
        f"{len(tune)} chunks to calibrate, {len(others)} to judge; int4 groups of {GROUP}"
    )
    print("| peer | perplexity | of float's | KL | time |\n|---|---|---|---|---|")
    print(f"| float | {best:.3f} | 1 | 0 | |", flush=True)
    for row in rows:
        if row in NOT_RUN:
            print(f"| {row} | not run: {NOT_RUN[row]} | | | |", flush=True)
            continue
        began = time.time()
        try:
            if row in TORCH:
                python = os.environ.get("PEERS_PYTHON")
                if python is None:
                    raise ValueError("PEERS_PYTHON is not set")
                args = [python, __file__, "--peer", row, str(work), str(len(tune))]
                done = subprocess.run(args, timeout=limit, check=False, capture_output=True, text=True)  # fmt: skip
                if done.returncode:
                    raise RuntimeError(done.stderr.strip().splitlines()[-1])
                seconds = json.loads((work / "seconds.json").read_text())
                weights = from_torch(work)
            else:
                weights = qwix_params(row, floats, tune, limit)
                seconds = time.time() - began
        except (subprocess.TimeoutExpired, TimeoutError) as error:
            print(f"| {row} | ended: {str(error)[-120:]} | | | |", flush=True)
            continue
        except (ValueError, RuntimeError, ImportError, TypeError) as error:
            print(f"| {row} | failed: {str(error)[:200]} | | | |", flush=True)
            continue
        perplexity, kl = ptq_quality.judge(put(floats, weights), floats, others)
        print(f"| {row} | {perplexity:.3f} | {perplexity / best:.4f} | {kl:.4f} | {seconds:.0f} s |", flush=True)  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        run_torch(sys.argv[2], pathlib.Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main(sys.argv[1:])
