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

The optimizer is in `lm/optimizer.py`. Weights and moments come as stacks of layers, or as
slices of these (`lm/stacks.py`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from midtread.lm.config import Model, Training
from midtread.lm.loss import LEARNED, Goal
from midtread.lm.mesh import Layout, names_of, using
from midtread.lm.model import Transformer
from midtread.lm.optimizer import norm, optimizer, schedule
from midtread.lm.program import Program
from midtread.lm.stacks import together
from midtread.numerics.sparsity import Sparsity
from midtread.providers.delayed import accumulate_gradients


class State(NamedTuple):
    """What a step changes."""

    step: jax.Array
    learned: nnx.State
    kept: nnx.State  # statistics of static ranges
    optimizer: Any
    masks: dict[str, jax.Array]  # of pruned weights, by path


class Parts(NamedTuple):
    """A model taken apart, to be an argument of compiled functions."""

    graph: nnx.GraphDef
    learned: nnx.State
    kept: nnx.State
    random: nnx.State

    def whole(self) -> Transformer:
        """Returns the model put together again."""
        return nnx.merge(self.graph, self.learned, self.kept, self.random)


def take_apart(model: nnx.Module) -> Parts:
    """Takes a model apart."""
    graph, learned, random, kept = nnx.split(model, LEARNED, nnx.RngState, ...)
    return Parts(graph, learned, kept, random)


def with_noise(random: nnx.State, key: jax.Array) -> nnx.State:
    """Begins random streams anew from `key`."""

    def renew(path, leaf):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros_like(leaf)  # counts begin at 0
        mine = jax.random.fold_in(key, _number(path))
        return jax.random.split(mine, leaf.shape) if leaf.ndim else mine

    return jax.tree_util.tree_map_with_path(renew, random)


def _number(path: tuple) -> int:
    """Returns a number for a path in a tree, the same in every process."""
    text = jax.tree_util.keystr(path)
    return functools.reduce(lambda h, c: (h * 31 + ord(c)) % 2**31, text, 7)


# --- loss -------------------------------------------------------------------------------------


def loss_sums(m: Model, z_weight: float, model: Transformer, batch: dict, total):
    """Returns the loss of a part of a batch of `total` tokens, and its cross entropy
    alone."""
    mask = batch["mask"].astype(jnp.float32)
    goals = [Goal(batch["targets"], mask, total, z_weight)]
    same = jnp.roll(batch["segments"], -1, axis=1) == batch["segments"]
    for _ in range(m.mtp_num_layers):
        last = goals[-1]
        ahead = jnp.roll(last.mask, -1, axis=1).at[:, -1].set(0.0) * same
        goals.append(Goal(jnp.roll(last.targets, -1, axis=1), ahead, total))
    where = (batch["inputs"], batch["positions"], batch["segments"])
    out = model(*where, None, goals)
    loss, lm_loss = out.losses[0]
    if m.num_experts > 1:
        layers = m.num_decoder_layers - m.first_num_dense_layers + m.mtp_num_layers
        loss += (
            m.load_balance_loss_weight * out.balance / layers * (jnp.sum(mask) / total)
        )
    for ahead in out.losses[1:]:
        loss += m.mtp_loss_scaling_factor / m.mtp_num_layers * ahead.loss
    return loss, lm_loss


# --- step -------------------------------------------------------------------------------------


class Pruning(NamedTuple):
    """N:M sparsity of some weights, whose masks are chosen anew on a schedule."""

    sparsity: Sparsity
    paths: tuple[str, ...]

    def masks(self, learned: nnx.State) -> dict[str, jax.Array]:
        flat = _by_path(learned)
        return {path: jnp.ones(flat[path].shape, bool) for path in self.paths}

    def refresh(self, masks, learned, step) -> dict[str, jax.Array]:
        flat = _by_path(learned)
        return {p: self.sparsity.refresh(m, flat[p], step) for p, m in masks.items()}


def _path(path: tuple) -> str:
    parts = [str(getattr(k, "key", "")) for k in path]
    return "/".join(p for p in parts if p)


def _by_path(tree: Any) -> dict[str, jax.Array]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_path(path): x for path, x in flat}


def prune(learned: nnx.State, masks: dict[str, jax.Array]) -> nnx.State:
    """Sets weights, or their gradients, to zero where a mask says so."""
    if not masks:
        return learned
    keep = lambda path, x: (
        jnp.where(masks[_path(path)], x, 0) if _path(path) in masks else x
    )
    return jax.tree_util.tree_map_with_path(keep, learned)


def initial(
    model: Transformer,
    t: Training,
    pruning: Pruning | None = None,
    layout: Layout | None = None,
) -> tuple[State, Parts]:
    """Returns the state that a run begins with, and the model taken apart."""
    parts = take_apart(model)
    if layout is not None:
        parts = Parts(parts.graph, *(layout.place(x) for x in parts[1:]))
    masks = pruning.masks(parts.learned) if pruning else {}
    start, opt = jnp.zeros((), jnp.int32), optimizer(t).init(parts.learned)
    state = State(start, parts.learned, parts.kept, opt, masks)
    return (layout.place(state, _names(state)) if layout else state), parts


