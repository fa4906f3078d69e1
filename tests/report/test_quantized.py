"""The page about a quantized checkpoint: what it says, and what it says where things lack."""

from midtread.algorithms.report import Report, Row
from midtread.report import html, quantized

SIZES = {"source": "runs/a", "float_bytes": 4000, "bytes": 1000, "bytes_on_disk": 1100}
ROWS = (
    Row("up/kernel", "dot_general", "int4/32", 512, 0.01, 0.05),
    Row("experts[1]", "ragged_dot", "int4", 90, 0.2, 0.3, "experts [2] saw few tokens"),
)
REPORT = Report(ROWS, ("gptq", "learn"), "quantized", "all the same", 3.0, (0.4, 0.1))


class Compared:
    source, tokens = "runs/a", 1234
    float_loss, loss, divergence = 2.0, 2.1, 0.0712


def page(tmp_path, compared):
    parts = quantized.sections(tmp_path, SIZES, compared, {"up/kernel": [1, 9, 2]})
    return html.write(tmp_path / "page.html", "a", parts).read_text()


def test_a_report_is_read_as_it_was_written(tmp_path):
    quantized.write(tmp_path, REPORT)
    assert quantized.read(tmp_path) == REPORT
    assert quantized.read(tmp_path / "elsewhere") is None


def test_the_page_says_what_it_cost(tmp_path):
    quantized.write(tmp_path, REPORT)
    text = page(tmp_path, Compared)
    for part in ("7.389", "8.166", "0.0712", "1,234", "4,000", "1,100", "0.05",
                 "from 0.4 to 0.1", "experts [2] saw few tokens"):  # fmt: skip
        assert part in text, part
    assert text.index("Among the worst: experts[1]") < text.index("worst: up/kernel")
    assert text.count("<rect") == 3  # of the weight whose codes are known
    assert "http" not in text  # the page links to nothing


def test_what_is_not_there_is_said(tmp_path):
    text = page(tmp_path, None)
    assert "The float checkpoint runs/a is gone" in text
    assert "Every weight was rounded to nearest" in text


def test_speed_is_that_which_was_measured(tmp_path):
    assert "Not measured" in page(tmp_path, None)
    for rate in (3.0, 1234.5):
        quantized.note_speed(tmp_path, "NVIDIA H200", rate, 4)
    quantized.note_speed(tmp_path, "cpu", 7.5, 1)
    text = page(tmp_path, None)
    assert "Not measured" not in text and ">3.0<" not in text
    for part in ("NVIDIA H200", "1,234.5", "7.5"):
        assert part in text, part
    # As a process that was ended leaves it.
    (tmp_path / quantized.SPEED).write_text("{")
    assert "Not measured" in page(tmp_path, None)
    quantized.note_speed(tmp_path, "cpu", 8.5, 1)
    assert "8.5" in page(tmp_path, None)
    # Where nothing can be written.
    quantized.note_speed(tmp_path / "none", "cpu", 8.5, 1)
