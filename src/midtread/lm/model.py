"""Model: a decoder of today, dense or with experts (`lm/moe.py`).

    x = embed(tokens)
    every layer:  x += attention(norm(x));  x += mlp(norm(x))
    logits = head(norm(x))

Modules are named as MaxText names them (`decoder/layers/self_attention/query`), so that
rules and files written for it find their sites. Layers are one module with stacked weights
under a scan, or a list. Every matmul with a weight is a `lax.dot_general` or `ragged_dot`;
attention's own two, which no preset touches, are in `lm/attend.py`.

Weights are kept in `weight_dtype` and cast where they are used; norms, softmax and logits
are float32. Every weight carries logical axis names as sharding metadata ("embed", "heads",
"mlp", "vocab", "experts", "layers"), for whoever has a mesh.

Letters: B batch, T tokens, V vocab_size.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from midtread.kernels import environment
from midtread.kernels.attention import SAVED
from midtread.lm import split
from midtread.lm.attention import Attention
from midtread.lm.config import Model
from midtread.lm.gather import with_weights
from midtread.lm.latent import LatentAttention
from midtread.lm.layers import (
    Embed,
    Linear,
    Open,
    close,
    collect_in_a_step,
    enter,
    gated,
    named,
    norm,
)
from midtread.lm.loss import Goal, Loss, judge
from midtread.lm.mesh import Layout, keep_rows
from midtread.lm.moe import Moe
from midtread.lm.seen import Place, document_starts
from midtread.ops import training

saved = jax.checkpoint_policies


def _matmuls_and(*names: str):
    """Returns a policy that keeps results of matmuls, and what has one of these names."""
    named = saved.save_only_these_names(training.OUT, training.SEEN, *names, *SAVED)
    return saved.save_from_both_policies(saved.dots_with_no_batch_dims_saveable, named)


POLICIES = {
    "full": None,
    "minimal": _matmuls_and(),
    "minimal_with_quantization": _matmuls_and(training.KEPT, training.WEIGHT),
    "quantized": saved.save_only_these_names(training.KEPT, training.SEEN, *SAVED),
}


STACKED = {nnx.PARTITION_NAME: "layers"}


class Mlp(nnx.Module):
    """A gated MLP: SwiGLU, or with another activation."""

    def __init__(self, m: Model, width: int, rngs: nnx.Rngs):
        self.wi_0 = Linear(m, m.emb_dim, width, ("embed", "mlp"), rngs, m.mlp_bias)
        self.wi_1 = Linear(m, m.emb_dim, width, ("embed", "mlp"), rngs, m.mlp_bias)
        self.wo = Linear(m, width, m.emb_dim, ("mlp", "embed"), rngs, m.mlp_bias)
        self.activation = m.mlp_activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.wo(gated(x, self.wi_0, self.wi_1, self.activation))


class Layer(nnx.Module):
    """One layer. It has experts if `sparse`, and a window if `is_local`; None for
    `is_local` means that only some of the layers that are scanned together have one.

    The norm before the MLP is called post_self_attention_layer_norm, as MaxText has it; those
    after attention and MLP, where a model has them, are post_attention_norm and
    post_mlp_norm.
    """

    def __init__(
        self, m: Model, sparse: bool, rngs: nnx.Rngs, is_local: bool | None = False
    ):
        make_norm = lambda: norm(m, m.emb_dim, rngs, "embed")
        self.is_before = m.norm_placement != "post"
        self.is_after = m.norm_placement != "pre"
        if self.is_before:
            self.pre_self_attention_layer_norm = make_norm()
        attention = LatentAttention if m.attention_type == "mla" else Attention
        self.self_attention = attention(m, rngs, is_local)
        if self.is_before:
            self.post_self_attention_layer_norm = make_norm()
        if self.is_after:
            self.post_attention_norm, self.post_mlp_norm = make_norm(), make_norm()
        self.sparse = sparse
        if sparse:
            self.MoeBlock_0 = Moe(m, rngs)
            if m.shared_experts:
                width = m.shared_experts * m.moe_mlp_dim
                self.shared_experts = Mlp(m, width, rngs)
        else:
            self.mlp = Mlp(m, m.mlp_dim, rngs)

    def __call__(self, stream: jax.Array | Open, place: Place, cache: Any):
        """Returns the stream after this layer, its router's loss, and its cache. With a cache
        the last addition is left to the norm that comes next."""
        count = split.parts() if cache is None else 1
        if count == 1:
            stream, cache = self.attention(stream, place, cache)
            stream, load = self.feed(stream, cache)
            stream = close(stream) if cache is None else stream
            return stream, self.balance([load]), cache
        # `is_local` is about the layer, and has no rows to cut.
        local, place = (
            place.is_local,
            place._replace(is_local=None),
        )
        first = lambda part: close(
            self.attention(part[0], part[1]._replace(is_local=local), None)[0]
        )

        def second(x):
            out, load = self.feed(x)
            return close(out), load

        xs = split.staggered(first, split.cut((stream, place), count))
        outputs = split.staggered(second, xs)
        xs, loads = zip(*outputs)
        return split.join(xs), self.balance(loads), cache

    def attention(self, stream: jax.Array | Open, place: Place, cache: Any):
        """Returns the stream after attention, and the cache."""
        norm = self.pre_self_attention_layer_norm if self.is_before else None
        x, y = enter(stream, norm)
        with collect_in_a_step(stream, cache) as forms:
            y, cache = self.self_attention(y, place, cache)
        y = self.post_attention_norm(y) if self.is_after else y
        return Open(x, y, forms.of(y).pending), cache

    def feed(self, stream: jax.Array | Open, cache: Any = None):
        """Returns the stream after the MLP or the experts, and the router's load if any."""
        norm = self.post_self_attention_layer_norm if self.is_before else None
        x, y = enter(stream, norm)
        load = None
        with collect_in_a_step(stream, cache) as forms:
            if self.sparse:
                out, load = self.MoeBlock_0(y)
                if hasattr(self, "shared_experts"):
                    out = out + self.shared_experts(y)
            else:
                out = self.mlp(y)
        out = self.post_mlp_norm(out) if self.is_after else out
        return Open(x, out, forms.of(out).pending), load

    def balance(self, loads) -> jax.Array:
        """Returns the loss of the router, zero without one."""
        return self.MoeBlock_0.balance(loads) if self.sparse else jnp.zeros(())


