"""A model is not far from its kernels: Python calls and changes of file while tracing a Dense under
QT, forward and backward, as benchmarks/hops.py counts them for an H200 that need not be there.

The script runs in a process of its own, since what other tests have traced or installed adds calls.
Where a bound is passed, `python benchmarks/hops.py --by-file` says where the calls are.
"""

import pathlib
import re
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "hops.py"
# Half of what there was before kernels were chosen as data.
CALLS, SWITCHES = 3_544 // 2, 1_571 // 2


def test_a_dense_under_qt_is_near_to_its_kernels():
    command = [sys.executable, str(SCRIPT), "--by-file"]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    case, by_file = re.search(r"\| QT (.*)\n((?:    .*\n)+)", run.stdout).groups()
    calls, _, switches = (int(x.replace(",", "")) for x in case.split("|")[1:4])
    assert "kernels/scaled_matmul/hopper.py" in by_file, "no kernel was reached"
    assert calls <= CALLS, by_file
    assert switches <= SWITCHES, by_file
