"""tpu-inference's own test of its Qwix rules, with Midtread in Qwix's place.

Its wheel holds the test; docs/from-qwix.md says how to get it. vLLM and the rest of the package
are mocks here, under which four of the 36 tests fail on Qwix too.
"""

import os
import sys

from tests.clients.programs import WITH_US, needs, run

WHEEL = os.environ.get("TPU_INFERENCE_WHEEL")

pytestmark = needs("TPU_INFERENCE_WHEEL")


def test_what_passes_on_qwix_passes_here():
    theirs, ours = (
        run(sys.executable, options, "tpu_inference_program.py", str(WHEEL))
        for options in ((), WITH_US)
    )
    passed = [name for name, outcome in theirs.items() if outcome == "passed"]
    assert len(passed) >= 32
    assert not {name: ours[name] for name in passed if ours[name] != "passed"}
