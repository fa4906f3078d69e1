"""Importing a folder of 4 GB: memory, and speed beside plain copying (pytest -m slow)."""

import json
import pathlib
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from midtread.interop import huggingface as hf
from midtread.lm import architectures
from midtread.lm.config import Model

ROOT = pathlib.Path(__file__).parents[1] / "interop" / "fixtures" / "huggingface"
WIDE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128,
        "vocab_size": 4096}  # fmt: skip
IMPORT = """
import resource, sys
from midtread import cli
assert cli.main(["import", sys.argv[1]]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


class Zeros(dict):
    """Tensors of a shape, made when they are written."""

    def about(self, name):
        return dict.__getitem__(self, name)

    def __getitem__(self, name):
        return np.zeros(*self.about(name))


@pytest.mark.slow
def test_a_folder_of_4_gb_is_imported_in_little_memory(tmp_path):
    config = {**json.loads((ROOT / "llama2" / "config.json").read_text()), **WIDE}
    m = Model(**architectures.settings_of(config, "wide"))
    rows = architectures.table(m, architectures.BY_TYPE["llama"])
    whole = hf.Pieces(architectures.shapes(m), rows)
    tensors = Zeros({name: whole.about(name) for name in whole})
    hf.write_tensors(tmp_path / "wide", tensors, config, shard_bytes=10**9)
    size = hf.Folder(tmp_path / "wide").nbytes
    assert size > 4e9
    started = time.perf_counter()
    shutil.copytree(tmp_path / "wide", tmp_path / "copy")
    plain = time.perf_counter() - started
    shutil.rmtree(tmp_path / "copy")
    started = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-c", IMPORT, str(tmp_path / "wide")],
        cwd=tmp_path, check=True, capture_output=True, text=True,
    )  # fmt: skip
    rate = lambda seconds: f"{size / seconds / 1e6:,.0f} MB/s"
    resident = int(run.stdout.split()[-1])
    print(f"copied {rate(plain)}, imported {rate(time.perf_counter() - started)}, "
          f"{resident / 1e6:,.0f} MB resident")  # fmt: skip
    assert resident < 1.5e9
