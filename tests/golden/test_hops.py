"""A model is not far from its kernels: Python calls and changes of file while tracing a Dense under
QT, forward and backward, as benchmarks/hops.py counts them for an H200 that need not be there.

Where a bound is passed, `python benchmarks/hops.py --by-file` says where the calls are.
"""

import pathlib
import runpy

from midtread.kernels.environment import pretended

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "hops.py"
CALLS, SWITCHES = (
    3_544 // 2,
    1_571 // 2,
)  # half of what there was before kernels were chosen as data


def test_a_dense_under_qt_is_near_to_its_kernels():
    hops = runpy.run_path(str(SCRIPT))
    with pretended("h200"):
        calls, switches = hops["count"](*hops["training"]())
    assert "kernels/scaled_matmul/hopper.py" in calls, "no kernel was reached"
    assert calls.total() <= CALLS, calls.most_common(10)
    assert switches <= SWITCHES
