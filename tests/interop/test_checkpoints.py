"""Quantized trees through files: exact, or refused with the name of what is wrong."""

import functools
import json
import pathlib
import pickletools
import random
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import midtread as mt
from midtread.interop import manifest, orbax, safetensors
from midtread.numerics.formats import FORMATS
from tests.support import shared_variables

STORES = {"safetensors": safetensors, "orbax": orbax}
every_store = pytest.mark.parametrize("store", STORES.values(), ids=STORES)
X = jnp.ones((2, 64))


def assert_same(a, b):
    """Same structure, static metadata, dtypes and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(48, name="up")(x))
        return nn.Dense(64, name="down")(nn.LayerNorm(name="norm")(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(64, use_running_average=True, rngs=rngs)
        self.drop = nnx.Dropout(0.1, deterministic=True, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = self.drop(self.norm(layer(x)))
        return x


PTQ = [mt.QuantizationRule(module_path="up|layers/0", weight_qtype="nf4", tile_size=16),
       mt.QuantizationRule(weight_qtype="int4", weight_calibration_method="absmax,0.9",
                           act_qtype="int8", act_static_scale=True)]  # fmt: skip


@functools.cache
def linen():
    model = mt.quantize_model(MLP(), mt.PtqProvider(PTQ))
    return model, jax.jit(model.init)(jax.random.key(0), X)


@functools.cache
def net():
    return mt.quantize_model(Net(nnx.Rngs(0)), mt.PtqProvider(PTQ), X)


@functools.cache
def every_format():
    return jax.jit(make_every_format)()


def make_every_format():
    """A QArray of every format, with every part that one can have."""
    x = jax.random.normal(jax.random.key(1), (32, 48))
    tree = {}
    for name, fmt in FORMATS.items():
        tiles = {0: fmt.tile} if fmt.tile else {}
        tree[name] = mt.quantize(x, name, channelwise_axes=[1], tiled_axes=tiles)
        if fmt.is_integer:
            tree[f"{name}_minmax"] = mt.quantize(x, name, calibration_method="minmax")
    small = {"channelwise_axes": [1], "tiled_axes": {0: 32}}
    tree["mxfp4_e8m0"] = mt.quantize(x, "mxfp4", scale_dtype="e8m0", **small)
    small["tiled_axes"] = {0: 16}
    tree["nvfp4_e4m3"] = mt.quantize(x, "nvfp4", scale_dtype="e4m3", **small)
    tree["padded"] = mt.quantize(x, "int3", tiled_axes={1: 20})
    tree["smooth"] = tree["int8"].replace(pre_scale=jnp.ones((32, 1)))
    tree["rotated"] = tree["int4"].replace(pre_rotation=-jnp.ones((16, 1)))
    floats = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.int32, jnp.bool_, jnp.int4)
    tree["plain"] = {np.dtype(d).name: jnp.ones((3, 5), d) for d in floats}
    tree["scalar"] = jnp.float32(3)
    return tree


# its static scales, which are as good as any to be saved, or to be loaded over
from_an_example = pytest.mark.filterwarnings("ignore:static scales of")


@every_store
def test_every_format_comes_back_bit_for_bit(store, tmp_path):
    store.save(tmp_path / "c", every_format())
    assert_same(store.load(tmp_path / "c"), every_format())
    assert_same(store.load(tmp_path / "c", every_format()), every_format())


@every_store
def test_linen_variables(store, tmp_path):
    model, variables = linen()
    store.save(tmp_path / "c", variables, rules=PTQ)
    loaded = store.load(tmp_path / "c")  # no target: it says itself what it is
    assert_same(loaded, variables)
    apply = jax.jit(model.apply)
    assert np.array_equal(apply(loaded, X), apply(variables, X))
    target = jax.eval_shape(model.init, jax.random.key(0), X)
    assert_same(store.load(tmp_path / "c", target), variables)


@every_store
@from_an_example
def test_nnx_models(store, tmp_path):
    store.save(tmp_path / "c", net(), rules=mt.PtqProvider(PTQ))
    target = mt.quantize_model(Net(nnx.Rngs(7)), mt.PtqProvider(PTQ), X)
    target.rngs = nnx.Rngs(0)  # made, not stored
    loaded = store.load(tmp_path / "c", target)
    assert not shared_variables(loaded, target)
    assert_same(nnx.state(loaded, nnx.Param), nnx.state(net(), nnx.Param))
    run = nnx.jit(lambda model: model(X))
    assert np.array_equal(run(loaded), run(net()))
    assert not np.array_equal(run(target), run(net()))


@every_store
def test_boxes_around_arrays(store, tmp_path):
    init = nn.with_partitioning(nn.initializers.normal(), ("rows", "columns"))
    model = mt.quantize_model(nn.Dense(32, kernel_init=init), mt.PtqProvider(PTQ[1:]))
    variables = jax.jit(model.init)(jax.random.key(0), X)
    assert variables["params"]["kernel"].array.qvalue.names == ("rows", "columns")
    store.save(tmp_path / "c", variables)
    target = jax.eval_shape(model.init, jax.random.key(0), X)
    assert_same(store.load(tmp_path / "c", target), variables)


def test_adapters_over_codes(tmp_path):
    provider = mt.LoraProvider(rank=2, alpha=1.0, weight_qtype="nf4")
    make = lambda seed: mt.apply_lora_to_model(
        nnx.Linear(64, 8, rngs=nnx.Rngs(seed)), provider, X, rngs=nnx.Rngs(seed)
    )
    safetensors.save(tmp_path / "c", make(0))
    loaded = safetensors.load(tmp_path / "c", make(1))
    assert_same(nnx.state(loaded), nnx.state(make(0)))


def test_it_says_what_it_is(tmp_path):
    safetensors.save(tmp_path / "c", linen()[1], rules=PTQ)
    entry = safetensors.read_manifest(tmp_path / "c")["entries"]["params/up/kernel"]
    assert (entry["qtype"], entry["tile"], entry["rule"]) == ("nf4", [16, 1], 0)
    assert entry["how"]["tiled_axes"] == [[0, 16]]
    assert safetensors.read_rules(tmp_path / "c") == PTQ
    packed = entry["parts"]["qvalue"]
    assert manifest.stored_size(packed) == 64 * 48 // 2  # four bits are four bits


def test_rules_of_all_kinds_survive():
    rules = [
        mt.QtRule(weight_qtype="fp8", bwd_qtype="e5m2", op_names=("einsum",)),
        mt.QtRule(recipe=mt.recipe("deepseek_fp8"), tile_size=0.5),
        mt.LoraRule(rank=4, alpha=2.0, module_path="a|b"),
    ]
    made = json.loads(manifest.canonical(manifest.rules_json(rules)))
    assert manifest.rules_json(manifest.rules_from({"rules": made})) == made
    with pytest.raises(ValueError, match="rule 0: recipe=.*has no name"):
        manifest.rules_json([mt.QtRule(recipe=mt.Recipe(mt.Fwd(mt.Spec("int4"))))])


def test_shardings_of_the_target(tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    split = NamedSharding(mesh, PartitionSpec(None, "data"))
    tree = {"w": mt.quantize(jnp.ones((32, 64)), "nf4", channelwise_axes=[1])}
    tree = jax.device_put(tree, split)
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split), tree
    )
    for name, store in STORES.items():
        store.save(tmp_path / name, tree)
        loaded = store.load(tmp_path / name, target)
        assert_same(loaded, tree)
        assert loaded["w"].qvalue.sharding == loaded["w"].scale.sharding == split


def test_other_readers_can_open_it(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    tree = {"a": {"w": mt.quantize(jnp.arange(32.0).reshape(4, 8), "int8")}}
    safetensors.save(tmp_path / "c", tree)
    found = library.load_file(tmp_path / "c")
    assert np.array_equal(found["a/w/qvalue"], tree["a"]["w"].qvalue)
    library.save_file({"x.kernel": np.ones((2, 3), np.float32)}, tmp_path / "d")
    target = {"x": {"kernel": jax.ShapeDtypeStruct((2, 3), jnp.float32)}}
    assert safetensors.load_float(tmp_path / "d", target)["x"]["kernel"].sum() == 6


# --- float checkpoints ------------------------------------------------------------------------

STATIC = [mt.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)]


def test_float_checkpoints_train_quantized_linen(tmp_path):
    variables = MLP().init(jax.random.key(3), X)
    model = mt.quantize_model(MLP(), mt.QtProvider(STATIC))
    target = jax.eval_shape(model.init, jax.random.key(0), X)
    assert "quant_stats" in target
    safetensors.save(tmp_path / "ours", variables)
    for name, tree in {"all": variables, "params": variables["params"]}.items():
        with ocp.StandardCheckpointer() as checkpointer:  # waits until it is written
            checkpointer.save(tmp_path / name, tree)
    for loaded in (
        safetensors.load_float(tmp_path / "ours", target),
        orbax.load_float(tmp_path / "all", target),
        orbax.load_float(tmp_path / "params", target),
    ):
        assert_same(loaded["params"], variables["params"])
        assert all(not x.any() for x in jax.tree.leaves(loaded["quant_stats"]))
        model.apply(loaded, X, mutable="quant_stats")


def test_float_checkpoints_train_quantized_nnx(tmp_path):
    source = Net(nnx.Rngs(3))
    target = mt.quantize_model(Net(nnx.Rngs(0)), mt.QtProvider(STATIC), X)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(
            tmp_path / "state", nnx.state(source, (nnx.Param, nnx.BatchStat))
        )
    safetensors.save(tmp_path / "file", source)
    for loaded in (
        orbax.load_float(tmp_path / "state", target),
        safetensors.load_float(tmp_path / "file", target),
    ):
        assert_same(nnx.state(loaded, nnx.Param), nnx.state(source, nnx.Param))
        assert np.isfinite(loaded(X)).all()


def test_float_checkpoints_that_do_not_fit(tmp_path):
    safetensors.save(tmp_path / "c", {"a": jnp.ones(3), "b": jnp.ones(2)})
    shape = jax.ShapeDtypeStruct
    f32 = jnp.float32
    cases = [
        ({"a": shape((3,), f32)}, "holds tensor 'b'"),
        ({"a": shape((3,), f32), "b": shape((2,), jnp.float16)}, "'b' is float32"),
        ({"a": shape((3,), f32), "bb": shape((2,), f32)}, "no tensor 'bb'.*\\['b'\\]"),
        ({"a": mt.quantize(jnp.ones(3), "int8")}, "'a' is quantized in the target"),
    ]
    for target, text in cases:
        with pytest.raises(ValueError, match=text):
            safetensors.load_float(tmp_path / "c", target)
    safetensors.save(tmp_path / "q", {"a": mt.quantize(jnp.ones(3), "int8")})
    with pytest.raises(ValueError, match="'a' is quantized: use load"):
        safetensors.load_float(tmp_path / "q", {"a": shape((3,), f32)})


# --- damage -----------------------------------------------------------------------------------


def small():
    x = jax.random.normal(jax.random.key(0), (16, 8))
    int8 = functools.partial(mt.quantize, channelwise_axes=[1])
    return {
        "up": {"kernel": int8(x, "int8"), "bias": jnp.arange(8.0)},
        "down": {"kernel": int8(x * 2, "int8"), "four": int8(x, "int4")},
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    safetensors.save(folder / "safetensors", small(), rules=PTQ)
    orbax.save(folder / "orbax", small(), rules=PTQ)
    return folder


def split_file(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join_file(header, data):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor_at(header, position):
    for name, record in header.items():
        if name != "__metadata__":
            begin, end = record["data_offsets"]
            if begin <= position < end:
                return name
    raise AssertionError(position)


def bit_flips(data, rng, count):
    header, _ = split_file(data)
    begin = len(data) - len(split_file(data)[1])
    for i in range(count):
        at = rng.randrange(begin, len(data)) if i % 2 else rng.randrange(len(data))
        broken = bytearray(data)
        broken[at] ^= 1 << rng.randrange(8)
        yield bytes(broken), tensor_at(header, at - begin) if at >= begin else ""


def truncations(data, rng, count):
    header, tail = split_file(data)
    begin = len(data) - len(tail)
    for _ in range(count):
        size = rng.randrange(len(data))
        yield data[:size], tensor_at(header, size - begin) if size >= begin else ""


def swaps(data, rng, count):
    """The bytes, or the places, of two scales of one shape."""
    header, tail = split_file(data)
    names = ["up/kernel/scale", "down/kernel/scale", "down/four/scale"]
    for _ in range(count):
        a, b = rng.sample(names, 2)
        new = {**header, a: header[b], b: header[a]}
        yield join_file(new, tail), (a, b)
        (i, j), (k, n) = (header[x]["data_offsets"] for x in (a, b))
        swapped = bytearray(tail)
        swapped[i:j], swapped[k:n] = tail[k:n], tail[i:j]
        yield join_file(header, bytes(swapped)), (a, b)


def drops(data, rng, count):
    header, tail = split_file(data)
    for _ in range(count):
        name = rng.choice([n for n in header if n != "__metadata__"])
        begin, end = header[name]["data_offsets"]
        new = {}
        for key, record in header.items():
            if key == name:
                continue
            if key != "__metadata__" and record["data_offsets"][0] >= end:
                shifted = [o - (end - begin) for o in record["data_offsets"]]
                record = {**record, "data_offsets": shifted}
            new[key] = record
        yield join_file(new, tail[:begin] + tail[end:]), name


def changes(data, rng, count):
    """Of one field of the manifest: the qtype, a shape, how it was made, a name."""
    header, tail = split_file(data)
    for i in range(count):
        text = json.loads(header["__metadata__"]["midtread"])
        name = rng.choice(["up/kernel", "down/kernel", "down/four"])
        entry = text["entries"][name]
        if i % 4 == 0:
            entry["qtype"] = rng.choice([q for q in FORMATS if q != entry["qtype"]])
        elif i % 4 == 1:
            entry["parts"]["scale"]["dtype"] = "int32"
        elif i % 4 == 2:
            entry["parts"]["qvalue"]["shape"] = [8, 16]
        else:
            del text["entries"][name]
        metadata = {"midtread": json.dumps(text)}
        yield join_file({**header, "__metadata__": metadata}, tail), name


MUTATIONS = [
    (bit_flips, 160),
    (truncations, 60),
    (swaps, 10),
    (drops, 20),
    (changes, 24),
]


@pytest.mark.parametrize(
    "mutate, count", MUTATIONS, ids=lambda x: getattr(x, "__name__", "")
)
def test_damaged_files_are_refused_by_name(mutate, count, saved, tmp_path):
    data = (saved / "safetensors").read_bytes()
    file = tmp_path / "damaged"
    for broken, names in mutate(data, random.Random(0), count):
        file.write_bytes(broken)
        with pytest.raises(ValueError) as caught:
            safetensors.load(file)
        assert str(file) in str(caught.value)
        if names:
            names = (names,) if isinstance(names, str) else names
            assert any(n in str(caught.value) for n in names), str(caught.value)


def versioned(text, version):
    text = {**text, "version": version}
    return {**text, "sum": manifest._sum_of(text)}


def test_a_newer_version_is_refused(saved, tmp_path):
    data = (saved / "safetensors").read_bytes()
    header, tail = split_file(data)
    text = json.loads(header["__metadata__"]["midtread"])
    header["__metadata__"]["midtread"] = json.dumps(versioned(text, 2))
    (tmp_path / "c").write_bytes(join_file(header, tail))
    with pytest.raises(ValueError, match="newer Midtread: version 2.*up to 1"):
        safetensors.load(tmp_path / "c")
    shutil.copytree(saved / "orbax", tmp_path / "d")
    file = tmp_path / "d" / "midtread.json"
    file.write_text(json.dumps(versioned(json.loads(file.read_text()), 2)))
    with pytest.raises(ValueError, match="newer Midtread"):
        orbax.load(tmp_path / "d")


def test_damaged_directories_are_refused_by_name(saved, tmp_path):
    """Every kind of damage to every kind of file, 120 times; orbax sees none of them."""
    rng = random.Random(0)
    files = sorted(p for p in (saved / "orbax").rglob("*") if p.is_file())
    for i in range(120):
        folder = tmp_path / str(i)
        shutil.copytree(saved / "orbax", folder)
        file = folder / rng.choice(files).relative_to(saved / "orbax")
        data = file.read_bytes()
        if i % 4 == 0:
            file.write_bytes(data[: rng.randrange(len(data))])
        elif i % 4 == 1:
            file.unlink()
        else:
            broken = bytearray(data)
            broken[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            file.write_bytes(broken)
        with pytest.raises(ValueError) as caught:
            orbax.load(folder)
        assert str(file) in str(caught.value)
        tensor = file.parent.name
        if tensor not in ("arrays", "array_metadatas", str(i)):
            assert tensor.replace(".", "/") in str(caught.value)
        shutil.rmtree(folder)


def test_directories_that_were_put_together_are_refused(saved, tmp_path):
    folder = tmp_path / "swapped"
    shutil.copytree(saved / "orbax", folder)
    a, b = (folder / "arrays" / f"{n}.kernel.scale" for n in ("up", "down"))
    a.rename(folder / "aside"), b.rename(a), (folder / "aside").rename(b)
    with pytest.raises(ValueError, match="down/kernel/scale.*exchanged"):
        orbax.load(folder)
    shutil.rmtree(a)
    with pytest.raises(ValueError, match="tensor 'up/kernel/scale' is missing"):
        orbax.load(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="not written by midtread"):
        orbax.load(tmp_path / "empty")
    with pytest.raises(ValueError, match="exists already"):
        orbax.save(tmp_path / "empty", small())


def header(**tensors):
    return join_file(tensors, b"\0" * 16)


U8 = {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}
HOSTILE = {
    "empty": b"",
    "longer than the file": (2**62).to_bytes(8, "little") + b"{}",
    "not json": (4).to_bytes(8, "little") + b"\xff{}}",
    "not an object": (2).to_bytes(8, "little") + b"[]",
    "deep": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "twice": (len(T := b'{"a":1,"a":2}')).to_bytes(8, "little") + T,
    "no offsets": header(a={"dtype": "U8", "shape": [16]}),
    "a string for a shape": header(a={**U8, "shape": "16"}),
    "negative": header(a={**U8, "shape": [-16]}),
    "overflow": header(a={**U8, "shape": [2**40, 2**40]}),
    "a bool": header(a={**U8, "shape": [True]}),
    "a float": header(a={**U8, "data_offsets": [0, 16.0]}),
    "backwards": header(a={**U8, "data_offsets": [16, 0]}),
    "outside": header(a={**U8, "shape": [99], "data_offsets": [0, 99]}),
    "overlap": header(a=U8, b=U8),
    "hole": header(a={**U8, "shape": [8], "data_offsets": [8, 16]}),
    "rest": header(a={**U8, "shape": [8], "data_offsets": [0, 8]}),
    "unknown dtype": header(a={**U8, "dtype": "O"}),
    "metadata": header(a=U8, __metadata__={"midtread": {"format": "midtread"}}),
    "no manifest": header(a=U8),
    "manifest of nothing": header(a=U8, __metadata__={"midtread": "null"}),
    "manifest not json": header(a=U8, __metadata__={"midtread": "{"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(name, tmp_path):
    (tmp_path / "c").write_bytes(HOSTILE[name])
    with pytest.raises(ValueError, match=str(tmp_path / "c")):
        safetensors.load(tmp_path / "c")


@every_store
def test_a_checkpoint_of_another_model(store, saved):
    path = saved / store.__name__.rpartition(".")[2]
    tree = small()
    int8 = tree["up"]["kernel"]
    cases = [
        ({**tree, "more": jnp.ones(2)}, "no tensor 'more'.*another model"),
        ({"up": tree["up"]}, "holds tensor 'down/four'"),
        (
            small() | {"up": {"kernel": int8, "bias": jnp.ones(9)}},
            r"'up/bias' is.*\[8\]",
        ),
        (
            small() | {"up": {**tree["up"], "kernel": tree["down"]["four"]}},
            "'up/kernel' has qtype int8, but the target has int4",
        ),
        (
            small() | {"up": {**tree["up"], "kernel": int8.astype(jnp.bfloat16)}},
            "'up/kernel/scale' is .*float32.*bfloat16",
        ),
    ]
    for target, text in cases:
        with pytest.raises(ValueError, match=text):
            store.load(path, target)


@from_an_example
def test_what_cannot_be_saved(tmp_path):
    for tree, text in (
        ({"a": jax.random.key(0)}, "a: .* cannot be saved"),
        ({"a/b": jnp.ones(2)}, "slash"),
        ({"a": "text"}, "a: str"),
        (MLP(), "pass its variables"),
        (nnx.state(net()), "pass the model itself"),
        ({"a": jnp.ones(2, jnp.complex64)}, "a: .*complex64"),
    ):
        for store in STORES.values():
            with pytest.raises((TypeError, ValueError), match=text):
                store.save(tmp_path / "c", tree)
    assert not (tmp_path / "c").exists()
    wrong = mt.QArray(jnp.full((2,), -8, jnp.int4), jnp.ones((1,)), qtype="int3")
    with pytest.raises(ValueError, match="a/qvalue: codes beyond the range of int3"):
        safetensors.save(tmp_path / "c", {"a": wrong})
    assert not list(tmp_path.iterdir())  # nothing half written


def test_orbax_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"`pip install '\.\[orbax\]'` in Midtread's"):
        orbax.save(tmp_path / "a", small())


def test_no_pickle(saved):
    """Neither in the sources nor in what is written."""
    for module in (manifest, safetensors, orbax):
        text = pathlib.Path(module.__file__).read_text()
        assert "pickle" not in text and "eval(" not in text
    for file in (saved / "orbax").rglob("*"):
        if file.is_file():
            with pytest.raises((ValueError, UnicodeDecodeError)):
                list(pickletools.genops(file.read_bytes()))
