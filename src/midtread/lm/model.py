"""Model: a decoder of today, dense or with experts (`lm/moe.py`).

    x = embed(tokens)
    every layer:  x += attention(norm(x));  x += mlp(norm(x))
    logits = head(norm(x))

Modules are named as MaxText names them (`decoder/layers/self_attention/query`), so that
rules and files written for it find their sites. Layers are one module with stacked weights
under a scan, or a list. Every matmul with a weight is a `lax.dot_general` or `ragged_dot`;
attention's own two are einsums, which no preset touches.

Weights are kept in `weight_dtype` and cast where they are used; norms, softmax and logits
are float32. Every weight carries logical axis names as sharding metadata ("embed", "heads",
"mlp", "vocab", "experts", "layers"), for whoever has a mesh.

Letters: B batch, T tokens, S tokens in the cache, D emb_dim, H query heads, K kv heads,
G = H / K, h head_dim, F mlp_dim, R kv_lora_rank, V vocab_size, L layers.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from midtread.kernels import choose
from midtread.lm import cache as kv
from midtread.lm import rope, split
from midtread.lm.config import Model
from midtread.lm.gather import with_weights
from midtread.lm.mesh import Layout, keep_rows
from midtread.numerics.qarray import QArray

INIT = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")
POLICIES = {
    "full": None,
    "minimal": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


STACKED = {nnx.PARTITION_NAME: "layers"}


class Place(NamedTuple):
    """Where each token of a batch stands."""

    positions: jax.Array  # [B, T] in its document
    segments: jax.Array | None = None  # [B, T] which document of the row; 0 is padding


def named(init, *names: str | None):
    """An initializer whose array knows its axes; no mesh is asked for to make it."""
    return nnx.with_partitioning(init, names, eager_sharding=False)


class Linear(nnx.Module):
    """x @ kernel, in the compute dtype whatever the kernel is kept in."""

    def __init__(self, m: Model, din: int, dout: int, names: tuple, rngs: nnx.Rngs):
        init = named(INIT, *names)
        self.kernel = nnx.Param(
            init(rngs.params(), (din, dout), jnp.dtype(m.weight_dtype))
        )
        self.dtype = jnp.dtype(m.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = jnp.asarray(self.kernel[...], self.dtype)
        sums = (((x.ndim - 1,), (0,)), ((), ()))
        return jax.lax.dot_general(x, kernel, sums, preferred_element_type=self.dtype)


class Embed(nnx.Embed):
    """Rows of a table. Their gradients are summed in the table's dtype: a bfloat16 sum of
    the many uses of a frequent token loses most of them, and no GPU adds bfloat16 to
    memory that others are adding to without trying again and again."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        rows = jnp.take(self.embedding[...], tokens, axis=0)
        return rows.astype(self.dtype)


def norm(m: Model, width: int, rngs: nnx.Rngs, name: str | None = None) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        width,
        epsilon=m.normalization_layer_epsilon,
        dtype=jnp.dtype(m.dtype),
        param_dtype=jnp.dtype(m.weight_dtype),
        scale_init=named(nnx.initializers.ones_init(), name),
        rngs=rngs,
    )


