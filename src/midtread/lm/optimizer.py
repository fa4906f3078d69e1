"""Optimizer: how weights follow their gradients, as a config says.

    gradients  ->  clipped by their norm  ->  AdamW, Lion or Adafactor (optim/), whose rate
    warms up and then falls on a cosine  ->  rounded by chance, for weights in bfloat16

State of delayed scaling (providers/delayed.py) is replaced by its gradient, and seen by none
of these.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from midtread import optim
from midtread.lm.config import Training
from midtread.optim import moments
from midtread.providers.delayed import is_overwritten, overwrite_with_gradient


def schedule(t: Training) -> optax.Schedule:
    """Returns the learning rate by step: a warm-up, then a cosine."""
    warmup = int(t.steps * t.warmup_steps_fraction)
    final = t.learning_rate * t.learning_rate_final_fraction
    return optax.warmup_cosine_decay_schedule(
        0.0 if warmup else t.learning_rate,
        t.learning_rate,
        warmup,
        max(t.steps, warmup + 1),
        final,
    )


def _decays(params: Any) -> Any:
    """Returns which weights decay: matrices do; norms, biases and sinks do not, though
    stacked ones look like matrices."""

    def decays(path: tuple, _: Any) -> bool:
        names = [str(getattr(k, "key", "")) for k in path]
        return not any(n in ("scale", "sinks") or n.endswith("bias") for n in names)

    return jax.tree_util.tree_map_with_path(decays, params)


def _never(path: str) -> bool:
    return False


def optimizer(t: Training, seed: int = 0) -> optax.GradientTransformation:
    """Returns the optimizer that `opt_type`, `optimizer_states` and `weight_rounding` ask
    for."""
    betas = {"b1": t.adam_b1, "b2": t.adam_b2}
    if t.opt_type == "adafactor":
        del betas["b2"]
    make = {"adamw": optim.adamw, "lion": optim.lion, "adafactor": optim.adafactor}
    parts = [
        make[t.opt_type](
            schedule(t),
            weight_decay=t.adam_weight_decay,
            mask=_decays,
            states=t.optimizer_states,
            is_wide=_never if t.quantize_embedding_states else moments.is_embedding,
            seed=seed,
            **betas,
        )
    ]
    if t.gradient_clipping_threshold:
        parts.insert(0, clip(t.gradient_clipping_threshold))
    if t.weight_rounding == "stochastic":
        parts.append(optim.stochastic_rounding(seed))
    return overwrite_with_gradient(optax.chain(*parts))


def clip(threshold: float) -> optax.GradientTransformation:
    """optax.clip_by_global_norm, in float32 whatever dtype gradients have: a norm that is
    summed in bfloat16 is off by up to 1%."""

    def update(grads, state, params=None):
        del params
        size = norm(grads)
        wide = lambda g: g.astype(jnp.float32)
        one = lambda g: jnp.where(size < threshold, wide(g), wide(g) / size * threshold)
        return jax.tree.map(one, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def norm(grads: Any) -> jax.Array:
    """Returns the norm of the gradients of weights, in float32."""
    flat, _ = jax.tree_util.tree_flatten_with_path(grads)
    weights = [g for path, g in flat if not is_overwritten(path)]
    return optax.tree.norm([g.astype(jnp.float32) for g in weights])
