"""What stands between the matmuls of a decoding step: sums and norms, and the token that goes
into a cache. Interpreted against plain JAX, and lowered for CUDA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import midtread as mt
from midtread.kernels import choose, pending
from midtread.kernels.add_norm import Sum
from midtread.kernels.add_norm import triton as norm_triton
from midtread.kernels.decode_attention.triton import num_parts
from midtread.kernels.environment import DEVICES, Env, implementation, pretended
from midtread.kernels.pallas_compat import pretend_gpu
from midtread.kernels.pending import Pending
from midtread.kernels.quantize import triton as quantize_triton
from midtread.kernels.write_cache import Token
from midtread.kernels.write_cache import triton as write_triton
from midtread.lm import cache as kv
from midtread.lm import rope
from midtread.numerics.formats import as_format
from midtread.numerics.spec import Spec
from tests.kernels.plans import H200, error, floats, random, reason, wide
from tests.kernels.test_gpu import SHAPE, lower

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend")


def summed(x, y, scale, offset=0.0, epsilon=1e-5):
    dtype = jnp.dtype(jnp.float32) if offset else x.dtype
    return Sum(x, y, scale, epsilon, dtype, x.dtype, offset)


def exact_norm(x, y, scale, offset=0.0, epsilon=1e-5):
    total = wide(x + y).astype(np.float64)
    rms = np.sqrt((total**2).mean(-1, keepdims=True) + epsilon)
    return total / rms * (offset + wide(scale).astype(np.float64))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(
    ("shape", "dtype", "near"),
    [((3, 1, 200), jnp.bfloat16, 4e-3), ((2, 256), jnp.float32, 1e-6)],
)
def test_a_sum_and_its_norm(shape, dtype, near, offset):
    x, y = random(1, *shape, dtype=dtype), random(2, *shape, dtype=dtype)
    scale = random(3, shape[-1], dtype=dtype)
    with implementation("interpret"):
        out = choose.add_norm(summed(x, y, scale, offset))
    assert out is not None
    np.testing.assert_array_equal(wide(out.sum), wide(x + y))
    assert error(out.rows, exact_norm(x, y, scale, offset)) < near


def test_a_norm_has_gradients():
    x, y, scale = (random(i, 2, 128, dtype=jnp.float32) for i in range(3))
    loss = lambda x, y, scale: sum(map(jnp.sum, choose.add_norm(summed(x, y, scale))))

    def plain(x, y, scale):
        total = x + y
        mean = jnp.mean(total**2, -1, keepdims=True)
        return jnp.sum(total) + jnp.sum(total * jax.lax.rsqrt(mean + 1e-5) * scale)

    want = jax.grad(plain, (0, 1, 2))(x, y, scale[0])
    with implementation("interpret"):
        got = jax.grad(loss, (0, 1, 2))(x, y, scale[0])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, want)


def left_of(y, seed, factors=True):
    """Parts and factors of a matrix, in float32, and the matrix that they are."""
    m, n = y.shape
    columns, rows = (1 + jnp.abs(random(seed + i, size, dtype=jnp.float32)) for i, size in enumerate((n, m)))  # fmt: skip
    if not factors:
        columns, rows = jnp.ones(n), jnp.ones(m)
    whole = y.astype(jnp.float32) / columns / rows[:, None]
    noise = random(seed + 2, m, n, dtype=jnp.float32)
    parts = jnp.stack([whole - noise, noise])
    left = Pending(parts, columns, rows) if factors else Pending(parts)
    return left, (parts[0] + parts[1]) * columns * rows[:, None]


@pytest.mark.parametrize("factors", [True, False])
def test_what_a_matmul_left_is_summed_and_normed(factors):
    x, scale = random(1, 3, 200), random(3, 200)
    left, y = left_of(random(2, 3, 200), 5, factors)
    y = y.astype(jnp.bfloat16)
    with implementation("interpret"):
        operands = dataclasses.replace(summed(x, y, scale), left=left)
        out = choose.add_norm(operands)
    np.testing.assert_array_equal(wide(out.sum), wide(x + y))
    assert error(out.rows, exact_norm(x, y, scale)) < 4e-3


def test_what_is_not_summed_and_normed():
    why = lambda x, y: reason(norm_triton.plan(summed(x, y, floats(x.shape[-1])), H200))
    x = floats(4, 128)
    assert why(x, x) is None
    assert "65 rows" in why(floats(65, 128), floats(65, 128))
    assert "another shape or dtype" in why(x, floats(4, 128, dtype=jnp.float32))
    assert "rows of 32768" in why(floats(1, 2**15), floats(1, 2**15))
    split = Env(DEVICES["h200"], is_split=True)
    plan = norm_triton.plan(summed(x, x, floats(128)), split)
    assert "several devices" in reason(plan)
    assert choose.add_norm(summed(*[random(1, 4, 128)] * 2, random(2, 128))) is None


# --- writing a token --------------------------------------------------------------------------

# format of the cache, axis of its scales, share of a head that is turned, whether pairs are
# neighbours, dtype of activations
CACHES = [
    (None, "", 1.0, False, jnp.bfloat16),
    (None, "", 0.5, True, jnp.float32),
    ("int8", "dkv", 0.75, False, jnp.bfloat16),  # 12 pairs: no power of two
    ("int8", "heads_and_dkv", 0.5, True, jnp.bfloat16),
    ("fp8", "dkv", 1.0, False, jnp.bfloat16),
    ("int4", "dkv", 1.0, True, jnp.float32),
    ("int4", "heads_and_dkv", 0.5, False, jnp.bfloat16),
]


def written(
    fmt, axis, share, is_interleaved, dtype, batch=3, slots=10, heads=(6, 2, 32)
):
    """A token and its cache, and a function that computes what lm/ makes of them."""
    queries, num_kv, width = heads
    rotary = rope.Rope(1e4, share=share, is_interleaved=is_interleaved)
    all_heads = random(1, batch, 1, queries + 2 * num_kv, width, dtype=dtype)
    old = [random(i, batch, slots, num_kv, width, dtype=dtype) for i in (2, 3)]
    cache_format = fmt and (fmt, axis)
    if fmt:
        old = [kv._quantize(x, cache_format) for x in old]
    positions = jnp.arange(batch)[:, None] * 7 % slots
    positions = positions.at[-1].set(slots)  # of a sequence that is done: not written
    tables = rotary.tables(positions[:, 0], rotary.turned(width))
    token = Token(all_heads[:, 0], *tables, positions[:, 0], *old, is_interleaved)

    @jax.jit
    def plain(all_heads, k, v):
        q, new_k, new_v = jnp.split(all_heads, [queries, queries + num_kv], 2)
        q, new_k = (rotary.rotate(x, positions) for x in (q, new_k))
        cache = kv.Cache({"k": k, "v": v}, cache_format)
        rows = cache.write(positions, k=new_k, v=new_v).rows
        return q[:, 0], rows["k"], rows["v"]

    return token, lambda: plain(all_heads, *old)


def assert_written(got, want):
    """Codes within 1 of the last place where a product was rounded otherwise, and few of them."""
    assert error(got.q, want[0]) < 4e-3
    for x, y in zip(got[1:], want[1:]):
        if isinstance(y, mt.QArray):
            np.testing.assert_allclose(x.scale, y.scale, rtol=1e-2)
            assert (wide(x.qvalue) != wide(y.qvalue)).mean() < 2e-2
            x, y = (mt.dequantize(a, jnp.float32) for a in (x, y))
        untouched = wide(x) == wide(y)
        assert untouched.mean() > 0.95
        assert error(x, y) < 2e-2


@pytest.mark.parametrize("case", CACHES, ids=str)
def test_a_token_is_turned_and_written(case):
    token, want = written(*case)
    with implementation("interpret"):
        got = choose.write(token)
    assert got is not None
    assert_written(got, want())


@pytest.mark.parametrize("case", [CACHES[0], CACHES[3]], ids=str)
@pytest.mark.parametrize("factors", [True, False])
def test_what_a_matmul_left_is_turned_and_written(case, factors):
    token, _ = written(*case)
    left, heads = left_of(token.heads.reshape(3, -1), 5, factors)
    heads = heads.astype(token.heads.dtype).reshape(token.heads.shape)
    with implementation("interpret"):
        want = choose.write(dataclasses.replace(token, heads=heads))
        nothing = jnp.full_like(heads, jnp.nan)
        got = choose.write(dataclasses.replace(token, heads=nothing, left=left))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_array_equal(wide(x), wide(y))


def test_a_sequence_that_is_done_writes_nothing():
    token, _ = written("int8", "dkv", 1.0, False, jnp.bfloat16, batch=1, slots=4)
    with implementation("interpret"):
        got = choose.write(token)
    for new, old in zip(jax.tree.leaves(got[1:]), jax.tree.leaves((token.k, token.v))):
        np.testing.assert_array_equal(wide(new), wide(old))


@pytest.mark.parametrize("case", [CACHES[0], CACHES[3], CACHES[6]], ids=str)
def test_a_cache_is_written_in_place_on_a_gpu(case):
    """The lowered program aliases each array of the cache with a result, twice: the kernel's
    argument with its result, and the donated argument with the program's."""
    token, _ = written(*case)
    given = token.heads, token.cos, token.sin, token.positions
    run = lambda k, v, *given: choose.write(Token(*given, k, v, token.is_interleaved))[1:]  # fmt: skip
    with pretended("h200"), pretend_gpu():
        traced = jax.jit(run, donate_argnums=(0, 1)).trace(token.k, token.v, *given)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    arrays = len(jax.tree.leaves((token.k, token.v)))
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 1
    assert text.count("tf.aliasing_output") == arrays
    assert text.count("output_operand_alias<") == arrays
    for op in ("concatenate", "scatter", "dynamic_update_slice", "transpose"):
        assert f"stablehlo.{op}" not in text


