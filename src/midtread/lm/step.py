"""Step: one step of training as a pure function, state in, state out.

    loss = mean cross entropy of the targets that count
         + z_loss_multiplier * mean log(Z)^2
         + load_balance_loss_weight * routers' loss
         + mtp_loss_scaling_factor * loss of the heads that look further

`learned` holds the weights, and the amax histories of delayed scaling, whose gradient is
their next value. A batch may be cut into parts: gradients are summed, histories take the
larger. Each part's loss is divided by the tokens of the whole batch, so that gradients
have the size they would have in one piece, and a fixed range fits them as before.

Randomness is a function of the seed and the step alone: nothing random is kept.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from midtread.lm.config import Model, Training
from midtread.lm.model import Transformer
from midtread.model import flaxlib
from midtread.providers.delayed import (
    OverwriteWithGradient,
    accumulate_gradients,
    is_overwritten,
    overwrite_with_gradient,
)

LEARNED = (nnx.Param, OverwriteWithGradient)
NOISE = "stochastic_rounding"


class State(NamedTuple):
    step: jax.Array
    learned: nnx.State
    kept: nnx.State  # statistics of static ranges, sparsity masks
    optimizer: Any


class Parts(NamedTuple):
    """A model taken apart."""

    graph: nnx.GraphDef
    learned: nnx.State
    kept: nnx.State
    random: nnx.State

    def whole(self) -> Transformer:
        return nnx.merge(self.graph, self.learned, self.kept, self.random)


def take_apart(model: nnx.Module) -> Parts:
    graph, learned, random, kept = nnx.split(model, LEARNED, nnx.RngState, ...)
    return Parts(graph, learned, kept, random)


def add_noise(model: Transformer, seed: int = 0) -> None:
    """Gives every module the random stream that stochastic rounding asks for; stacked
    layers one each."""
    rngs = nnx.Rngs(**{NOISE: seed})
    flaxlib.set_on_all(model, **{flaxlib.RNGS: rngs})
    for name, count in model.decoder.kinds:
        if model.decoder.scanned:
            stack = getattr(model.decoder, name)
            flaxlib.set_on_all(stack, **{flaxlib.RNGS: rngs.fork(split=count)})


def with_noise(random: nnx.State, key: jax.Array) -> nnx.State:
    """Streams begun anew from `key`."""

    def renew(path, leaf):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros_like(leaf)  # counts
        mine = jax.random.fold_in(key, _number(path))
        return jax.random.split(mine, leaf.shape) if leaf.ndim else mine

    return jax.tree_util.tree_map_with_path(renew, random)


def _number(path: tuple) -> int:
    """A number for a place in a tree, the same in every process."""
    text = jax.tree_util.keystr(path)
    return functools.reduce(lambda h, c: (h * 31 + ord(c)) % 2**31, text, 7)


# --- loss -------------------------------------------------------------------------------------


def cross_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """-log p(target) and log Z, of every position."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return log_z - chosen, log_z


def loss_sums(m: Model, z_weight: float, model: Transformer, batch: dict, total):
    """The loss of a part of a batch of `total` tokens, and its cross entropy alone."""
    out = model(batch["inputs"], batch["positions"], batch["segments"])
    mask = batch["mask"].astype(jnp.float32)
    nll, log_z = cross_entropy(out.logits, batch["targets"])
    lm_loss = jnp.sum(nll * mask) / total
    loss = lm_loss + z_weight * jnp.sum(log_z**2 * mask) / total
    if m.num_experts > 1:
        layers = m.num_decoder_layers - m.first_num_dense_layers + m.mtp_num_layers
        loss += m.load_balance_loss_weight * out.balance / layers * (
            jnp.sum(mask) / total
        )
    targets = batch["targets"]
    for logits in out.ahead:
        targets = jnp.roll(targets, -1, axis=1)
        same = jnp.roll(batch["segments"], -1, axis=1) == batch["segments"]
        mask = jnp.roll(mask, -1, axis=1).at[:, -1].set(0.0) * same
        nll, _ = cross_entropy(logits, targets)
        weight = m.mtp_loss_scaling_factor / m.mtp_num_layers
        loss += weight * jnp.sum(nll * mask) / total
    return loss, lm_loss


# --- optimizer --------------------------------------------------------------------------------


