"""A page about runs, whole, killed or called alike."""

import json
import re

import pytest

from midtread.report import run, terminal

LINE = {"step": 0, "loss": 3.0, "tokens_per_second": 10.0}


@pytest.fixture
def folders(tmp_path):
    made = [tmp_path / parent / "a" for parent in ("x", "y")]
    for number, folder in enumerate(made):
        folder.mkdir(parents=True)
        lines = [{**LINE, "step": i, "loss": 3.0 - number - i / 4} for i in range(3)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text)
    return made


def test_a_line_cut_short_by_a_kill_is_not_one(folders):
    path = folders[0] / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "lo')
    assert [line["step"] for line in run.read(path)] == [0, 1, 2]
    assert run.read(path.parent / "nowhere") == []


def test_runs_of_one_name_are_told_apart(folders, tmp_path):
    page = run.write(run.read_runs(folders), tmp_path / "report.html").read_text()
    for folder, loss in zip(folders, ("2.5000", "1.5000")):
        assert f"<td>{folder}</td>" in page and loss in page
    alone = run.write(run.read_runs(folders[:1]), tmp_path / "report.html").read_text()
    assert "<td>a</td>" in alone and "src=" not in alone and "vs first" not in alone


def test_a_run_has_one_held_out_loss(folders, tmp_path):
    """That of the checkpoint as it is served, in place of the last one of the training."""
    path = folders[0] / "metrics.jsonl"
    path.write_text(
        path.read_text() + json.dumps({**LINE, "step": 3, "eval_loss": 2.25})
    )
    (one,) = run.read_runs(folders[:1])
    page = run.write([one], tmp_path / "report.html").read_text()
    assert "2.2500" in page
    served = one._replace(served=run.Served("int4w", 2.125, 1.0, 1234))
    page = run.write([served], tmp_path / "report.html").read_text()
    assert "2.1250" in page and "2.2500" not in page and "1,234" in page


def test_what_differs_comes_first_and_configs_are_folded(folders, tmp_path):
    for folder in folders:
        (folder / "config.yml").write_text("steps: 3\n")
    configs = {"quantization": "int8", "quant": [], "steps": 3}, {
        "quantization": "", "quant": [], "steps": 3}  # fmt: skip
    runs = [
        r._replace(name=name, config=c, text=f"text of {name}")
        for r, name, c in zip(run.read_runs(folders), ("int8", "bf16"), configs)
    ]
    page = run.write(runs, tmp_path / "report.html").read_text()
    titles = re.findall(r"<h2>(.*?)</h2>|<summary>(.*?)</summary>", page)
    assert [a or b for a, b in titles] == [
        "Runs", "Differences", "Gap", "Loss", "Text", "Config of int8", "Config of bf16"
    ]  # fmt: skip
    table = page[page.index("Differences") : page.index("Gap")]
    assert "quantization" in table and "steps" not in table
    assert "minus that of bf16" in page  # the float run, though it is not the first
    assert 'name="viewport"' in page and "<details open" not in page


def test_the_share_of_the_peak_is_in_the_live_line_and_the_page(folders, tmp_path):
    line = {**LINE, "step_seconds": 0.25, "utilization": 0.525}
    assert "10 tok/s  250 ms/step  52.5% of peak" in terminal._now(line)
    (folders[0] / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    page = run.write(run.read_runs(folders[:1]), tmp_path / "report.html").read_text()
    assert "52.5%" in page and "of peak" in page and "tokens/s" in page


def test_a_wide_table_is_not_cut_short(capsys):
    numbers = [str(10**9 + i) for i in range(12)]
    terminal.Terminal().table(*map(str, range(12)), rows=[numbers])
    assert capsys.readouterr().out.splitlines()[1].split() == numbers
