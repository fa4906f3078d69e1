"""Quantized folders of others as models: they run, are judged, and take adapters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import midtread as mt
from midtread import cli
from midtread.interop import export, quantized, targets
from midtread.interop.huggingface import Folder, write_tensors
from midtread.lm import convert, settings
from midtread.model.boxes import WithAux
from tests.interop.test_export import CONFIG, tensors
from tests.interop.test_quantized import rewritten


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / "float"
    write_tensors(path, tensors(), CONFIG)
    return Folder(path)


def tokens():
    return jnp.asarray(np.random.default_rng(0).integers(0, 96, (2, 16)), jnp.int32)


def logits(path, *words):
    ((_, config),) = settings.load_checkpoints([str(path), *words])
    model = convert.load(config, str(path))
    return model, np.asarray(nnx.jit(lambda m, t: m(t).logits)(model, tokens()))


def dequantized(source, folder, path):
    """A float folder of what the codes stand for."""
    held = {}
    for name in source.tensors:
        x = source.read(name)
        if isinstance(x, mt.QArray):
            x = np.asarray(mt.dequantize(x.map(jnp.asarray), jnp.float32))
        held[name] = np.asarray(x)
    write_tensors(path, held, folder.config)
    return path


@pytest.mark.parametrize("name", ["w4a16_asym", "fp8_block", "nvfp4", "gptq", "mlx4"])
def test_a_quantized_folder_runs_on_its_codes(folder, tmp_path, name):
    path = export.export(folder, tmp_path / "coded", name)
    source = quantized.open_model(path)
    source.activations = {}
    want = logits(dequantized(source, folder, tmp_path / "float"))[1]
    model, got = logits(path)
    boxes = [n for _, n in nnx.iter_graph(model) if isinstance(n, WithAux)]
    assert {b.how.format.name for b in boxes} == {targets.TARGETS[name].qtype}
    tolerance = 0.1 if name == "fp8_block" else 1e-4  # its activations are in fp8 too
    np.testing.assert_allclose(got, want, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize(
    ("name", "part", "change", "message"),
    [
        (
            "w8a8",
            "weight_scale",
            lambda x: None,
            "is int8, and no weight: its scales are",
        ),
        ("fp8", "weight_scale", lambda x: None, "is float8_e4m3fn, and no weight"),
        ("w4a16", "weight_shape", lambda x: x[:, None], "up_proj.weight: "),
        ("hf", "model.norm.weight", lambda x: x.view("i4"), "is int32, and no weight"),
    ],
)
def test_damage_is_one_line(folder, tmp_path, capsys, name, part, change, message):
    """Also what is only found out when a tensor is read, and not when a folder is opened."""
    path = tmp_path / "coded"
    tensor = part if "." in part else f"model.layers.0.mlp.up_proj.{part}"
    if name == "hf":
        write_tensors(path, tensors(), CONFIG)
    else:
        export.export(folder, path, name)

    def damage(held):
        made = change(held.pop(tensor))
        held |= {} if made is None else {tensor: made}

    rewritten(path, damage)
    out = tmp_path / "out"
    words = ["quantization=int8w", f"save_quantized_params_path={out}"]
    assert cli.main(["quantize", str(path), *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and message in said and ".." not in said
    assert not list(tmp_path.glob("out*"))


def test_adapters_are_trained_on_codes(folder, tmp_path):
    """QLoRA: codes stay, adapters learn."""
    path = export.export(folder, tmp_path / "coded", "awq", group_size=64)
    model, _ = logits(path)
    provider = mt.LoraProvider(module_path=".*mlp.*", rank=4, alpha=8.0)
    with_adapters = mt.apply_lora_to_model(model, provider, tokens(), rngs=nnx.Rngs(0))

    @nnx.jit
    def step(model):
        def loss(model):
            out = model(tokens()).logits[:, :-1]
            picked = jax.nn.log_softmax(out)[
                jnp.arange(2)[:, None], jnp.arange(15), tokens()[:, 1:]
            ]
            return -picked.mean()

        wrt = nnx.DiffState(0, nnx.LoRAParam)
        value, grads = nnx.value_and_grad(loss, argnums=wrt)(model)
        params = nnx.state(model, nnx.LoRAParam)
        nnx.update(model, jax.tree.map(lambda p, g: p - 20 * g, params, grads))
        return value

    losses = [float(step(with_adapters)) for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    after = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert any(x.dtype == jnp.int4 for x in after)


def test_quantizing_again_is_refused(folder, tmp_path):
    path = export.export(folder, tmp_path / "coded", "awq")
    with pytest.raises(
        ValueError, match="is quantized already: drop quantization=int8w"
    ):
        logits(path, "quantization=int8w")


def test_a_quantized_run_is_exported_as_it_is(folder, tmp_path, monkeypatch, capsys):
    """Its codes go out, give its logits, and go nowhere under another name."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["import", str(folder.path), "run_name=a"]) == 0
    words = ["quantize", "runs/a", "quantization=int4w"]
    assert cli.main([*words, "group_size=128"]) == 0
    assert cli.main(["export", "runs/a-int4w", "format=w4a16"]) == 0
    source = quantized.open_model("runs/a-int4w-w4a16")
    assert {"model_type": "llama", "head_dim": 64}.items() <= source.config.items()
    model, want = logits("runs/a-int4w")
    kernel = model.decoder.layers.mlp.wi_1.kernel.value.array
    assert kernel.scale.shape == (2, 2, 512)
    q = source.read("model.layers.1.mlp.up_proj.weight")
    np.testing.assert_array_equal(
        np.asarray(kernel.qvalue[1]).T.astype(np.int8), q.qvalue.astype(np.int8)
    )
    np.testing.assert_allclose(logits("runs/a-int4w-w4a16")[1], want, atol=2e-5)
    capsys.readouterr()
    for kind, message in [
        ("w8a16", "is quantized already"), ("q4_k", "in no kind of block"),
        ("hf", "format=hf holds floats"), ("q4_0", "in no kind of block"),
    ]:  # fmt: skip
        assert cli.main(["export", "runs/a-int4w", f"format={kind}"]) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*.partial"))


def test_codes_are_not_written_as_another_kind(folder, tmp_path):
    """Blocks of Q4_K read as int4 with zero points: those of Q4_1 hold them, listed."""
    path = export.export(folder, tmp_path / "a.gguf", "q4_1")
    source = quantized.open_model(path)
    with pytest.raises(ValueError, match="Q4_1 as they are, not of Q4_K"):
        export.export(source, tmp_path / "b.gguf", "q4_k")
    with pytest.raises(ValueError, match="points are fractions.* Write format=.*q4_1"):
        export.export(source, tmp_path / "b", "w4a16")
    export.export(source, tmp_path / "b.gguf", "q4_1")
    again = quantized.open_model(tmp_path / "b.gguf")
    name = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(
        again.read(name).qvalue.astype(np.int8),
        source.read(name).qvalue.astype(np.int8),
    )


def test_a_gguf_file_of_several_kinds_runs(folder, tmp_path):
    """Layers in different formats are not stacked; what the file says is what runs."""
    path = export.export(
        folder, tmp_path / "mixed.gguf", "q4_k", skip=[r".*\.0\.mlp\.down_proj.*"]
    )
    source = quantized.open_model(path)
    assert quantized.is_mixed(source)
    want = logits(dequantized(source, folder, tmp_path / "float"))[1]
    model, got = logits(path)
    kinds = [
        n.how.format.name for _, n in nnx.iter_graph(model) if isinstance(n, WithAux)
    ]
    assert set(kinds) == {"int4", "int6"}  # the head is Q6_K
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
