"""`benchmarks/gpu.py --peers`: the same cases by other libraries, on the same device.

They compile for minutes, and change only with their versions: run once per device and JAX,
and quoted with the date. A library that is not installed is a line that says so.

    gemm      8192^3, 8-bit: torch._scaled_mm (row and column scales), torch._int_mm
    serve     rows against weights of one MLP layer: Qwix, weights alone and with activations
    step      a dense layer, forward and backward, 16,384 x 4096 x 14336: ours, Qwix int8 and
              fp8, Flax's Fp8DirectDotGeneralOp; some of them: step:ours-int8:int8
"""

import functools
import importlib
import importlib.metadata
import time

import jax
import jax.numpy as jnp
from flax import linen as nn
from gpu_timing import BF16, FF, KEY, TOKENS, D, attempt, measure

HEAD = ["| | version | ms | x bf16 | compile s |", "|---" * 5 + "|"]


def _version(name: str) -> str:
    """Of an installed library; an error that names it otherwise."""
    library = importlib.import_module(name)
    found = getattr(library, "__version__", None)  # a source tree has no metadata
    return found or importlib.metadata.version(name)


def _line(title: str, library: str, run, base: float) -> str:
    """`run()` gives (seconds, seconds to compile)."""
    try:
        version = _version(library)
    except ImportError as error:
        return f"| {title} | skipped: {error} | | | |"
    found = attempt(run)
    line = f"| {title} | {library} {version} | {found} | | |"
    if not isinstance(found, str):
        took, compiling = found
        line = f"| {title} | {library} {version} | {took * 1e3:.3f} | {base / took:.2f} | {compiling:.1f} |"
    print(line, flush=True)  # the next one may compile for minutes
    return line


def _jax(fn, *args):
    return lambda: measure(fn, *args, calls=5)[:2]


# --- torch ------------------------------------------------------------------------------------


def _torch_time(fn):
    import torch

    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(20):
            fn()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / 20)
    return best, 0.0


def _scaled_mm(n: int, rowwise: bool):
    import torch

    a = torch.randn(n, n, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(n, n, device="cuda").to(torch.float8_e4m3fn).t()
    shape = ((n, 1), (1, n)) if rowwise else ((), ())
    sa, sb = (torch.ones(s, device="cuda", dtype=torch.float32) for s in shape)
    return _torch_time(
        lambda: torch._scaled_mm(a, b, scale_a=sa, scale_b=sb, out_dtype=torch.bfloat16)
    )


def _int_mm(n: int):
    import torch

    a, b = (torch.randint(-127, 127, (n, n), device="cuda", dtype=torch.int8) for _ in range(2))  # fmt: skip
    return _torch_time(lambda: torch._int_mm(a, b.t()))


def gemm():
    n = 8192
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in (0, 1))
    base = measure(lambda a, b: a @ b.T, a, b)[0]
    cases = {
        "_scaled_mm, e4m3, a scale per tensor": functools.partial(_scaled_mm, n, False),
        "_scaled_mm, e4m3, scales per row and column": functools.partial(_scaled_mm, n, True),
        "_int_mm, int8, no scales": functools.partial(_int_mm, n),
    }  # fmt: skip
    share = 2 * n**3 / base / BF16
    title = f"bfloat16, XLA ({share:.0%} of peak)"
    lines = [*HEAD, f"| {title} | jax {jax.__version__} | {base * 1e3:.3f} | 1.00 | |"]
    return lines + [_line(k, "torch", run, base) for k, run in cases.items()]


# --- Qwix and Flax ----------------------------------------------------------------------------


class Layer(nn.Module):
    how: dict | None = None
    width: int = FF

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(
            nn.Dense, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
        )
        return dense(self.width, name="up", **(self.how or {}))(x)


def _grads(model):
    """Of a sum weighted at random: under ones XLA would leave out a matmul."""

    def loss(variables, x, c):
        return jnp.sum((model.apply(variables, x) * c).astype(jnp.float32))

    return jax.value_and_grad(loss, argnums=(0, 1), allow_int=True)


def _step(model, x):
    variables = jax.jit(model.init)(KEY, x[:128])
    c = jax.random.normal(jax.random.key(1), (x.shape[0], model.width), x.dtype)
    return _jax(_grads(model), variables, x, c)()


def _trained(library: str, fields, x):
    """By Qwix or by us: the names are the same."""
    module = importlib.import_module(library)
    provider = module.QtProvider([module.QtRule(module_path=".*", **fields)])
    return _step(module.quantize_model(Layer(), provider), x)


def _flax_step(x):
    from flax.linen.fp8_ops import Fp8DirectDotGeneralOp

    return _step(Layer({"dot_general_cls": Fp8DirectDotGeneralOp}), x)


CASES = ("ours-int8", "ours-fp8", "int8", "fp8", "flax")


def step(*names):
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise ValueError(f"{unknown} are not of {CASES}")
    x = jax.random.normal(KEY, (TOKENS, D), jnp.bfloat16)
    base, compiling = _step(Layer(), x)
    int8 = dict.fromkeys(("weight_qtype", "act_qtype", "bwd_qtype"), "int8")
    fp8 = dict.fromkeys(int8, "float8_e4m3fn")
    lines = [*HEAD, f"| bfloat16, XLA | jax {jax.__version__} | {base * 1e3:.3f} | 1.00 | {compiling:.1f} |"]  # fmt: skip
    cases = {
        "ours-int8": ("int8", "midtread", functools.partial(_trained, "midtread", int8, x)),
        "ours-fp8": ("fp8", "midtread", functools.partial(_trained, "midtread", fp8, x)),
        "int8": ("Qwix, int8", "qwix", functools.partial(_trained, "qwix", int8, x)),
        "fp8": ("Qwix, fp8", "qwix", functools.partial(_trained, "qwix", fp8, x)),
        "flax": (
            "Flax, Fp8DirectDotGeneralOp", "flax", functools.partial(_flax_step, x)
        ),
    }  # fmt: skip
    return lines + [_line(*cases[name], base) for name in names or CASES]


SERVING = {
    "w8": {"weight_qtype": "int8"},
    "w4-g128": {"weight_qtype": "int4", "tile_size": 128},
    "w8a8": {"weight_qtype": "int8", "act_qtype": "int8"},
    "fp8": {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"},
}


def _qwix_serve(fields, x):
    import qwix

    provider = qwix.PtqProvider([qwix.QuantizationRule(module_path=".*", **fields)])
    model = qwix.quantize_model(Layer(), provider)
    variables = jax.jit(Layer().init)(KEY, x)
    shapes = jax.eval_shape(model.init, KEY, x)["params"]
    params = qwix.quantize_params(variables["params"], shapes)
    return _jax(model.apply, {"params": params}, x)()


def serve(*rows):
    lines = list(HEAD)
    for m in map(int, rows or (1, 64, 8192)):
        x = jax.random.normal(KEY, (m, D), jnp.bfloat16)
        model = Layer()
        variables = jax.jit(model.init)(KEY, x)
        base, compiling = _jax(model.apply, variables, x)()
        lines.append(f"| {m} rows, bfloat16 | jax {jax.__version__} | {base * 1e3:.3f} | 1.00 | {compiling:.1f} |")  # fmt: skip
        for name, fields in SERVING.items():
            run = functools.partial(_qwix_serve, fields, x)
            lines.append(_line(f"{m} rows, Qwix {name}", "qwix", run, base))
    return lines


ROWS = {"gemm": gemm, "step": step, "serve": serve}