class Stack(nnx.Module):
    """Layers of one kind that follow each other, as a list of modules."""

    def __init__(self, layers: Sequence[Layer]):
        for i, layer in enumerate(layers):
            setattr(self, str(i), layer)
        self.count = len(layers)

    def __iter__(self):
        return (getattr(self, str(i)) for i in range(self.count))


def stack(m: Model, sparse: bool, local: Sequence[bool], rngs: nnx.Rngs) -> nnx.Module:
    """Returns layers of one kind, one for each of `local`, which says whether it has a
    window."""
    if not m.scan_layers:
        return Stack([Layer(m, sparse, rngs, is_local) for is_local in local])
    is_local = local[0] if len(set(local)) == 1 else None
    make = nnx.vmap(
        lambda rngs: Layer(m, sparse, rngs, is_local),
        in_axes=0,
        transform_metadata=STACKED,
    )
    return make(rngs.split(len(local)))


FEW = 8  # up to so many layers are worth compiling one by one


def _unrolled(asked: int, layers: int) -> int:
    """Returns how many layers of a scan are compiled one by one.

    A scan hands a layer a slice of every stack of weights, and puts its gradients into
    another: copies that XLA does not get rid of (10 ms of 211 in bfloat16, 24 of 168 in int8,
    four layers of Llama-8B on an H200). Where all layers are unrolled there are none.
    """
    if asked:
        return min(asked, layers)
    is_gpu = environment.here().why_not("nvidia") is None
    return layers if is_gpu and layers <= FEW else 1