def test_what_is_not_written():
    token, _ = written(*CACHES[2])
    why = lambda **changes: reason(
        write_triton.plan(Token(**{**vars(token), **changes}), H200)
    )
    assert why() is None
    float32 = token.k.replace(scale=token.k.scale.astype(jnp.bfloat16))
    assert "in float32" in why(k=float32)
    assert "differ in width or format" in why(k=random(1, 3, 10, 2, 32))
    assert "not shared evenly" in why(heads=random(1, 3, 9, 32))
    three = mt.quantize(random(1, 3, 10, 2, 32), "int3", channelwise_axes=(0, 1))
    assert "int3 caches" in why(k=three, v=three)
    split = Env(DEVICES["h200"], is_split=True)
    assert "several devices" in reason(write_triton.plan(token, split))


# --- how many programs share a context --------------------------------------------------------


def test_a_context_is_shared_where_heads_are_few():
    numbers = 2 * 128  # of a slot
    assert num_parts(32 * 8, 1024, numbers, 132) == 1
    assert num_parts(16 * 8, 1024, numbers, 132) == 1
    assert num_parts(8 * 8, 1024, numbers, 132) == 4
    assert num_parts(8, 1024, numbers, 132) == 16  # a block of 64 each
    assert num_parts(8, 8192, numbers, 132) == 32
    assert num_parts(2 * 8, 256, numbers, 132) == 1  # not worth a second kernel
    assert num_parts(140, 8192, numbers, 132) == 7  # 8 multiprocessors would read two


