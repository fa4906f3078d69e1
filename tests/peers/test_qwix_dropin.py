"""Qwix 0.1.8 and what install() puts in its place: one program, two processes."""

import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import peer
import pytest
import tolerances

from midtread.interop.qwix.table import MODULES

peer.load("qwix", "0.1.8")
SCRIPT = pathlib.Path(__file__).with_name("dropin_script.py")
LATER = ("qwix._src.flax_util", "qwix._src.providers.boxed_param")  # not in 0.1.8
NAMES = [f"{m}.{n}" for m, rows in MODULES.items() if m not in LATER for n in rows]

# What a parameter of Qwix's is not here, and why.
NOT_TAKEN = {
    "_qarray_module": "another array type below PTQ: padding needs none here",
    "_dot_general_fn": "another engine below PTQ",
    "_einsum_fn": "another engine below PTQ",
    "_conv_general_dilated_fn": "another engine below PTQ",
    "awq_scale": "here a box has its factors in the QArray's pre_scale",
    "inv_sq_scale": "here a box has its factors in the QArray's pre_scale",
    "padded_shape": "here a QArray knows its extents before padding: logical",
    "original_shape": "the same",
    "contracting_axis": "here pre_scale has the rank of the weight",
}
# Modules whose names other tests run: test_qwix_odml.py, interop/test_qwix_contrib.py.
ELSEWHERE = ("qwix._src.providers.odml_ops",)
ELSEWHERE += tuple(m for m in MODULES if m.startswith("qwix.contrib."))
# Names that the program does not use, and why.
NOT_RUN = {
    "BoxedParamProvider": "newer than 0.1.8",
    "OdmlQatProvider": "tests/providers",
    "OdmlConversionProvider": "tests/providers",
    "ModelType": "an annotation",
    "qarray": "the module, as an attribute of another",
    "__all__": "",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    # one device, and else compiled as the other tests are
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    found = []
    for name, how in (("qwix", []), ("midtread", ["-m", "midtread.interop.qwix"])):
        out = folder / f"{name}.npz"
        command = [sys.executable, *how, str(SCRIPT), str(out), ",".join(NAMES)]
        env = {**os.environ, "XLA_FLAGS": flags}
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, env=env
        )
        assert done.returncode == 0, f"{name}:\n{done.stderr[-3000:]}"
        with np.load(out) as arrays:
            found.append(dict(arrays))
    return found


def test_same_results(runs):
    theirs, ours = ({k: v for k, v in r.items() if k != "signatures"} for r in runs)
    assert sorted(ours) == sorted(theirs)  # cases, structures and dtypes
    exact = set(
        re.findall(r"^@same\n(?:@\w+\n)*def (\w+)", SCRIPT.read_text(), re.MULTILINE)
    )
    assert len(exact) > 8
    for key, expected in theirs.items():
        name, _, dtype = key.split("|")
        if not dtype:
            assert str(ours[key]) == str(expected), key
        else:
            row = "bitwise" if name in exact else "f32_sum"
            tolerances.assert_values(ours[key], expected, row, key)


def test_every_parameter_of_theirs_is_one_of_ours(runs):
    theirs, ours = (json.loads(str(run["signatures"])) for run in runs)
    checked = 0
    for name, expected in theirs.items():
        assert name in ours
        mine = {p[0]: (i, *p[1:]) for i, p in enumerate(ours[name])}
        takes_any = any(p[1] == "VAR_KEYWORD" for p in ours[name])
        for place, (parameter, kind, default) in enumerate(expected):
            if kind.startswith("VAR") or parameter in NOT_TAKEN:
                continue
            if parameter not in mine:
                assert takes_any, (name, parameter)
                continue
            at, my_kind, my_default = mine[parameter]
            if kind == "POSITIONAL_OR_KEYWORD":
                assert at == place and my_kind == kind, (name, parameter)
            assert default == my_default or "something" in (default, my_default), (
                name,
                parameter,
            )
            checked += 1
    assert checked > 200


def test_the_program_uses_every_name():
    text = SCRIPT.read_text()
    for module, rows in MODULES.items():
        for name in rows:
            used = re.search(rf"\b{re.escape(name)}\b", text)
            assert used or name in NOT_RUN or module in LATER + ELSEWHERE, (
                f"{module}.{name}"
            )
