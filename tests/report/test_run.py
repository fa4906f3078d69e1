"""A page about runs, whole, killed or called alike."""

import json

import pytest

from midtread.report import run

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
    page = run.of_runs(folders, tmp_path / "report.html").read_text()
    for folder, loss in zip(folders, ("2.5000", "1.5000")):
        assert f"<td>{folder}</td>" in page and loss in page
    alone = run.of_runs(folders[:1], tmp_path / "report.html").read_text()
    assert "<td>a</td>" in alone and "src=" not in alone