def attend(q, k, v, mask, gain: float = 1.0) -> jax.Array:
    """softmax(gain q k^T / sqrt(h)) v: q [B T H h], k and v [B S K h] or cached, mask
    [B T S]."""
    B, T, H, h = q.shape
    k_codes, k_scale = kv.codes(k, q.dtype)
    v_codes, v_scale = kv.codes(v, q.dtype)
    K = k_codes.shape[2]
    q = q.reshape(B, T, K, H // K, h)
    wide = {"preferred_element_type": jnp.float32}
    logits = jnp.einsum("btkgh,bskh->bkgts", q, k_codes, **wide) * (gain * h**-0.5)
    if k_scale is not None:  # [B S K 1]: of the codes that were summed over h
        logits *= k_scale.transpose(0, 2, 3, 1)[:, :, None]
    logits = jnp.where(mask[:, None, None], logits, -1e30)
    weights = jax.nn.softmax(logits, axis=-1)
    if v_scale is not None:  # varies along the sum over s: goes into the weights
        weights *= v_scale.transpose(0, 2, 3, 1)[:, :, None]
    out = jnp.einsum("bkgts,bskh->btkgh", weights.astype(q.dtype), v_codes)
    return out.reshape(B, T, H, v_codes.shape[-1])


def seen_by(place: Place, cache: Any) -> jax.Array:
    """[B, T, S]: which earlier tokens each token may look at."""
    if cache is not None:
        slots = jnp.arange(cache.length)
        return slots[None, None, :] <= place.positions[:, :, None]
    T = place.positions.shape[1]
    causal = jnp.tril(jnp.ones((T, T), bool))[None]
    if place.segments is None:
        return causal
    same = place.segments[:, :, None] == place.segments[:, None, :]
    return causal & same


class Attention(nnx.Module):
    """Grouped-query attention."""

    def __init__(self, m: Model, rngs: nnx.Rngs):
        H, K, h, D = m.num_query_heads, m.num_kv_heads, m.head_dim, m.emb_dim
        self.query = Linear(m, D, H * h, ("embed", "heads"), rngs)
        self.key = Linear(m, D, K * h, ("embed", "kv_heads"), rngs)
        self.value = Linear(m, D, K * h, ("embed", "kv_heads"), rngs)
        self.out = Linear(m, H * h, D, ("heads", "embed"), rngs)
        if m.use_qk_norm:
            self.query_norm, self.key_norm = norm(m, h, rngs), norm(m, h, rngs)
        self.shape, self.rope, self.norms = (H, K, h), rope.of(m), m.use_qk_norm

    def __call__(self, x: jax.Array, place: Place, cache: Any):
        (H, K, h), (B, T, _) = self.shape, x.shape
        q = self.query(x).reshape(B, T, H, h)
        k = self.key(x).reshape(B, T, K, h)
        v = self.value(x).reshape(B, T, K, h)
        if self.norms:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = (self.rope.rotate(a, place.positions) for a in (q, k))
        mask = seen_by(place, cache)
        if cache is not None:
            cache = cache.write(place.positions, k=k, v=v)
            k, v = cache.rows["k"], cache.rows["v"]
        out, gain = None, self.rope.logits_gain
        if T == 1 and isinstance(k, QArray) and isinstance(v, QArray):
            out = choose.attend(q, k, v, place.positions[:, 0] + 1, gain)
        if out is None:
            out = attend(q, k, v, mask, gain)
        return self.out(out.reshape(B, T, H * h)), cache


class LatentAttention(nnx.Module):
    """DeepSeek's MLA: keys and values are read off a narrow latent, which is what a
    cache keeps, besides one rotary key that all heads share (arXiv 2405.04434)."""

    def __init__(self, m: Model, rngs: nnx.Rngs):
        H, D, R = m.num_query_heads, m.emb_dim, m.kv_lora_rank
        nope, turned, vh = m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim
        if m.q_lora_rank:
            self.wq_a = Linear(m, D, m.q_lora_rank, ("embed", "q_lora"), rngs)
            self.q_norm = norm(m, m.q_lora_rank, rngs)
        width = m.q_lora_rank or D
        axis = "q_lora" if m.q_lora_rank else "embed"
        self.wq_b = Linear(m, width, H * (nope + turned), (axis, "heads"), rngs)
        self.wkv_a = Linear(m, D, R + turned, ("embed", "kv_lora"), rngs)
        self.kv_norm = norm(m, R, rngs)
        self.wkv_b = Linear(m, R, H * (nope + vh), ("kv_lora", "heads"), rngs)
        self.out = Linear(m, H * vh, D, ("heads", "embed"), rngs)
        self.sizes, self.rope = (H, R, nope, turned, vh), rope.of(m)
        self.has_bottleneck = bool(m.q_lora_rank)

    def __call__(self, x: jax.Array, place: Place, cache: Any):
        (H, R, nope, turned, vh), (B, T, _) = self.sizes, x.shape
        low = self.q_norm(self.wq_a(x)) if self.has_bottleneck else x
        q = self.wq_b(low).reshape(B, T, H, nope + turned)
        q_rope = self.rope.rotate(q[..., nope:], place.positions)
        q = jnp.concatenate([q[..., :nope], q_rope], -1)
        both = self.wkv_a(x)
        latent = self.kv_norm(both[..., :R])[:, :, None]
        k_rope = self.rope.rotate(both[:, :, None, R:], place.positions)
        mask = seen_by(place, cache)
        if cache is not None:
            cache = cache.write(place.positions, latent=latent, k_rope=k_rope)
            latent = kv.restore(cache.rows["latent"], x.dtype)
            k_rope = kv.restore(cache.rows["k_rope"], x.dtype)
        S = latent.shape[1]
        wide = self.wkv_b(latent[:, :, 0]).reshape(B, S, H, nope + vh)
        k_rope = jnp.broadcast_to(k_rope, (B, S, H, turned))
        k = jnp.concatenate([wide[..., :nope], k_rope], -1)
        out = attend(q, k, wide[..., nope:], mask, self.rope.logits_gain)
        return self.out(out.reshape(B, T, H * vh)), cache


class Mlp(nnx.Module):
    """SwiGLU."""

    def __init__(self, m: Model, width: int, rngs: nnx.Rngs):
        self.wi_0 = Linear(m, m.emb_dim, width, ("embed", "mlp"), rngs)
        self.wi_1 = Linear(m, m.emb_dim, width, ("embed", "mlp"), rngs)
        self.wo = Linear(m, width, m.emb_dim, ("mlp", "embed"), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.wo(jax.nn.silu(self.wi_0(x)) * self.wi_1(x))


class Layer(nnx.Module):
    """One layer; `sparse` ones have experts."""

    def __init__(self, m: Model, sparse: bool, rngs: nnx.Rngs):
        self.pre_self_attention_layer_norm = norm(m, m.emb_dim, rngs, "embed")
        attention = LatentAttention if m.attention_type == "mla" else Attention
        self.self_attention = attention(m, rngs)
        self.post_self_attention_layer_norm = norm(m, m.emb_dim, rngs, "embed")
        self.sparse = sparse
        if sparse:
            from midtread.lm.moe import Moe  # which takes its parts from here

            self.MoeBlock_0 = Moe(m, rngs)
            if m.shared_experts:
                width = m.shared_experts * m.moe_mlp_dim
                self.shared_experts = Mlp(m, width, rngs)
        else:
            self.mlp = Mlp(m, m.mlp_dim, rngs)

    def __call__(self, x: jax.Array, place: Place, cache: Any):
        """The stream after this layer, its router's loss, its cache."""
        count = split.parts() if cache is None else 1
        if count == 1:
            x, cache = self.attention(x, place, cache)
            x, load = self.feed(x)
            return x, self.balance([load]), cache
        first = lambda part: self.attention(part[0], part[1], None)[0]
        xs = split.staggered(first, split.cut((x, place), count))
        made = split.staggered(self.feed, xs)
        xs, loads = zip(*made)
        return split.join(xs), self.balance(loads), cache

    def attention(self, x: jax.Array, place: Place, cache: Any):
        y, cache = self.self_attention(
            self.pre_self_attention_layer_norm(x), place, cache
        )
        return keep_rows(x + y), cache

    def feed(self, x: jax.Array):
        """The stream after the MLP or the experts, and the router's load if any."""
        y = self.post_self_attention_layer_norm(x)
        if not self.sparse:
            return keep_rows(x + self.mlp(y)), None
        routed, load = self.MoeBlock_0(y)
        if hasattr(self, "shared_experts"):
            routed = routed + self.shared_experts(y)
        return keep_rows(x + routed), load

    def balance(self, loads) -> jax.Array:
        return self.MoeBlock_0.balance(loads) if self.sparse else jnp.zeros(())


class Stack(nnx.Module):
    """Layers of one kind that follow each other: a list of modules, not scanned."""

    def __init__(self, m: Model, sparse: bool, count: int, rngs: nnx.Rngs):
        for i in range(count):
            setattr(self, str(i), Layer(m, sparse, rngs))
        self.count = count

    def __iter__(self):
        return (getattr(self, str(i)) for i in range(self.count))


def stack(m: Model, sparse: bool, count: int, rngs: nnx.Rngs) -> nnx.Module:
    if not m.scan_layers:
        return Stack(m, sparse, count, rngs)
    make = nnx.vmap(
        lambda rngs: Layer(m, sparse, rngs),
        in_axes=0,
        transform_metadata=STACKED,
    )
    return make(rngs.split(count))


class Decoder(nnx.Module):
    """All layers, the last norm and the head."""

    def __init__(self, m: Model, rngs: nnx.Rngs):
        first = m.first_num_dense_layers if m.num_experts > 1 else 0
        kinds = {  # MaxText's names: what a rule's module_path is written for
            "dense_layers": (False, first),
            "moe_layers": (True, m.num_decoder_layers - first),
        }
        if not first:
            kinds = {"layers": (m.num_experts > 1, m.num_decoder_layers)}
        self.kinds = tuple((k, count) for k, (_, count) in kinds.items() if count)
        for name, count in self.kinds:
            setattr(self, name, stack(m, kinds[name][0], count, rngs))
        self.decoder_norm = norm(m, m.emb_dim, rngs, "embed")
        if not m.logits_via_embedding:
            self.logits_dense = Linear(
                m, m.emb_dim, m.vocab_size, ("embed", "vocab"), rngs
            )
        self.scanned, self.remat = m.scan_layers, m.remat_policy

    def __call__(self, x: jax.Array, place: Place, caches: dict | None):
        balance, written = jnp.zeros(()), {}
        for name, _ in self.kinds:
            cache = None if caches is None else caches[name]
            run = self._scan if self.scanned else self._loop
            x, more, written[name] = run(name, x, place, cache)
            balance += more
        return x, balance, None if caches is None else written

    def _one(self, name):
        one = with_weights(lambda layer, x, place, cache: layer(x, place, cache), name)
        if self.remat == "none":
            return one
        return nnx.remat(one, policy=POLICIES[self.remat])

    def _loop(self, name, x, place, caches):
        balance, written = jnp.zeros(()), []
        for i, layer in enumerate(getattr(self, name)):
            cache = (
                None if caches is None else jax.tree.map(lambda a, i=i: a[i], caches)
            )
            x, more, cache = self._one(f"{name}/{i}")(layer, x, place, cache)
            balance, written = balance + more, [*written, cache]
        if caches is not None:
            written = jax.tree.map(lambda *a: jnp.stack(a), *written)
        return x, balance, written

    def _scan(self, name, x, place, caches):
        layers = getattr(self, name)

        def body(carry, layer, cache, place):
            x, balance = carry
            x, more, cache = self._one(name)(layer, x, place, cache)
            return (x, balance + more), cache

        # random streams are stacked like weights, or run on from layer to layer
        counts = jax.tree.leaves(nnx.state(layers, nnx.RngCount))
        runs_on = any(count.ndim == 0 for count in counts)
        own = nnx.StateAxes({nnx.RngState: nnx.Carry, ...: 0}) if runs_on else 0
        scan = nnx.scan(
            body,
            in_axes=(nnx.Carry, own, 0, None),
            out_axes=(nnx.Carry, 0),
            transform_metadata=STACKED,
        )
        (x, balance), written = scan((x, jnp.zeros(())), layers, caches, place)
        return x, balance, written


class MtpBlock(nnx.Module):
    """Multi-token prediction (arXiv 2412.19437, 2.2): from the stream at t and the
    embedding of token t + 1, one more layer predicts token t + 2."""

    def __init__(self, m: Model, rngs: nnx.Rngs):
        self.embedding_norm = norm(m, m.emb_dim, rngs, "embed")
        self.hidden_norm = norm(m, m.emb_dim, rngs, "embed")
        self.projection = Linear(m, 2 * m.emb_dim, m.emb_dim, (None, "embed"), rngs)
        self.transformer_layer = Layer(m, m.num_experts > 1, rngs)

    def __call__(self, hidden: jax.Array, embedded: jax.Array, place: Place):
        both = [self.hidden_norm(hidden), self.embedding_norm(embedded)]
        x = self.projection(jnp.concatenate(both, -1))
        one = lambda layer, x: layer(x, place, None)
        run = with_weights(one, "mtp_block/transformer_layer", "mtp_block")
        x, balance, _ = run(self.transformer_layer, x)
        return x, balance


class Output(NamedTuple):
    logits: jax.Array  # [B, T, V] float32
    balance: jax.Array  # the routers' loss
    ahead: tuple[jax.Array, ...] = ()  # of each MTP head: logits for one token further
    cache: dict | None = None


class Transformer(nnx.Module):
    """tokens [B, T] -> Output."""

    def __init__(self, m: Model, rngs: nnx.Rngs):
        self.token_embedder = Embed(
            m.vocab_size,
            m.emb_dim,
            dtype=jnp.dtype(m.dtype),
            param_dtype=jnp.dtype(m.weight_dtype),
            embedding_init=named(
                nnx.initializers.normal(m.emb_dim**-0.5), "vocab", "embed"
            ),
            rngs=rngs,
        )
        self.decoder = Decoder(m, rngs)
        self.num_ahead = m.mtp_num_layers
        for i in range(m.mtp_num_layers):
            setattr(self, f"mtp_block_{i}" if i else "mtp_block", MtpBlock(m, rngs))
        self.tied, self.gain = m.logits_via_embedding, m.emb_dim**0.5

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        cache: dict | None = None,
    ) -> Output:
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        place = Place(positions, segments)
        embedded = self.embed(tokens)
        x, balance, cache = self.decoder(embedded, place, cache)
        ahead = []
        if cache is None:
            hidden = x
            for i in range(self.num_ahead):
                block = getattr(self, f"mtp_block_{i}" if i else "mtp_block")
                embedded = jnp.roll(embedded, -1, axis=1)
                hidden, more = block(hidden, embedded, place)
                balance += more
                ahead.append(self.head(hidden))
        return Output(self.head(x), balance, tuple(ahead), cache)

    def embed(self, tokens: jax.Array) -> jax.Array:
        # tied rows are small, as a head wants them; the stream wants variance 1
        gain = jnp.asarray(self.gain, self.token_embedder.dtype)
        return keep_rows(self.token_embedder(tokens) * gain)

    def head(self, x: jax.Array) -> jax.Array:
        x = self.decoder.decoder_norm(x)
        if self.tied:
            return self.token_embedder.attend(x).astype(jnp.float32)
        return self.decoder.logits_dense(x).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def _initial(m: Model, key: jax.Array) -> nnx.State:
    return nnx.state(Transformer(m, nnx.Rngs(key)), nnx.Param)


def create(m: Model, seed: int = 0, layout: Layout | None = None) -> Transformer:
    """A model with random weights, each part made on the device where it will lie."""
    model = abstract(m)
    make = _initial
    if layout is not None:
        where = layout.shardings(nnx.state(model, nnx.Param))
        make = jax.jit(_initial, static_argnums=0, out_shardings=where)
    nnx.update(model, make(m, jax.random.key(seed)))
    return model


def abstract(m: Model) -> Transformer:
    """The model with shapes in place of weights: any size, on any machine."""
    return nnx.eval_shape(lambda: Transformer(m, nnx.Rngs(0)))


def parameters(model: nnx.Module) -> int:
    """How many weights."""
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    return sum(int(x.size) for x in leaves)
