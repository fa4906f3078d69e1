"""tpu-inference's own test of its Qwix rules, read from its wheel, under `import qwix`.

    python tpu_inference_program.py tpu_inference-0.32.0-py3-none-any.whl

What else the package imports (vLLM, its kernels) stands in as mocks: only its module about Qwix
and the test of that are real. Prints one JSON object, {test: "passed", or what went wrong}.
"""

import importlib.machinery
import json
import sys
import types
import unittest
import zipfile
from unittest.mock import MagicMock

NAME = "tpu_inference.models.jax.utils.qwix.qwix_utils"
FILES = {NAME: f"{NAME.replace('.', '/')}.py", "test_qwix": "tests/layers/jax/test_qwix.py"}  # fmt: skip


class Stand(types.ModuleType):
    """A module of which every name is a mock."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock()
        setattr(self, name, value)
        return value


class Finder:
    """Finds stands for all of vLLM and tpu-inference, and the two real files."""

    def __init__(self, wheel):
        self.wheel = wheel

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in ("vllm", "tpu_inference", "test_qwix"):
            return importlib.machinery.ModuleSpec(fullname, self)
        return None

    def create_module(self, spec):
        if spec.name in FILES:
            return types.ModuleType(spec.name)
        return Stand(spec.name)

    def exec_module(self, module):
        if module.__name__ in FILES:
            path = FILES[module.__name__]
            module.__file__ = path
            source = self.wheel.read(path).decode()
            exec(compile(source, path, "exec"), vars(module))  # noqa: S102


sys.meta_path.insert(0, Finder(zipfile.ZipFile(sys.argv[1])))
import test_qwix

result = unittest.TestResult()
tests = unittest.defaultTestLoader.loadTestsFromModule(test_qwix)
names = [test.id() for suite in tests for test in suite]
tests.run(result)
found = dict.fromkeys(names, "passed")
for test, text in [*result.failures, *result.errors]:
    found[test.id()] = text.strip().splitlines()[-1][:200]
print(json.dumps(found))
