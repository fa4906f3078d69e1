"""Programs: which options a step and a judgement are compiled with, on which device."""

import jax
import jax.numpy as jnp
import pytest

from midtread.kernels import environment
from midtread.lm import bench, build, data, model, program, settings, step
from midtread.lm.config import Model, Training, section

NAME = "xla_gpu_enable_dynamic_slice_fusion"
TINY = ["tiny", "num_decoder_layers=1", "emb_dim=16"]


@pytest.mark.parametrize("device", ["h200", "b200", "l4"])
def test_a_gpu_gets_options_and_a_cpu_none(device, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert program.options() == {}
    with environment.pretended("cpu"):
        assert program.options() == {}
    with environment.pretended(device):
        assert program.options() == {NAME: False}


def test_what_the_environment_says_stays(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=/tmp --{NAME}=true")
    with environment.pretended("h200"):
        assert program.options() == {}


def test_an_option_that_xla_has_not_is_left_out(monkeypatch):
    monkeypatch.setattr(program, "OPTIONS", {"gpu": {"xla_gpu_no_such_option": True}})
    with environment.pretended("h200"):
        assert program.options() == {}
        assert program.Program(lambda x: x + 1)(1) == 2


@pytest.fixture
def asked(monkeypatch):
    """The options of every `jax.jit` of a program, where a GPU's are asked for."""
    seen, jit = [], jax.jit

    def noting(run, compiler_options=None, **arguments):
        seen.append(compiler_options)
        return jit(run, compiler_options=compiler_options, **arguments)

    monkeypatch.setattr(program.jax, "jit", noting)
    monkeypatch.setattr(program, "options", lambda: {NAME: False})
    return seen


def test_training_judging_and_bench_are_programs(monkeypatch):
    seen, here = [], program.Program._here
    noting = lambda self: seen.append(self) or here(self)
    monkeypatch.setattr(program.Program, "_here", noting)
    config = settings.load(TINY)
    m, t = section(config, Model), section(config, Training)
    state, parts = step.initial(build.for_training(config, model.create(m)), t)
    batch = data.held_out(data.splits(config).train, config)[0]
    step.make_eval(parts)(state.learned, state.kept, batch)
    step.make_step(m, t, parts)(state, batch)
    assert seen == [step._evaluate, step.run]
    monkeypatch.setattr(bench, "STEPS", 1)
    bench.measure(config, "one")
    assert seen[2:] == [step.run]


def test_a_program_within_another_has_no_options_of_its_own(asked):
    double = program.Program(lambda x: 2 * x)
    assert double(2) == 4 and asked == [None, {NAME: False}]
    assert jax.vmap(double)(jnp.arange(3)).tolist() == [0, 2, 4]
    assert jax.lax.map(double, jnp.arange(3)).tolist() == [0, 2, 4]
    assert double.lower(2).compile()(2) == 4
    assert len(asked) == 2
