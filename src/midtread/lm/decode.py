"""Decode: a model that serves, many tokens to a call.

A `Server` has B slots. A slot holds one sequence: its part of the cache, its last token, and
how many more may come. `prefill` reads prompts into free slots, in chunks of a few hundred
tokens, so that any prompt fits and few programs are compiled; `step` lets all slots go on by
up to `count` tokens in one call to the device:

    while count is not reached and some slot may go on:
        a few times:
            logits = model(last tokens, positions, cache)      one row a slot
            choose; stop where a stop token or the last allowed one came

Sampling, stop tokens and lengths are inside that loop, so the host waits once for many tokens
and hands over weights once. (XLA asks the device before each round of the outer loop whether to
go on, and the host waits for the answer; the inner loop has a fixed length.) Slots that are done
idle until all are, or until `step` returns and another prompt takes the slot (continuous
batching): `complete` does so for any number of prompts.

A token depends on its sequence, its number and the seed, not on the loop it was made in: one
token a call gives the same as many. Its neighbours change nothing but the number of rows, for
which a kernel or XLA may sum in another order: in float32 on a CPU tokens are the same bit for
bit, in bfloat16 two logits that are nearly equal may change places.

Weights that are stacked for a scan over layers are copied by XLA, layer by layer, before each
use (NVIDIA H200, jax 0.11.2: bf16 12.5 ms a token, 5.8 without the scan), so `unstack` gives
each layer arrays of its own; `prepare` does so and joins weights that multiply the same rows
(`lm/join.py`; together with kernels for what stands between the matmuls, 4.1 ms).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from midtread.kernels.environment import here
from midtread.lm import cache as kv
from midtread.lm import room
from midtread.lm.config import Model
from midtread.lm.join import join
from midtread.lm.model import Stack, Transformer
from midtread.lm.usage import UsageError, require

CHUNK = 512  # tokens of a prompt that are read at once
ROUND = 8  # tokens before it is asked again whether some slot may go on
COUNT = 32  # tokens of a call: it costs 4 to 5 ms on the host beside an H200


class Sampling(NamedTuple):
    """How the next token is drawn: always the likeliest at temperature 0."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def check(self) -> None:
        """Raises UsageError if one of these is out of its range, or means nothing."""
        for name, holds, takes in (
            ("temperature", 0 <= self.temperature < math.inf, "0 or a number above"),
            ("top_k", _is_whole(self.top_k), "a whole number, 0 for all tokens"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0 and at most 1"),
        ):
            require(holds, f"{name}={getattr(self, name)}: {takes}.")
        for name, all_tokens in (("top_k", 0), ("top_p", 1)):
            given = getattr(self, name)
            require(
                self.temperature or given == all_tokens,
                f"{name}={given} means nothing at temperature=0, where the likeliest "
                "token is taken: write temperature=0.8, say, or drop it.",
            )


GREEDY = Sampling()


def _is_whole(x: Any, least: int = 0) -> bool:
    return isinstance(x, int | np.integer) and x >= least


def _check_count(count: Any) -> None:
    require(_is_whole(count, 1), f"count={count}: a step makes one token at least.")


def choose(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> jax.Array:
    """The next token of logits [B, V], drawn with a key for each row."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1)
    logits = logits / sampling.temperature
    if sampling.top_k:
        least = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        before = jnp.cumsum(jax.nn.softmax(ordered), axis=-1) - jax.nn.softmax(ordered)
        count = jnp.sum(before < sampling.top_p, axis=-1, keepdims=True)  # at least one
        least = jnp.take_along_axis(ordered, count - 1, axis=-1)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.vmap(jax.random.categorical)(keys, logits)


def prepare(model: Transformer) -> Transformer:
    """The model as it decodes fastest, on one device; `model` is used up."""
    return widen_scales(join(unstack(model)))


def widen_scales(model: Transformer) -> Transformer:
    """The model with scales of 8 bits (nvfp4's in e4m3, MX's in e8m0) in bfloat16, which has
    all of their values, if Hopper's kernels will read them: they read no narrower ones, and
    XLA would cast them before every matmul."""
    if here().why_not("hopper") is not None:
        return model
    params = nnx.state(model, nnx.Param)
    is_narrow = lambda path, x: path[-1] == "scale" and x.dtype.itemsize == 1
    wide = [
        (path, x.replace(x[...].astype(jnp.bfloat16)))
        for path, x in nnx.to_flat_state(params)
        if is_narrow(path, x)
    ]
    nnx.update(model, nnx.from_flat_state(wide))
    return model


def unstack(model: Transformer) -> Transformer:
    """The model with each layer's weights in arrays of their own; `model` is used up.

    No more than one stacked array exists twice at any time.
    """
    decoder = model.decoder
    if not decoder.scanned:
        return model
    for name, local in decoder.kinds:
        graph, state = nnx.split(getattr(decoder, name))
        stacked, treedef = jax.tree.flatten(state)
        delattr(decoder, name)
        del state
        parts: list[list] = []
        while stacked:
            parts.append(_apart(stacked.pop(0), len(local)))
        states = [treedef.unflatten(leaves) for leaves in zip(*parts)]
        layers = [nnx.merge(graph, state) for state in states]
        for layer, is_local in zip(layers, local):
            if hasattr(layer.self_attention, "is_local"):  # a scan told it by an array
                layer.self_attention.is_local = is_local
        setattr(decoder, name, Stack(layers))
    decoder.scanned = False
    return model


def _apart(x: Any, count: int) -> list:
    """One array for each layer; the count of a random stream is shared by all."""
    if x.ndim == 0:
        return [x] * count
    return [x[i] for i in range(count)]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "tokens", "positions", "left", "numbers"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Slots:
    """What all slots hold, on the device. All but the cache is [B] int32."""

    cache: dict[str, Any]
    tokens: jax.Array  # the last one of each sequence, which the model has not seen yet
    positions: jax.Array  # where it stands
    left: jax.Array  # tokens that may still come; 0: done
    numbers: jax.Array  # of sequences: they set their random numbers apart

    def keys(self, seed: jax.Array) -> jax.Array:
        """A key for the token after each one, the same in any loop."""
        fold = jax.vmap(jax.random.fold_in, (None, 0))
        return jax.vmap(jax.random.fold_in)(fold(seed, self.numbers), self.positions)


class Program:
    """The three functions of a server that run on the device.

    Weights come as a flat list, and what else decides what is compiled is fixed here: what a
    call costs on the host does not grow with the number of layers. (JAX would otherwise take
    the model apart and compare its structure each time: 12 ms a call for 32 layers.)
    """

    def __init__(self, graph, treedef, sampling: Sampling, stops: tuple[int, ...]):
        self._graph, self._treedef = graph, treedef
        self._sampling, self._stops = sampling, stops
        self.read = jax.jit(self._read, donate_argnums=1)
        self.begin = jax.jit(self._begin, donate_argnums=0)
        self.go_on = jax.jit(self._go_on, donate_argnums=1, static_argnums=3)

    def _model(self, weights: list[jax.Array]) -> nnx.Module:
        return nnx.merge(self._graph, self._treedef.unflatten(weights))

    def _read(self, weights, slots: Slots, rows, tokens, start):
        """Writes tokens [R, T] from position `start` on into slots `rows` [R]; logits of the
        last token that stands in each row, which `slots.positions` knows. A row of no slot
        (R is rounded up) writes nothing."""
        T = tokens.shape[1]
        take = lambda a: jnp.take(a, rows, axis=_batch_axis(a), mode="clip")
        part = jax.tree.map(take, slots.cache)
        positions = start + jnp.broadcast_to(jnp.arange(T), tokens.shape)
        last = jnp.clip(slots.positions[rows] - start, 0, T - 1)
        out = self._model(weights)(tokens, positions, cache=part, last=last)
        put = lambda a, new: a.at[(slice(None),) * _batch_axis(a) + (rows,)].set(new)
        cache = jax.tree.map(put, slots.cache, out.cache)
        return dataclasses.replace(slots, cache=cache), out.logits[:, 0]

    def _begin(self, slots: Slots, rows, logits, allowed, seed):
        """The first token after each prompt of slots `rows`."""
        keys = slots.keys(seed)[rows]
        new = choose(logits, keys, self._sampling).astype(jnp.int32)
        left = jnp.where(self._is_stop(new), 0, allowed - 1)
        return new, dataclasses.replace(
            slots,
            tokens=slots.tokens.at[rows].set(new),
            positions=slots.positions.at[rows].add(1),
            left=slots.left.at[rows].set(left),
        )

    def _is_stop(self, tokens: jax.Array) -> jax.Array:
        hits = [tokens == stop for stop in self._stops]
        return functools.reduce(jnp.logical_or, hits, tokens < 0)

    def _go_on(self, weights, slots: Slots, seed, count: int):
        """Up to `count` tokens of every slot: [B, count], -1 where a slot was done."""

        def one(_, carry):
            i, slots, new_tokens = carry
            is_open = slots.left > 0
            tokens, positions = slots.tokens[:, None], slots.positions[:, None]
            out = self._model(weights)(tokens, positions, cache=slots.cache)
            new = choose(out.logits[:, 0], slots.keys(seed), self._sampling)
            new = jnp.where(is_open, new.astype(jnp.int32), slots.tokens)
            left = jnp.where(is_open & ~self._is_stop(new), slots.left - 1, 0)
            new_tokens = new_tokens.at[:, i].set(jnp.where(is_open, new, -1))
            slots = dataclasses.replace(
                slots,
                cache=out.cache,
                tokens=new,
                left=left,
                positions=slots.positions + is_open.astype(jnp.int32),
            )
            return i + 1, slots, new_tokens

        length = next(n for n in range(ROUND, 0, -1) if count % n == 0)
        body = lambda carry: jax.lax.fori_loop(0, length, one, carry)
        start = jnp.full((slots.tokens.shape[0], count), -1, jnp.int32)
        may_go_on = lambda carry: (carry[0] < count) & jnp.any(carry[1].left > 0)
        carry = jax.lax.while_loop(may_go_on, body, (0, slots, start))
        _, slots, new_tokens = carry
        return new_tokens, slots.left, slots


_program = functools.lru_cache(maxsize=8)(Program)  # one for all servers of a model


def _batch_axis(a: jax.Array) -> int:
    return a.ndim - 4  # [.., B, S, heads, width], stacked over layers or not


class Server:
    """A model with slots for sequences.

    >>> from midtread.lm import model as models
    >>> m = Model(num_decoder_layers=1, dtype="float32")
    >>> server = Server(prepare(models.create(m)), m, slots=2, length=32)
    >>> first = server.prefill({0: [1, 2, 3], 1: [4]}, allowed=5)
    >>> [len(tokens) for tokens in server.step(8).values()], server.free
    ([4, 4], [0, 1])

    Args:
        model: what `convert.load` gave, or `models.create`; `prepare` it first on one
            device.
        m: its sizes.
        slots: sequences at once.
        length: tokens that a slot has room for, prompt and continuation.
        sampling: how tokens are drawn.
        stops: tokens that end a sequence.
        seed: of the random numbers.
        cache_format: format and scales of the cache (`lm/cache.py`); None: the compute dtype.
        check_memory: refuses a cache that the device has no room for before it is made.

    Raises:
        UsageError: A stop that is no token, a way to draw that is none; or no room for
            the cache: what it needs, and what would fit.
    """

    def __init__(
        self,
        model: Transformer,
        m: Model,
        *,
        slots: int = 1,
        length: int = 2048,
        sampling: Sampling = GREEDY,
        stops: Sequence[int] = (),
        seed: int = 0,
        cache_format: tuple[str, str] | None = None,
        check_memory: bool = True,
    ):
        require(_is_whole(slots, 1), f"slots={slots}: a server has one at least.")
        require(
            _is_whole(length, 1),
            f"length={length}: a slot has room for one token at least.",
        )
        sampling.check()
        require(
            _is_whole(seed, -(2**63)) and seed < 2**63,
            f"seed={seed}: a whole number of 64 bits.",
        )
        for token in stops:
            require(
                _is_whole(token) and token < m.vocab_size,
                f"stop token {token} is none of the model's tokens: they are 0 to "
                f"{m.vocab_size - 1}.",
            )
        graph, state = nnx.split(model)
        self._weights, treedef = jax.tree.flatten(state)
        self._program = _program(graph, treedef, sampling, tuple(map(int, stops)))
        self.length, self._vocab_size = length, m.vocab_size
        self._seed = jax.random.key(seed)
        cache = _cache(model, m, slots, length, cache_format, check_memory)
        self.cache_bytes = kv.nbytes(cache)
        zeros = lambda: jnp.zeros(slots, jnp.int32)
        self._slots = Slots(cache, zeros(), zeros(), zeros(), zeros())
        self._left, self._count = np.zeros(slots, int), 0  # left: a copy on the host

    @property
    def num_slots(self) -> int:
        return len(self._left)

    @property
    def free(self) -> list[int]:
        """Slots whose sequence is done."""
        return np.flatnonzero(self._left == 0).tolist()

    def prefill(
        self, prompts: dict[int, Sequence[int]], allowed: int
    ) -> dict[int, int]:
        """Reads prompts into slots, and makes the first token of each.

        Args:
            prompts: tokens, by the number of a free slot.
            allowed: tokens that may come, the first among them.

        Returns:
            The first token of each.

        Raises:
            UsageError: A slot that is not free, an empty prompt, or one that leaves no room.
        """
        for slot, prompt in prompts.items():
            require(
                slot in self.free,
                f"slot {slot} is not free: those that are free are {self.free}.",
            )
            self.check(prompt, allowed)
        if not prompts:
            return {}
        count = len(prompts)
        # Few numbers of rows make few programs: those that are left over have no slot.
        num_rows = min(1 << (count - 1).bit_length(), self.num_slots)
        rows = np.full(num_rows, self.num_slots, np.int32)
        lengths = np.ones(num_rows, np.int32)
        rows[:count], lengths[:count] = list(prompts), list(map(len, prompts.values()))
        width = int(lengths.max())
        numbers = self._count + np.arange(num_rows, dtype=np.int32)
        self._count += count
        self._slots = dataclasses.replace(
            self._slots,
            positions=self._slots.positions.at[rows].set(lengths - 1),
            numbers=self._slots.numbers.at[rows].set(numbers),
        )
        chunk = min(CHUNK, 1 << (width - 1).bit_length())  # few widths, few programs
        tokens = np.zeros((num_rows, -(-width // chunk) * chunk), np.int32)
        for row, prompt in zip(tokens, prompts.values()):
            row[: len(prompt)] = prompt
        logits = None
        for start in range(0, tokens.shape[1], chunk):
            part = tokens[:, start : start + chunk]
            self._slots, now = self._program.read(
                self._weights, self._slots, rows, part, np.int32(start)
            )
            ends_here = ((lengths - 1) // chunk == start // chunk)[:, None]
            logits = now if logits is None else jnp.where(ends_here, now, logits)
        new, self._slots = self._program.begin(
            self._slots, rows, logits, np.int32(allowed), self._seed
        )
        self._left = np.array(self._slots.left)
        return dict(zip(prompts, np.asarray(new).tolist()))

    def check(self, prompt: Sequence[int], allowed: int) -> None:
        """Raises UsageError if a slot cannot hold this prompt and `allowed` new tokens."""
        require(
            _is_whole(allowed, 1), f"allowed={allowed}: prefill makes the first token."
        )
        tokens = np.asarray(prompt)
        require(
            tokens.ndim == 1 and tokens.dtype.kind in "iuf",
            f"prompt {prompt!r:.60} is no list of tokens: encode a text first.",
        )
        length, count = len(tokens), self._vocab_size
        require(length > 0, "prompt is empty: give at least one token.")
        is_one = (tokens >= 0) & (tokens < count) & (tokens % 1 == 0)
        require(
            is_one.all(),
            f"token {tokens[~is_one][:1].tolist()} of a prompt is none of the model's: they "
            f"are 0 to {count - 1}.",
        )
        require(
            length + allowed - 1 <= self.length,
            f"a prompt of {length} tokens and {allowed} new ones do not fit a cache of "
            f"{self.length}: shorten the prompt, or make room for {length + allowed - 1}.",
        )

    def step(self, count: int = COUNT) -> dict[int, list[int]]:
        """Lets every sequence go on by up to `count` tokens, in one call to the device.

        Returns:
            The new tokens by slot, of slots that were not done; a stop token is the last.

        Raises:
            UsageError: A count below 1.
        """
        _check_count(count)
        busy = np.flatnonzero(self._left)
        tokens, left, self._slots = self._program.go_on(
            self._weights, self._slots, self._seed, count
        )
        tokens, self._left = np.asarray(tokens), np.array(left)
        return {int(s): [int(t) for t in tokens[s] if t >= 0] for s in busy}

    def pretend(self, length: int, allowed: int | None = None) -> None:
        """Fills every slot with a sequence of `length` tokens whose keys and values are
        zeros, and which may go on by `allowed` tokens, or to the end of the cache: for timing."""
        full = lambda value: jnp.full(self.num_slots, value, jnp.int32)
        left = full(self.length - length if allowed is None else allowed)
        self._slots = dataclasses.replace(
            self._slots, positions=full(length), left=left
        )
        self._left = np.array(left)

    def peak_bytes(self, count: int = COUNT) -> int:
        """Returns the bytes that `step` needs, weights, cache and what it computes, as its
        compiled program says; 0 where that says nothing."""
        arguments = (self._weights, self._slots, self._seed, count)
        memory = self._program.go_on.lower(*arguments).compile().memory_analysis()
        if memory is None:
            return 0
        peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        return peak + memory.output_size_in_bytes - memory.alias_size_in_bytes

    def warm(self, count: int = COUNT) -> None:
        """Compiles `step` before there is anything to do."""
        assert not self._left.any(), "some sequence is under way"
        self.step(count)


def _cache(
    model, m: Model, slots: int, length: int, cache_format, check_memory: bool
) -> dict[str, Any]:
    make = lambda: kv.make(
        m, slots, length, cache_format, stacked=model.decoder.scanned
    )
    needed = kv.nbytes(jax.eval_shape(make))
    is_refused = check_memory and not room.fits(needed)
    require(not is_refused, room.no_cache(slots, length, needed))
    try:
        return make()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UsageError(room.no_cache(slots, length, needed)) from None


def complete(
    server: Server,
    prompts: Sequence[Sequence[int]],
    allowed: int,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    count: int = COUNT,
) -> list[list[int]]:
    """Continues any number of prompts; a slot that is done takes the next one.

    Args:
        allowed: tokens that may come after each prompt.
        on_tokens: called with the number of a prompt and its new tokens, as they come.
        count: tokens that a call to the device makes.

    Returns:
        The new tokens of each prompt; a stop token is the last.

    Raises:
        UsageError: Some sequence is under way, one of the prompts cannot be read, or a count
            below 1; none is begun then.
    """
    require(
        len(server.free) == server.num_slots,
        f"some slots have sequences under way, free are {server.free}: `complete` takes all "
        "slots. Let these end by `step` first, or use another server.",
    )
    _check_count(count)
    for prompt in prompts:
        server.check(prompt, allowed)
    continuations: list[list[int]] = [[] for _ in prompts]
    waiting: Iterator[int] = iter(range(len(prompts)))
    holds: dict[int, int] = {}

    def add(number: int, tokens: list[int]) -> None:
        continuations[number] += tokens
        if on_tokens:
            on_tokens(number, tokens)

    while True:
        begun = dict(zip(server.free, waiting))
        if begun:
            holds |= begun
            first = {slot: prompts[number] for slot, number in begun.items()}
            for slot, token in server.prefill(first, allowed).items():
                add(holds[slot], [token])
        elif len(server.free) == server.num_slots:
            return continuations
        for slot, tokens in server.step(count).items():
            add(holds[slot], tokens)
