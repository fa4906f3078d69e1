"""Qwix's contrib.qep and contrib.hadamard_rot, on Midtread's algorithms.

`quantize` goes through a Linen model layer by layer, gives each layer the inputs that the
quantized layers before it make, and corrects its weight for what those inputs lack before
GPTQ (Arai & Ichikawa 2025): it is `mt.calibrate(..., algorithms=["correct", "gptq"])`, with
GPTQ as published, but scales of the float weight. Where Qwix's loses its place when a module has two matched operations, or
one is batched, here every contraction is taken.

`hadamard_rotate_inputs` turns both operands of a product so that outliers of few inputs
spread over all, and the product stays what it was: (x R) (R^T w) / n = x w.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from midtread.algorithms.calibrate import CalibrationOptions, calibrate
from midtread.algorithms.gptq import GptqOptions
from midtread.algorithms.program import trace
from midtread.interop.qwix.contrib import GptqRule
from midtread.model.rules import QuantizationRule, field_names
from midtread.numerics import hadamard
from midtread.providers.ptq import PtqProvider


@dataclasses.dataclass(frozen=True, kw_only=True)
class QepRule(GptqRule):
    """Which weights are corrected for the layers before them.

    Args:
        correction_factor: how much of the error is made up for, 0 to 1.
        damping_factor: share of the mean diagonal that steadies the correction.
        apply_correction: False for GPTQ alone.
    """

    correction_factor: float = 0.5
    damping_factor: float = 0.01
    apply_correction: bool = True


@dataclasses.dataclass(frozen=True)
class QepStage:
    """Weights that were solved together, since they have the same inputs."""

    index: int
    param_paths: tuple[tuple[str, ...], ...]
    module_paths: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class QepResult:
    """What `quantize` returns: `model.apply({"params": params}, x)` runs quantized.

    `quant_stats` is empty: statistics are held for one layer at a time.
    """

    model: nn.Module
    params: Any
    quant_stats: Any
    stages: tuple[QepStage, ...]


def quantize(
    model: nn.Module,
    calibration_data: Iterable[Any] | Callable[[], Iterable[Any]],
    rules: Sequence[QepRule],
    *,
    variables: Any = None,
    batch_adapter: Callable[[Any], tuple[Sequence[Any], Mapping[str, Any]]]
    | None = None,
    methods: Collection[str] = ("__call__",),
    abstract_quantized: Any = None,
    allow_extra_params: bool = False,
    gptq_block_size: int = 128,
    gptq_damping_factor: float = 0.01,
) -> QepResult:
    """Quantizes a Linen model by GPTQ, every layer corrected for those before it.

    Args:
        model: a Linen module.
        calibration_data: batches, or a function that gives them.
        rules: where, to which formats, and how much is corrected: the same for all.
        variables: {"params": ...} of the model.
        batch_adapter: (arguments, keywords) of a batch; None: it is the one argument.
        methods: the one method that is calibrated.
        abstract_quantized: refused: shapes are found from the model.
        allow_extra_params: refused: parameters are those of the model.
        gptq_block_size: rows that are worked off before the others hear of it.
        gptq_damping_factor: share of the mean diagonal that is added to the moments.

    Raises:
        ValueError: no Linen model, no variables or batches, several methods, or rules that
            ask for several corrections.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(  # noqa: TRY004  as Qwix has it
            "qep.quantize takes Linen models; mt.calibrate takes NNX too."
        )
    if variables is None:
        raise ValueError("qep.quantize needs variables={'params': ...} of the model.")
    if abstract_quantized is not None or allow_extra_params:
        raise ValueError(
            "qep.quantize finds shapes from the model itself: leave out abstract_quantized "
            "and allow_extra_params."
        )
    if len(methods) != 1:
        raise ValueError(f"qep.quantize calibrates one method, not {tuple(methods)}.")
    batches = list(
        calibration_data() if callable(calibration_data) else calibration_data
    )
    if not batches:
        raise ValueError("calibration_data must contain at least one batch.")
    (method,) = methods
    strength = _strength(rules, gptq_damping_factor)
    options = CalibrationOptions(
        weigh="none", min_tokens=0.0,
        gptq=GptqOptions(damping=gptq_damping_factor, block=gptq_block_size,
                         order="given", scales="spec", rounds=0),
    )  # fmt: skip
    if strength:
        options = dataclasses.replace(options, correction=strength)
    provider = PtqProvider([_plain(rule) for rule in rules])
    calls = [_arguments(batch, batch_adapter) for batch in batches]
    result = calibrate(
        model, provider, calls, algorithms=["correct", "gptq"] if strength else ["gptq"],
        params=variables, method=method, options=options,
    )  # fmt: skip
    program, _ = trace(model, calls[0], params=variables, method=method)
    solved = {row.name for row in result.report.rows}
    return QepResult(
        model=result.model,
        params=result.params["params"],
        quant_stats={},
        stages=_stages([site for site in program.sites if site.name in solved]),
    )