def is_unrolled(m: Model) -> bool:
    """Returns whether layers are stacked, and all of them compiled one by one."""
    first = m.first_num_dense_layers if m.num_experts > 1 else 0
    counts = [n for n in (first, m.num_decoder_layers - first) if n]
    is_whole = all(_unrolled(m.scan_unroll, n) == n for n in counts)
    return m.scan_layers and m.num_decoder_layers > 1 and is_whole


class Decoder(nnx.Module):
    """All layers, the last norm and the head."""

    def __init__(self, m: Model, rngs: nnx.Rngs):
        first = m.first_num_dense_layers if m.num_experts > 1 else 0
        kinds = {  # names are MaxText's, which rules are written for
            "dense_layers": (False, m.has_window[:first]),
            "moe_layers": (True, m.has_window[first:]),
        }
        if not first:
            kinds = {"layers": (m.num_experts > 1, m.has_window)}
        self.kinds = tuple((k, local) for k, (_, local) in kinds.items() if local)
        for name, local in self.kinds:
            setattr(self, name, stack(m, kinds[name][0], local, rngs))
        self.decoder_norm = norm(m, m.emb_dim, rngs, "embed")
        if not m.logits_via_embedding:
            self.logits_dense = Linear(
                m, m.emb_dim, m.vocab_size, ("embed", "vocab"), rngs
            )
        self.scanned = m.scan_layers
        self.remat = None if m.keeps_all else m.remat_policy
        self.unroll = m.scan_unroll

    def __call__(self, x: jax.Array, place: Place, caches: dict | None):
        balance, written = jnp.zeros(()), {}
        for name, local in self.kinds:
            cache = None if caches is None else caches[name]
            if self.scanned:
                results = self._scan(name, x, place, cache, local)
            else:
                results = self._loop(name, x, place, cache)
            x, more, written[name] = results
            balance += more
        return x, balance, None if caches is None else written

    def _one(self, name, in_a_loop=False):
        """Returns a function that runs one layer.

        Where layers are a loop of the compiled program, the backward is another, and XLA
        cannot take from the first what the second computes again. No barrier is needed then,
        and without one a step is faster (4 ms of 253, 8 layers of Llama-8B on an H200)."""
        one = with_weights(lambda layer, x, place, cache: layer(x, place, cache), name)
        if self.remat is None:
            return one
        return nnx.remat(one, prevent_cse=not in_a_loop, policy=POLICIES[self.remat])

    def _loop(self, name, x, place, caches):
        balance, written = jnp.zeros(()), []
        for i, layer in enumerate(getattr(self, name)):
            cache = None if caches is None else caches[i]
            x, more, cache = self._one(f"{name}/{i}")(layer, x, place, cache)
            balance, written = balance + more, [*written, cache]
        return x, balance, written

    def _scan(self, name, x, place, caches, local):
        layers = getattr(self, name)
        differ = jnp.asarray(local) if len(set(local)) > 1 else None
        unroll = _unrolled(self.unroll, len(local))
        one = self._one(name, in_a_loop=unroll == 1 < len(local))

        def body(carry, layer, cache, place, is_local):
            x, balance = carry
            place = place._replace(is_local=is_local)
            x, more, cache = one(layer, x, place, cache)
            return (close(x), balance + more), cache

        # Random streams are stacked like weights, or one stream runs from layer to layer.
        counts = jax.tree.leaves(nnx.state(layers, nnx.RngCount))
        runs_on = any(count.ndim == 0 for count in counts)
        own = nnx.StateAxes({nnx.RngState: nnx.Carry, ...: 0}) if runs_on else 0
        scan = nnx.scan(
            body,
            in_axes=(nnx.Carry, own, 0, None, 0),
            out_axes=(nnx.Carry, 0),
            unroll=unroll,
            transform_metadata=STACKED,
        )
        (x, balance), written = scan((x, jnp.zeros(())), layers, caches, place, differ)
        return x, balance, written


def _summed(stream: jax.Array | Open) -> jax.Array | Open:
    """Returns the stream with what is to be added as an array, and not as what a matmul left."""
    return stream._replace(left=None) if isinstance(stream, Open) else stream


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
    """What a model computes: logits, or losses if it was given targets."""

    logits: jax.Array | None  # [B, T, V] float32
    balance: jax.Array  # the routers' loss
    ahead: tuple[jax.Array, ...] = ()  # logits of each MTP head, for one token further
    cache: dict | None = None
    losses: tuple[Loss, ...] = ()  # of the head, then of each MTP head


