"""MoE: experts, of which every token sees a few; none is dropped.

    scores = router(x)                       softmax, or sigmoid with a bias for choosing
    choose the top k experts of each token, within its best groups
    sort the (token, expert) pairs by expert
    ragged_dot: each expert multiplies its own run of rows, however long
    unsort, weigh, add up

The load-balance loss is Switch's (arXiv 2101.03961, eq. 4): E sum_e f_e p_e, with f the
share of pairs and p the mean score of expert e; 1 when all are used alike.

Letters: N = B T tokens, E experts, k experts per token, D emb_dim, F moe_mlp_dim.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from midtread.kernels.gates import GATES
from midtread.lm import ring
from midtread.lm.config import Model
from midtread.lm.layers import Linear, vector


class Load(NamedTuple):
    """How much each expert is used."""

    share_E: jax.Array  # share of the pairs
    mean_E: jax.Array  # mean score


class Moe(nnx.Module):
    """A router, and the experts that it chooses from."""

    def __init__(self, m: Model, rngs: nnx.Rngs):
        E, D, F = m.num_experts, m.emb_dim, m.moe_mlp_dim
        self.gate = Linear(m, D, E, ("embed", None), rngs, m.mlp_bias)
        dtype = jnp.dtype(m.weight_dtype)
        # The fan-in is that of one expert.
        init = nnx.initializers.variance_scaling(
            1.0, "fan_in", "normal", batch_axis=(0,)
        )
        make = lambda names, *shape: nnx.Param(
            init(rngs.params(), shape, dtype), out_sharding=names, eager_sharding=False
        )
        self.wi_0 = make(("experts", "embed", "mlp"), E, D, F)
        self.wi_1 = make(("experts", "embed", "mlp"), E, D, F)
        self.wo = make(("experts", "mlp", "embed"), E, F, D)
        if m.mlp_bias:
            self.wi_0_bias = vector(m, (E, F), "experts", "mlp")
            self.wi_1_bias = vector(m, (E, F), "experts", "mlp")
            self.wo_bias = vector(m, (E, D), "experts", "embed")
        if m.routed_score_func == "sigmoid":  # DeepSeek-V3's, for choosing alone
            self.routed_bias = nnx.Param(jnp.zeros((E,), jnp.float32))
        self.m = m

    def __call__(self, x: jax.Array) -> tuple[jax.Array, "Load"]:
        """Sends x [B, T, D] through the experts; returns the sum and how much each was
        used."""
        B, T, D = x.shape
        x_ND = x.reshape(B * T, D)
        weights_Nk, chosen_Nk, load = self.route(x_ND)
        run = (
            functools.partial(ring.through_experts, self)
            if ring.is_on()
            else self.experts
        )
        return run(x_ND, weights_Nk, chosen_Nk).reshape(B, T, D), load

    def experts(self, x_ND, weights_Nk, chosen_Nk, first: jax.Array | int = 0):
        """Returns the weighted sum over the experts that are here, numbered from `first`:
        all of them, or a device's own, and then pairs of other experts add nothing."""
        m, count = self.m, self.wi_0.shape[0]
        is_all = count == m.num_experts
        pairs = chosen_Nk.reshape(-1)
        if not is_all:
            pairs = pairs - first
            pairs = jnp.where((pairs >= 0) & (pairs < count), pairs, count)
        order = jnp.argsort(pairs)  # stable: rows of an expert stay in their order
        rows = jnp.take(x_ND, order // m.num_experts_per_tok, axis=0)
        sizes = jnp.bincount(pairs, length=count).astype(jnp.int32)
        dtype = jnp.dtype(m.dtype)
        owners = jnp.take(pairs, order) if m.mlp_bias else None

        def grouped(a, name):
            w = jnp.asarray(getattr(self, name)[...], dtype)
            out = jax.lax.ragged_dot(a, w, sizes, preferred_element_type=dtype)
            if owners is None:
                return out
            bias = getattr(self, f"{name}_bias")[...].astype(dtype)
            return out + jnp.take(bias, owners, axis=0, mode="clip")

        gate = GATES[m.mlp_activation].formula
        out = grouped(gate(grouped(rows, "wi_0"), grouped(rows, "wi_1")), "wo")
        if not is_all:  # rows beyond all groups are undefined
            inside = jnp.arange(len(out)) < jnp.sum(sizes)
            out = jnp.where(inside[:, None], out, jnp.zeros_like(out))
        out = jnp.take(out, jnp.argsort(order), axis=0)
        out = out.reshape(*chosen_Nk.shape, x_ND.shape[1])
        return jnp.einsum("nkd,nk->nd", out, weights_Nk.astype(out.dtype))

    def route(self, x_ND: jax.Array):
        """Returns weights and numbers of the chosen experts [N, k], and the load."""
        m = self.m
        logits = self.gate(x_ND).astype(jnp.float32)
        score = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}
        scores_NE = score[m.routed_score_func](logits)
        choice_NE = jax.lax.stop_gradient(scores_NE)
        if m.routed_score_func == "sigmoid":
            choice_NE += jax.lax.stop_gradient(self.routed_bias[...])
        choice_NE = within_best_groups(m, choice_NE)
        _, chosen_Nk = jax.lax.top_k(choice_NE, m.num_experts_per_tok)
        weights_Nk = jnp.take_along_axis(scores_NE, chosen_Nk, axis=1)
        if m.norm_topk_prob:
            weights_Nk /= jnp.sum(weights_Nk, axis=1, keepdims=True) + 1e-20
        share_E = jnp.mean(
            jax.nn.one_hot(chosen_Nk, m.num_experts, dtype=jnp.float32), axis=(0, 1)
        )
        mean_E = jnp.mean(scores_NE / jnp.sum(scores_NE, axis=1, keepdims=True), axis=0)
        load = Load(share_E, mean_E)
        return weights_Nk * m.routed_scaling_factor, chosen_Nk, load

    def balance(self, loads: Sequence["Load"]) -> jax.Array:
        """Returns the load-balance loss of a batch, from the loads of its equal parts."""
        mean = lambda xs: sum(xs) / len(loads)
        share_E = mean([load.share_E for load in loads])
        mean_E = mean([load.mean_E for load in loads])
        return self.m.num_experts * jnp.sum(share_E * mean_E)


def within_best_groups(m: Model, choice_NE: jax.Array) -> jax.Array:
    """Excludes experts outside a token's best groups, where a group is as good as its two
    best experts together (DeepSeek-V3)."""
    if m.n_routing_groups == 1:
        return choice_NE
    groups = choice_NE.reshape(choice_NE.shape[0], m.n_routing_groups, -1)
    best = jax.lax.top_k(groups, min(2, groups.shape[-1]))[0].sum(-1)
    _, kept = jax.lax.top_k(best, m.topk_routing_group)
    is_kept = jnp.any(jax.nn.one_hot(kept, m.n_routing_groups, dtype=bool), axis=1)
    return jnp.where(is_kept[:, :, None], groups, -jnp.inf).reshape(choice_NE.shape)