def _names(state: State) -> list[tuple | None]:
    """Returns the logical axes of every array; a mask has those of its weight."""
    weights = dict(zip(_by_path(state.learned), names_of(state.learned)))
    others = names_of(state._replace(masks={}))
    return [*others, *(weights[path] for path in sorted(state.masks))]


class Setup(NamedTuple):
    """What a compiled step depends on besides its arguments; equal ones share a program."""

    m: Model
    t: Training
    graph: nnx.GraphDef
    seed: int
    pruning: Pruning | None = None
    layout: Layout | None = None


def make_step(
    m: Model,
    t: Training,
    parts: Parts,
    seed: int = 0,
    pruning: Pruning | None = None,
    layout: Layout | None = None,
):
    """Returns `step(state, batch) -> state, metrics`, compiled; the old state is used
    up."""
    setup = Setup(m, t, parts.graph, seed, pruning, layout)
    return lambda state, batch: run(setup, state, parts.random, batch)


@functools.partial(Program, static_argnums=0, donate_argnums=1)
def run(
    setup: Setup, state: State, random: nnx.State, batch: dict
) -> tuple[State, dict]:
    """Runs one step."""
    with using(setup.layout):
        state, metrics = _run(setup, state, random, batch)
    return (setup.layout.keep(state, _names(state)) if setup.layout else state), metrics


def _run(
    setup: Setup, state: State, random: nnx.State, batch: dict
) -> tuple[State, dict]:
    key = jax.random.fold_in(jax.random.key(setup.seed), state.step)
    masks = state.masks
    if setup.pruning:
        masks = setup.pruning.refresh(masks, state.learned, state.step)
    learned = prune(state.learned, masks)
    total = jnp.maximum(jnp.sum(batch["mask"]), 1).astype(jnp.float32)
    gradients = functools.partial(_gradients, setup, random, key, learned, total)
    if setup.t.gradient_accumulation_steps == 1:
        grads, kept, losses = gradients(state.kept, {**batch, "number": 0})
    else:
        zeros = jax.tree.map(jnp.zeros_like, learned)
        grads, kept, losses = _in_parts(setup, gradients, zeros, state.kept, batch)
    grads = prune(grads, masks)
    updates, opt = optimizer(setup.t, setup.seed).update(
        grads, state.optimizer, state.learned
    )
    metrics = {"loss": losses[1], "total_loss": losses[0], "grad_norm": norm(grads)}
    metrics["learning_rate"] = schedule(setup.t)(state.step)
    learned = optax.apply_updates(state.learned, updates)
    return State(state.step + 1, learned, kept, opt, masks), metrics


def _gradients(setup, random, key, learned, total, kept, batch):
    """Returns the gradients of a part of a batch, the statistics after it, and its two
    losses."""

    def loss_of(learned):
        noise = with_noise(random, jax.random.fold_in(key, batch["number"]))
        # New variables, which belong to this trace.
        here = jax.tree.map(lambda x: x, kept)
        model = Parts(setup.graph, together(learned), here, noise).whole()
        loss, lm_loss = loss_sums(
            setup.m, setup.t.z_loss_multiplier, model, batch, total
        )
        return loss, (lm_loss, take_apart(model).kept)

    (loss, (lm_loss, after)), grads = jax.value_and_grad(loss_of, has_aux=True)(learned)
    return grads, after, jnp.stack([loss, lm_loss])


def _in_parts(setup, gradients, zeros, kept, batch):
    """Returns the same for a batch in parts, one after the other."""

    def body(carry, part):
        grads, kept, losses = carry
        more, kept, extra = gradients(kept, part)
        return (accumulate_gradients(grads, more), kept, losses + extra), None

    pieces = setup.t.gradient_accumulation_steps
    cut = lambda a: a.reshape(pieces, a.shape[0] // pieces, *a.shape[1:])
    cuts = {**jax.tree.map(cut, batch), "number": jnp.arange(pieces)}
    return jax.lax.scan(body, (zeros, kept, jnp.zeros(2)), cuts)[0]


def make_eval(parts: Parts, layout: Layout | None = None):
    """Returns `evaluate(learned, kept, batch) -> sum of losses, number of tokens`,
    compiled."""
    return lambda *a: _evaluate(parts.graph, layout, parts.random, *a)


@functools.partial(Program, static_argnums=(0, 1))
def _evaluate(graph, layout, random, learned, kept, batch):
    noise = with_noise(random, jax.random.key(0))
    model = Parts(graph, together(learned), kept, noise).whole()
    mask = batch["mask"].astype(jnp.float32)
    goal = Goal(batch["targets"], mask, 1.0)
    where = (batch["inputs"], batch["positions"], batch["segments"])
    with using(layout):
        out = model(*where, None, [goal])
    return out.losses[0].nll, jnp.sum(mask)


def mean_loss(evaluate, learned, kept, batches) -> float:
    """Returns the mean loss of a token over all batches."""
    sums = [evaluate(learned, kept, batch) for batch in batches]
    return float(sum(s for s, _ in sums) / sum(n for _, n in sums))