def schedule(t: Training) -> optax.Schedule:
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
    """Matrices decay; norms and biases do not, though stacked ones look like matrices."""
    names = lambda path: {str(getattr(k, "key", "")) for k in path}
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not names(path) & {"scale", "routed_bias"}, params
    )


def optimizer(t: Training) -> optax.GradientTransformation:
    adam = optax.adamw(
        schedule(t), b2=t.adam_b2, weight_decay=t.adam_weight_decay, mask=_decays
    )
    clip = t.gradient_clipping_threshold
    parts = [optax.clip_by_global_norm(clip), adam] if clip else [adam]
    return overwrite_with_gradient(optax.chain(*parts))


# --- step -------------------------------------------------------------------------------------


def initial(model: Transformer, t: Training) -> tuple[State, Parts]:
    parts = take_apart(model)
    tx = optimizer(t)
    state = State(
        jnp.zeros((), jnp.int32), parts.learned, parts.kept, tx.init(parts.learned)
    )
    return state, parts


def make_step(m: Model, t: Training, parts: Parts, seed: int = 0, prepare=None):
    """`step(state, batch) -> state, metrics`, compiled; the old state is used up.

    Args:
        prepare: (learned, kept, step) -> learned, kept, before the model runs: pruning.
    """
    tx, pieces = optimizer(t), t.gradient_accumulation_steps

    def gradients(learned, kept, random, batch, total):
        def loss_of(learned, kept, random):
            model = Parts(parts.graph, learned, kept, random).whole()
            losses = loss_sums(m, t.z_loss_multiplier, model, batch, total)
            return losses[0], (losses[1], take_apart(model).kept)

        (loss, (lm_loss, kept)), grads = jax.value_and_grad(loss_of, has_aux=True)(
            learned, kept, random
        )
        return grads, kept, jnp.stack([loss, lm_loss])

    def step(state: State, batch: dict) -> tuple[State, dict]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        learned, kept = state.learned, state.kept
        if prepare is not None:
            learned, kept = prepare(learned, kept, state.step)
        total = jnp.maximum(jnp.sum(batch["mask"]), 1).astype(jnp.float32)
        noise = lambda i: with_noise(parts.random, jax.random.fold_in(key, i))
        if pieces == 1:
            grads, kept, losses = gradients(learned, kept, noise(0), batch, total)
        else:
            cut = lambda a: a.reshape(pieces, a.shape[0] // pieces, *a.shape[1:])

            def body(carry, part):
                grads, kept, losses = carry
                more, kept, extra = gradients(
                    learned, kept, noise(part["number"]), part, total
                )
                return (accumulate_gradients(grads, more), kept, losses + extra), None

            zeros = jax.tree.map(jnp.zeros_like, learned)
            cuts = {**jax.tree.map(cut, batch), "number": jnp.arange(pieces)}
            (grads, kept, losses), _ = jax.lax.scan(
                body, (zeros, kept, jnp.zeros(2)), cuts
            )
        updates, opt = tx.update(grads, state.optimizer, state.learned)
        learned = optax.apply_updates(state.learned, updates)
        metrics = {"loss": losses[1], "total_loss": losses[0], "grad_norm": norm(grads)}
        metrics["learning_rate"] = schedule(t)(state.step)
        return State(state.step + 1, learned, kept, opt), metrics

    return jax.jit(step, donate_argnums=0)


def norm(grads: Any) -> jax.Array:
    """Of the gradients of weights."""
    flat, _ = jax.tree_util.tree_flatten_with_path(grads)
    return optax.global_norm([g for path, g in flat if not is_overwritten(path)])


def make_eval(parts: Parts):
    """`evaluate(learned, kept, batch) -> sum of losses, number of tokens`, compiled."""

    def evaluate(learned, kept, batch):
        random = with_noise(parts.random, jax.random.key(0))
        model = Parts(parts.graph, learned, kept, random).whole()
        out = model(batch["inputs"], batch["positions"], batch["segments"])
        nll, _ = cross_entropy(out.logits, batch["targets"])
        mask = batch["mask"].astype(jnp.float32)
        return jnp.sum(nll * mask), jnp.sum(mask)

    return jax.jit(evaluate)


def mean_loss(evaluate, learned, kept, batches) -> float:
    sums = [evaluate(learned, kept, batch) for batch in batches]
    return float(sum(s for s, _ in sums) / sum(n for _, n in sums))
