"""Loss: what the head makes of the stream, judged without ever holding all logits.

    nll     -log p(target) = log Z - logit of the target,  Z = sum exp(logits)
    loss    sum(mask nll) / total + z_weight sum(mask log(Z)^2) / total

Logits of 16,384 tokens over a vocabulary of 128,256 are 8.4 GB in float32, and so is their
gradient. Here a block of tokens has both only for as long as it takes: since the loss is a
sum over tokens, the gradient of a block's logits is known as soon as they are,

    dlogits = mask / total ((1 + 2 z_weight log Z) softmax(logits) - onehot(target))

so the head is run, and its gradients are taken, one block after the other, in the forward:
three matmuls a token, as without blocks, nothing twice. The gradient of the head's weight is
summed in float32. Blocks are cut along the sequence, so that every device of a mesh has its
rows in each.

The head is whatever module makes logits: quantized, if a rule says so, with the ranges of a
block where ranges come from data. One that keeps statistics, or rounds at random, is run
whole, and so is one whose logits are few.

Letters: B batch, T tokens, D emb_dim, V vocab_size, n blocks of t tokens.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from midtread.providers.delayed import (
    OverwriteWithGradient,
    accumulate_gradients,
    is_overwritten,
)

LEARNED = (nnx.Param, OverwriteWithGradient)
FEW = 2**22  # up to so many logits are computed all at once
BLOCK = 2**27  # logits of a block: 512 MiB of float32


class Goal(NamedTuple):
    """The targets that logits are judged by."""

    targets: jax.Array  # [B, T]
    mask: jax.Array  # [B, T] which of them count, float32
    total: Any  # tokens of the whole batch, of which this may be a part
    z_weight: float = 0.0


class Loss(NamedTuple):
    """The loss of a batch, or of a part of one."""

    loss: jax.Array  # with z_weight's part
    nll: jax.Array  # without


def cross_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns -log p(target) and log Z of every position."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return log_z - chosen, log_z


def judge(head: nnx.Module, call: Callable, V: int, x: jax.Array, goal: Goal) -> Loss:
    """Returns the loss of the logits `call(head, x)` [B T V], for a stream x [B T D].

    Args:
        head: the module with the head's weights.
        call: computes logits from the module and x.
    """
    num_logits = goal.targets.size * V
    if why_whole(head, num_logits) is None:
        return in_blocks(head, call, math.ceil(num_logits / BLOCK), x, goal)
    nll, log_z = cross_entropy(call(head, x).astype(jnp.float32), goal.targets)
    mean = jnp.sum(nll * goal.mask) / goal.total
    loss = mean + goal.z_weight * jnp.sum(log_z**2 * goal.mask) / goal.total
    return Loss(loss, mean)


def why_whole(head: nnx.Module, num_logits: int) -> str | None:
    """Returns why a head is run on all tokens at once, or None if it is run in blocks."""
    if num_logits <= FEW:
        return f"{num_logits:,} logits are few"
    _, _, rest = nnx.split(head, LEARNED, ...)
    if jax.tree.leaves(rest):
        return "the head keeps statistics or rounds at random, in the order of calls"
    return None


def in_blocks(head: nnx.Module, call: Callable, num_blocks: int, x, goal: Goal) -> Loss:
    """Computes the same as `judge` in `num_blocks` blocks of tokens, with the gradients in
    the forward."""
    graph, learned, rest = nnx.split(head, LEARNED, ...)

    def logits_of(learned, x):
        return call(nnx.merge(graph, learned, rest), x).astype(jnp.float32)

    T = x.shape[1]
    size = math.ceil(T / num_blocks)

    def cut(a):  # [B T ...] -> [n B t ...]
        a = jnp.pad(a, [(0, 0), (0, -T % size)] + [(0, 0)] * (a.ndim - 2))
        a = a.reshape(a.shape[0], -1, size, *a.shape[2:])
        return jnp.moveaxis(a, 1, 0)

    def judge_block(learned, total, block):
        """Returns a block's two sums, the head's pullback, and the gradient of its
        logits."""
        x, targets, mask = block
        logits, pull = jax.vjp(logits_of, learned, x)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
        chosen = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
        sums = [jnp.sum((log_z - chosen) * mask), jnp.sum(log_z**2 * mask)]
        p = jnp.exp(logits - log_z[..., None])
        tilt = 1 + 2 * goal.z_weight * log_z[..., None]
        weight = (mask / total)[..., None]
        return (
            jnp.stack(sums),
            pull,
            weight * jnp.where(is_target, tilt * p - 1, tilt * p),
        )

    def scored(sums, total):
        nll, square = sums / total
        return nll + goal.z_weight * square, nll

    @jax.custom_vjp
    def run(learned, x, targets, mask, total):
        near = _cast(learned, x.dtype)
        one = lambda sums, block: (sums + judge_block(near, total, block)[0], None)
        blocks = tuple(map(cut, (x, targets, mask)))
        return scored(jax.lax.scan(one, jnp.zeros(2), blocks)[0], total)

    def forward(learned, x, targets, mask, total):
        near = _cast(learned, x.dtype)

        def one(carry, block):
            sums, grads = carry
            more, pull, dlogits = judge_block(near, total, block)
            dlearned, dx = pull(dlogits)
            dlearned = _cast(dlearned, jnp.float32)
            return (sums + more, accumulate_gradients(grads, dlearned)), dx

        zeros = jax.tree.map(jnp.zeros_like, _cast(learned, jnp.float32))
        blocks = tuple(map(cut, (x, targets, mask)))
        (sums, grads), dx = jax.lax.scan(one, (jnp.zeros(2), zeros), blocks)
        dx = jnp.moveaxis(dx, 0, 1).reshape(x.shape[0], -1, x.shape[-1])[:, :T]
        grads = jax.tree.map(lambda g, a: g.astype(a.dtype), grads, learned)
        return scored(sums, total), (grads, dx)

    def backward(kept, gs):
        grads, dx = kept
        g, _ = gs  # nll is only reported, so it has no gradient
        times = lambda d: (d * g).astype(d.dtype)
        return _of_weights(times, grads), times(dx), None, None, None

    run.defvjp(forward, backward)
    total = jnp.asarray(goal.total, jnp.float32)
    return Loss(*run(learned, x, goal.targets, goal.mask, total))


def _of_weights(fn: Callable, tree: Any) -> Any:
    """Applies `fn` to every weight; arrays that are overwritten with their gradient stay as
    they are."""
    one = lambda path, a: a if is_overwritten(path) else fn(a)
    return jax.tree_util.tree_map_with_path(one, tree)


def _cast(learned: Any, dtype: Any) -> Any:
    """Casts the weights to `dtype`."""
    return _of_weights(lambda a: a.astype(dtype), learned)