class Transformer(nnx.Module):
    """The whole model: tokens [B, T] -> Output."""

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
        self.tied, self.soft_cap = m.logits_via_embedding, m.final_logits_soft_cap
        self.gain = m.emb_dim**0.5 if m.embedding_gain is None else m.embedding_gain

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        cache: dict | None = None,
        goals: Sequence[Goal] = (),
        last: jax.Array | None = None,
    ) -> Output:
        """Returns the logits of every position, or, given goals, the losses of the head and
        of the MTP heads, whose logits are then never together in memory. With `last` [B],
        only the logits of that position of each row: [B, 1, V]."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        starts = None if segments is None else document_starts(segments)
        place = Place(positions, starts)
        embedded = self.embed(tokens)
        x, balance, cache = self.decoder(embedded, place, cache)
        streams = [x]
        if cache is None:
            for i in range(self.num_ahead):
                block = getattr(self, f"mtp_block_{i}" if i else "mtp_block")
                embedded = jnp.roll(embedded, -1, axis=1)
                x, more = block(x, embedded, place)
                balance += more
                streams.append(x)
        if goals:
            losses = tuple(map(self.judge, streams, goals))
            return Output(None, balance, cache=cache, losses=losses)
        if last is not None:
            pick = lambda x: jnp.take_along_axis(x, last[:, None, None], axis=1)
            streams = [jax.tree.map(pick, _summed(x)) for x in streams]
        logits, *ahead = map(self.head, streams)
        return Output(logits, balance, tuple(ahead), cache)

    def embed(self, tokens: jax.Array) -> jax.Array:
        # Rows of a tied table are small, as the head needs them; the stream needs variance 1.
        gain = jnp.asarray(self.gain, self.token_embedder.dtype)
        return keep_rows(self.token_embedder(tokens) * gain)

    def head(self, stream: jax.Array | Open) -> jax.Array:
        module, call = self._head()
        _, x = enter(stream, self.decoder.decoder_norm)
        return call(module, x).astype(jnp.float32)

    def judge(self, x: jax.Array, goal: Goal) -> Loss:
        """Returns the loss of `head(x)`."""
        module, call = self._head()
        x = self.decoder.decoder_norm(x)
        return judge(module, call, self.token_embedder.num_embeddings, x, goal)

    def _head(self) -> tuple[nnx.Module, Callable]:
        """Returns the module that makes logits, and the function that calls it."""
        if self.tied:
            return self.token_embedder, lambda table, x: self.capped(table.attend(x))
        return self.decoder.logits_dense, lambda dense, x: self.capped(dense(x))

    def capped(self, logits: jax.Array) -> jax.Array:
        """Returns c tanh(logits / c), where the config has a c."""
        if not self.soft_cap:
            return logits
        return self.soft_cap * jnp.tanh(logits.astype(jnp.float32) / self.soft_cap)


@functools.partial(jax.jit, static_argnums=0)
def _initial(m: Model, key: jax.Array) -> nnx.State:
    return nnx.state(Transformer(m, nnx.Rngs(key)), nnx.Param)


def create(m: Model, seed: int = 0, layout: Layout | None = None) -> Transformer:
    """Returns a model with random weights, each part made on the device that keeps it."""
    model = abstract(m)
    make = _initial
    if layout is not None:
        where = layout.shardings(nnx.state(model, nnx.Param))
        make = jax.jit(_initial, static_argnums=0, out_shardings=where)
    nnx.update(model, make(m, jax.random.key(seed)))
    return model


def abstract(m: Model) -> Transformer:
    """Returns the model with shapes in place of weights: any size, on any machine."""
    return nnx.eval_shape(lambda: Transformer(m, nnx.Rngs(0)))


def parameters(model: nnx.Module) -> int:
    """Returns the number of weights."""
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    return sum(int(x.size) for x in leaves)