def _arguments(batch: Any, adapter: Callable | None) -> Any:
    """A batch as `mt.calibrate` takes it: a tuple of arguments, or a dict of keywords."""
    if adapter is None:
        return (batch,)
    args, kwargs = adapter(batch)
    if args and kwargs:
        raise ValueError(
            "batch_adapter gives arguments and keywords together: give one of them."
        )
    return dict(kwargs) if kwargs else tuple(args)


def _strength(rules: Sequence[QepRule], damping: float) -> float:
    """The one correction that all rules ask for."""
    asked = {
        (r.correction_factor if r.apply_correction else 0.0, r.damping_factor)
        for r in rules
    }
    if len(asked) != 1:
        raise ValueError(
            f"rules ask for several corrections (factor, damping): {sorted(asked)}. Give "
            "all rules the same, or quantize in turns."
        )
    ((strength, own),) = asked
    if strength and own != damping:
        raise ValueError(
            f"damping_factor={own} of the rules and gptq_damping_factor={damping} steady the "
            "same moments here: write the same number twice."
        )
    return strength


def _plain(rule: QepRule) -> QuantizationRule:
    own = field_names(QuantizationRule)
    return QuantizationRule(**{name: getattr(rule, name) for name in own})


def _stages(sites: list[Any]) -> tuple[QepStage, ...]:
    by_stage: dict[int, list[tuple[str, ...]]] = {}
    for site in sites:
        paths = by_stage.setdefault(site.stage, [])
        path = tuple(map(str, site.path))
        if path not in paths:
            paths.append(path)
    return tuple(
        QepStage(index, tuple(paths), tuple("/".join(p[:-1]) for p in paths))
        for index, (_, paths) in enumerate(sorted(by_stage.items()))
    )


# --- rotations --------------------------------------------------------------------------------


def hadamard_rotate_inputs(
    act: jax.Array,
    weight: jax.Array,
    key: jax.Array | None,
    *,
    row_sign_flip: bool,
    col_sign_flip: bool,
    lhs_reduction_dim: int,
    rhs_reduction_dim: int,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Turns both operands of a product by a Hadamard matrix with random signs.

    >>> x, w = jnp.array([[8.0, 0.0]]), jnp.array([[1.0], [2.0]])
    >>> x, w, _ = hadamard_rotate_inputs(x, w, None, row_sign_flip=False,
    ...     col_sign_flip=False, lhs_reduction_dim=1, rhs_reduction_dim=0)
    >>> x.tolist(), (x @ w).tolist()
    ([[8.0, 8.0]], [[8.0]])

    Args:
        act, weight: the operands.
        key: for the signs; None where no sign is flipped.
        row_sign_flip, col_sign_flip: whether rows and columns get random signs.
        lhs_reduction_dim, rhs_reduction_dim: the axes that are summed, of a power of two.

    Returns:
        The turned operands, and a key for the next.

    Raises:
        ValueError: more than one axis, axes of other sizes, no power of two, or signs without
            a key.
    """
    for side, axis in (("lhs", lhs_reduction_dim), ("rhs", rhs_reduction_dim)):
        if not isinstance(axis, int):
            raise ValueError(  # noqa: TRY004, as Qwix has it
                f"{side}_reduction_dim is {axis!r}, but one axis is turned: give its number."
            )
    sizes = act.shape[lhs_reduction_dim], weight.shape[rhs_reduction_dim]
    n = sizes[0]
    if sizes[0] != sizes[1] or n & (n - 1) or not n:
        raise ValueError(
            f"the summed axes have {sizes[0]} and {sizes[1]} elements: both should have the "
            "same number, a power of 2."
        )
    R = jnp.asarray(hadamard.matrix(n), jnp.bfloat16)
    if row_sign_flip or col_sign_flip:
        if key is None:
            raise ValueError("random signs need a key: give one, or flip none.")
        keys = iter(jax.random.split(key, 1 + row_sign_flip + col_sign_flip))
        signs = lambda: jax.random.choice(next(keys), jnp.array([-1, 1]), (n,))
        if row_sign_flip:
            R = R * signs().astype(R.dtype)[:, None]
        if col_sign_flip:
            R = R * signs().astype(R.dtype)
        key = next(keys)
    act, weight = (
        jnp.moveaxis(jnp.tensordot(x, R.astype(x.dtype), (axis, 0)), -1, axis)
        for x, axis in ((act, lhs_reduction_dim), (weight, rhs_reduction_dim))
    )
    return act, weight / n, key