# --- what matmuls leave -----------------------------------------------------------------------


def test_only_the_result_itself_is_pending():
    """What was done to it, or a matmul of floats, leaves nothing."""
    w = mt.quantize(random(1, 1024, 1024), "int8", channelwise_axes=[1])
    x = mt.quantize(random(2, 32, 1024), "int8", channelwise_axes=[0])
    other, noted = random(3, 1024, 256), {}

    def run(x, w):
        with pending.collect() as forms:
            y = mt.dot(x, w)
            noted["y"], noted["z"] = forms.of(y), forms.of(y + 1)
            noted["other"] = forms.of(mt.dot(random(4, 4, 1024), other))
        with pending.collect() as forms:
            y = mt.dot(x, w).T.astype(jnp.float32)
            noted["turned"] = forms.of(y)
        return y

    with pretended("h200"):
        jax.eval_shape(run, x, w)
    parts, columns, rows = noted.pop("y").pending
    assert (parts.shape, parts.dtype) == ((2, 32, 1024), jnp.float32)
    assert columns.shape == (1024,) and rows.shape == (32,)
    assert all(form == pending.Form() for form in noted.values())


@pytest.mark.parametrize("name", ["int8", "e4m3"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_few_rows_are_quantized_by_one_kernel_in_a_step(name, dtype):
    """The codes and scales of `mt.quantize`, and the same codes in bfloat16."""
    x = random(1, 3, 1, 200, dtype=dtype).at[1].set(0)
    spec = Spec(as_format(name), channelwise_axes=(0, 1))
    want = mt.quantize(x, name, channelwise_axes=(0, 1))
    run = lambda: choose.quantize(x, spec, summed=(2,))[0]
    with implementation("interpret"):
        assert "few" not in str(jax.make_jaxpr(lambda: run().qvalue)())
        with pending.collect():
            got = run()
            as_bfloat16 = pending.form_of(got.qvalue).wide
            assert pending.form_of(want.qvalue).wide is None
    np.testing.assert_array_equal(wide(got.qvalue), wide(want.qvalue))
    np.testing.assert_array_equal(wide(got.scale), wide(want.scale))
    assert as_bfloat16.dtype == jnp.bfloat16
    np.testing.assert_array_equal(wide(as_bfloat16), wide(want.qvalue))


def test_step_kernels_lower_for_cuda():
    rows = SHAPE((32, 4096), jnp.bfloat16)
    options = {"epsilon": 1e-5, "scale_dtype": jnp.bfloat16, "dtype": jnp.bfloat16}
    run = functools.partial(norm_triton.add_norm, **options)
    lower(run, rows, rows, SHAPE((4096,), jnp.bfloat16))
    left = Pending(SHAPE((4, 32, 4096), jnp.float32), SHAPE((4096,), jnp.bfloat16))
    left = left._replace(rows=SHAPE((32,), jnp.float32))
    lower(run, rows, left, SHAPE((4096,), jnp.bfloat16))
    odd = SHAPE((1, 3000), jnp.float32)
    lower(functools.partial(run, offset=1.0), odd, odd, SHAPE((3000,), jnp.float32))
    for name in ("int8", "e4m3"):
        few = functools.partial(quantize_triton.few_rows, fmt=as_format(name))
        lower(few, SHAPE((1, 14336), jnp.bfloat16))
    for case in (CACHES[0], CACHES[2], CACHES[5]):
        token, _ = written(*case, batch=2, slots=4, heads=(32, 8, 128))
        run = lambda t, pairs=token.is_interleaved: choose.write(Token(**t, is_interleaved=pairs))  # fmt: skip
        arrays = {k: v for k, v in vars(token).items() if k != "is_interleaved"}
        with pretended("h200"):
            lower(run, arrays)
            lower(run, arrays | {"left": left_of(token.heads.reshape(2, -1), 5)[0]})
