"""install(): what resolves to what, and what is said where nothing does."""

import importlib
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import midtread as mt
from midtread.interop import qwix as place
from midtread.interop.qwix import matmuls, models, passes
from midtread.interop.qwix.models import _find_param, hook, replace_find_param
from midtread.interop.qwix.table import LINKS, MODULES
from midtread.numerics.qarray import calibrate
from midtread.numerics.spec import Spec


@pytest.fixture
def installed(monkeypatch):
    """Our Qwix in this process, and whatever was there before put back."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "qwix"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    place.install()
    yield importlib.import_module("qwix")
    replace_find_param(None)
    hook(is_installed=False)
    for name in [n for n in sys.modules if n.partition(".")[0] == "qwix"]:
        del sys.modules[name]


def test_every_row_leads_somewhere(installed):
    for path, rows in MODULES.items():
        module = importlib.import_module(path)
        assert [name for name in rows if not hasattr(module, name)] == [], path
    for path, row in LINKS.items():
        assert callable(place._ours(row, path))


def test_the_names_are_ours(installed):
    assert installed.QArray is mt.QArray and installed.QtProvider is mt.QtProvider
    assert importlib.import_module("qwix.pallas").QArray is mt.QArray
    assert installed.__version__ == "0.1.8"
    place.install()  # again: nothing changes
    assert importlib.import_module("qwix") is installed


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwix.QtProvder", "no 'QtProvder' here. The nearest is 'QtProvider'"),
        ("qwix._src.core.qarray.quantize_apy", "The nearest is 'quantize_api'"),
        ("qwix._src.core.qarry", "The nearest is 'qarray'"),
        ("qwix._src.core.pallas.get_symmetric_bond", "core.numerics.get_symmetric_bound"),
        ("qwix._src.zzz", "There are: aux_data, averaging, core"),
    ],
)  # fmt: skip
def test_unknown_names(installed, name, said):
    parent, _, attribute = name.rpartition(".")
    with pytest.raises(AttributeError) as error:
        getattr(importlib.import_module(parent), attribute)
    assert said in str(error.value)


def test_unknown_modules(installed):
    with pytest.raises(
        ModuleNotFoundError, match="nearest is qwix._src.core.einsum_info"
    ):
        importlib.import_module("qwix._src.core.einsum_infos")
    with pytest.raises(ImportError):
        from qwix._src.core import nothing  # noqa: F401  # pyright: ignore


def test_replacing_a_name_reaches_us_or_is_said(installed):
    util = importlib.import_module("qwix._src.utils.flax_util")
    original = util.find_param
    util.find_param = lambda x, kind=None: "found"
    assert mt.QtProvider([]).find_param(None, None) == "found"
    util.find_param = original
    assert mt.QtProvider.find_param is _find_param
    qarray = importlib.import_module("qwix._src.core.qarray")
    with pytest.warns(UserWarning, match="does not ask for it"):
        qarray.dequantize = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qarray.compute_scale_zero_point = lambda *_: (_ for _ in ()).throw(KeyError)
    how = qarray.HowToQuantize(qtype="int8")
    with pytest.raises(KeyError):
        qarray.quantize(mt.dequantize(mt.quantize(_ones(), "int8")), how)


def _ones():
    import jax.numpy as jnp

    return jnp.ones((2, 2))


class Tied(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(16, 8, rngs=nnx.Rngs(0))
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(1))

    def __call__(self, ids):
        return self.embed.attend(self.linear(self.embed(ids)))


class LinenTied(nn.Module):
    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(16, 8)
        return embed.attend(nn.Dense(8)(embed(ids)))


def quantized_names():
    """Which weights of tied models a rule for all reaches."""
    rules, ids = [mt.QuantizationRule(weight_qtype="int8")], jnp.arange(4)
    nnx_model = mt.quantize_model(Tied(), mt.PtqProvider(rules), ids)
    linen = mt.quantize_model(LinenTied(), mt.PtqProvider(rules))
    params = jax.eval_shape(linen.init, jax.random.key(0), ids)["params"]
    held = {"embed": nnx_model.embed.embedding, "linear": nnx_model.linear.kernel}
    held |= {name: next(iter(own.values())) for name, own in params.items()}
    held |= {"Dense_0": params["Dense_0"]["kernel"]}
    return {name for name, value in held.items() if isinstance(value, mt.WithAux)}


def test_tied_embeddings_stay_float_under_the_drop_in_alone(installed):
    assert quantized_names() == {"linear", "Dense_0"}
    hook(is_installed=False)
    assert quantized_names() == {"linear", "Dense_0", "embed", "Embed_0"}


def test_how_to_quantize_is_checked_in_use(installed):
    qarray = importlib.import_module("qwix._src.core.qarray")
    how = qarray.HowToQuantize(qtype="int8", calibration_method="max")
    with pytest.raises(ValueError, match="unknown calibration 'max'"):
        qarray.calibrate(jnp.ones((2, 2)), how)


def test_adapters_without_rngs_are_made_with_a_warning(installed):
    provider = installed.LoraProvider(rank=2, alpha=4.0)
    with pytest.warns(UserWarning, match="rngs must be provided"):
        model = installed.apply_lora_to_model(Tied().linear, provider, jnp.ones((1, 8)))
    assert model.kernel_lora_a.shape == (8, 2)


def test_installing_too_late(monkeypatch):
    real = type(sys)("qwix")
    real.__file__ = "/somewhere/qwix/__init__.py"
    monkeypatch.setitem(sys.modules, "qwix", real)
    with pytest.raises(RuntimeError, match="imported already, from /somewhere"):
        place.install()


def test_subclasses_of_what_is_never_called_are_refused():
    with pytest.raises(TypeError, match="Late overrides _create_dot_general_qt_config"):

        class Late(mt.QtProvider):
            def _create_dot_general_qt_config(self, *args):
                return None


def run(*arguments):
    command = [sys.executable, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_running_somebody_elses_program(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import sys, qwix; print(qwix.QtRule.__module__, sys.argv[1:])")
    done = run("-m", "midtread.interop.qwix", str(program), "--flag")
    assert done.stdout == "midtread.model.rules ['--flag']\n", done.stderr
    done = run("-m", "midtread.interop.qwix")
    assert done.returncode and "usage:" in done.stderr


TIME = """
import sys, time
import jax, flax.linen, flax.nnx, jax.experimental.pallas
before, start = set(sys.modules), time.process_time()
import midtread
print(time.process_time() - start)
print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))
"""
EXTRAS = {
    "qwix",
    "orbax",
    "safetensors",
    "grain",
    "optax",
    "yaml",
    "matplotlib",
    "jinja2",
}


def test_importing_is_quick_and_brings_no_extra():
    """Under a second of the processor beyond jax and flax."""
    seconds, new = run("-c", TIME).stdout.splitlines()
    assert float(seconds) < 1
    assert not EXTRAS & set(new.split()), new


def test_passes_by_themselves(key):
    """Forward and backward as Qwix has them apart are those of the op."""
    x, w, g = (jax.random.normal(k, (4, 4)) for k in jax.random.split(key, 3))
    numbers = (((1,), (0,)), ((), ()))
    config = matmuls.DotGeneralQtConfig(
        lhs_qtype="int8",
        rhs_qtype="int8",
        dlhs_grad_qtype="int8",
        drhs_grad_qtype="int8",
    )
    run = lambda x, w: matmuls.dot_general_qt(x, w, numbers, config)
    ranges = [calibrate(a, Spec("int8", (i,))) for i, a in enumerate((x, w))]

    @jax.jit
    def both(x, w, ranges, g):
        out, vjp = jax.vjp(run, x, w)
        got, residuals = passes.dot_general_qt_fwd(x, w, *ranges, numbers, config)
        grads = passes.dot_general_qt_bwd(numbers, residuals, g)
        return (out, *vjp(g)), (got, *grads[:2])

    jax.tree.map(np.testing.assert_array_equal, *both(x, w, ranges, g))
    out, _ = passes.dot_general_qt_fwd(x, w, None, None, numbers, config)
    np.testing.assert_allclose(out, x @ w, rtol=1e-6)


def test_interceptors_by_hand():
    sine = models.Interceptor({"jax.numpy.sin": lambda x: x + 1}, 12345)
    manager = models.interception_manager
    manager.activate_interceptor(sine)
    try:
        assert manager.is_active(sine) and jnp.sin(1.0) == 2
        off = manager.disable_interception()
        assert jnp.sin(0.0) == 0
        manager.enable_interception(off)
        assert jnp.sin(1.0) == 2
    finally:
        manager.deactivate_interceptor(sine)
    assert jnp.sin(0.0) == 0 and not manager.is_active(sine)
    with pytest.raises(ValueError, match="is not active"):
        manager.deactivate_interceptor(sine)


def test_interceptors_of_code_objects():
    manager = models.interception_manager
    by_code = models.Interceptor({"jax.lax.sin.__code__": lambda x: x + 1}, 12346)
    manager.activate_interceptor(by_code)
    try:
        assert jax.lax.sin(1.0) == 2
    finally:
        manager.deactivate_interceptor(by_code)
    twice = {f"jax.nn.{name}._fun.__code__": abs for name in ("swish", "silu")}
    with pytest.raises(ValueError, match="are one function"):
        manager.activate_interceptor(models.Interceptor(twice, 12347))


def test_what_is_known_of_an_object():
    x = jnp.ones(3)
    models.set_aux(x, "a", 1)
    assert models.get_aux(x, "a") == 1 and models.get_aux(x, "b", 2) == 2
    models.clear_aux(x)
    with pytest.raises(KeyError, match="under 'a'"):
        models.get_aux(x, "a")


def test_a_training_op_called_by_itself_shows_its_matmuls():
    numbers = (((1,), (0,)), ((), ()))
    config = matmuls.DotGeneralQtConfig(
        lhs_qtype="int8",
        rhs_qtype="int8",
        dlhs_grad_qtype="int8",
        drhs_grad_qtype="int8",
    )
    loss = lambda x, w: matmuls.dot_general_qt(x, w, numbers, config).sum()
    x, w = jnp.ones((4, 8)), jnp.ones((8, 2))
    equations = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(x, w).eqns
    dots = [e for e in equations if e.primitive.name == "dot_general"]
    assert [str(v.aval.dtype) for e in dots for v in e.invars] == ["int8"] * 6
