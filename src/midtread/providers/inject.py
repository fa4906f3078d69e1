"""Inject: quantized ops that are passed to layers by name, as in AQT, without interception.

This is for models that are configured layer by layer. A layer that takes a `dot_general`
gets one of the ops of a recipe, which have JAX's signatures:

    nn.Dense(64, dot_general=mt.learn(recipe).dot_general)

To serve as well, the layer gets a class, and the model a mode:

    cls = functools.partial(QuantizedDotGeneral, recipe=recipe, mode=mode)
    nn.Dense(64, dot_general_cls=cls)

    'train'      quantizes both operands as the recipe says, forward and backward
    'convert'    the same forward, and the weight's QArray goes to the collection 'quantized'
    'serve'      takes the weight from there; the float one is not looked at

    _, made = convert.apply({"params": params}, x, mutable=["quantized"])
    params = remove_float_params(params, made["quantized"])
    serve.apply({"params": params, **made}, x)        # bit for bit what convert gave

Linen's layers ask for their kernel by name and cast it before the op sees it, so there must
be something under that name: a `Removed`, which has a shape and no data (a pytree without
leaves). Where it is cast it becomes zeros that nothing reads, and that jit therefore never
makes. Zeros of the kernel's shape do as well. jax.eval_shape(serve.init, key, x) gives an
abstract tree to load a checkpoint into.
"""

import collections
import dataclasses
import functools
from typing import Any

import flax
import jax
import jax.numpy as jnp
from flax import linen as nn

from midtread.model import flaxlib
from midtread.numerics.qarray import QArray, quantize_by_spec
from midtread.ops.api import Ops
from midtread.ops.recipe import Fwd, Recipe
from midtread.ops.training import train

COLLECTION = "quantized"
MODES = ("train", "convert", "serve")


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=[], meta_fields=["shape", "dtype"]
)
@dataclasses.dataclass(frozen=True)
class Removed:
    """The shape and dtype of a float weight that was removed."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __jax_array__(self) -> jax.Array:
        return jnp.zeros(self.shape, self.dtype)


class _Injected(nn.Module):
    """An op under a recipe, in a mode. The weight is rhs."""

    recipe: Recipe
    mode: str = "train"

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(
                f"unknown mode {self.mode!r}. There are: {', '.join(MODES)}."
            )
        super().__post_init__()

    def _ops(self) -> Ops:
        return Ops(self._train if self.mode == "train" else self._serve)

    def _train(self, c, lhs, rhs) -> jax.Array:
        key = self._key(self.recipe)
        return train(c, self.recipe, lhs, rhs, key=key, site="/".join(self.path))

    def _serve(self, c, lhs, rhs) -> jax.Array:
        """Computes the forward alone, on a weight that is quantized already. The gradient of
        lhs passes straight through."""
        recipe = Recipe(
            Fwd(self.recipe.fwd.lhs, None, self.recipe.fwd.accumulate),
            mask_clipped=self.recipe.mask_clipped,
        )
        if self.mode == "convert" or self.is_initializing():
            rhs = self._convert(c, rhs)
        key = self._key(recipe)
        return train(c, recipe, lhs, rhs, key=key, site="/".join(self.path))

    def _convert(self, c, rhs: jax.Array) -> QArray | jax.Array:
        spec = c.number_axes(self.recipe.fwd.rhs, "rhs", rhs.shape)
        if self.recipe.sparsity is not None:
            rhs = self.recipe.sparsity.apply(rhs)
        if spec is None:
            raise ValueError(
                f"{self._where}: the recipe leaves the weight in float, so there is "
                "nothing to convert. Use mode='train' here, or give the recipe a fwd.rhs."
            )
        if not self.is_mutable_collection(COLLECTION):
            raise ValueError(
                f"{self._where}: mode='convert' writes the collection {COLLECTION!r}: "
                f"call model.apply(..., mutable=[{COLLECTION!r}])."
            )
        key = self._key(Recipe(Fwd(None, self.recipe.fwd.rhs)))
        quantized = _quantize(
            spec, jax.lax.stop_gradient(rhs), key, "/".join(self.path)
        )
        self.put_variable(COLLECTION, "rhs", quantized)
        return quantized

    def _weight(self, rhs: Any) -> Any:
        """Returns rhs itself, or what was stored when it was converted."""
        if self.mode != "serve" or self.is_initializing():
            return rhs
        if not self.has_variable(COLLECTION, "rhs"):
            raise ValueError(
                f"{self._where}: mode='serve' finds no weight in the collection "
                f"{COLLECTION!r}. Run the model once with mode='convert' and "
                f"mutable=[{COLLECTION!r}], and pass what it gives."
            )
        return self.get_variable(COLLECTION, "rhs")

    @property
    def _where(self) -> str:
        return repr("/".join(self.path))

    def _key(self, recipe: Recipe) -> jax.Array | None:
        return self.make_rng("stochastic_rounding") if recipe.is_random else None


@functools.partial(jax.jit, static_argnums=(0, 3))
def _quantize(spec, x, key, site) -> QArray:
    return quantize_by_spec(x, spec, key, (site, "rhs"))


class QuantizedDotGeneral(_Injected):
    """`lax.dot_general` for Flax's `dot_general_cls`, under a recipe.

    >>> from midtread.ops.recipe import recipe
    >>> options = {"recipe": recipe("aqt_int8w"), "mode": "serve"}
    >>> cls = functools.partial(QuantizedDotGeneral, **options)
    >>> layer = nn.Dense(4, use_bias=False, dot_general_cls=cls)
    >>> x = jax.numpy.ones((2, 8))
    >>> jax.eval_shape(layer.init, jax.random.key(0), x)["quantized"][
    ...     "QuantizedDotGeneral_0"]["rhs"].qvalue
    ShapeDtypeStruct(shape=(8, 4), dtype=int8)

    Args:
        recipe: any Recipe; random ones take keys from the stream 'stochastic_rounding'.
        mode: 'train', 'convert' or 'serve'.

    Raises:
        ValueError: An unknown mode; or, when it runs, nothing to convert or to serve.
    """

    @nn.compact
    def __call__(self, lhs, rhs, dimension_numbers, *args, **kwargs) -> jax.Array:
        rhs = self._weight(rhs)
        return self._ops().dot_general(lhs, rhs, dimension_numbers, *args, **kwargs)


class QuantizedEinsum(_Injected):
    """`jnp.einsum` of two operands under a recipe; the second is the weight.

    >>> from midtread.ops.recipe import recipe
    >>> layer = QuantizedEinsum(recipe("qwix_int8"))
    >>> x, w = jax.numpy.ones((2, 8)), jax.numpy.ones((8, 4))
    >>> layer.apply({}, "bd,dh->bh", x, w).shape
    (2, 4)

    Args:
        recipe: any Recipe; random ones take keys from the stream 'stochastic_rounding'.
        mode: 'train', 'convert' or 'serve'.

    Raises:
        ValueError: An unknown mode; or, when it runs, nothing to convert or to serve.
    """

    @nn.compact
    def __call__(self, subscripts: str, lhs, rhs, **kwargs) -> jax.Array:
        return self._ops().einsum(subscripts, lhs, self._weight(rhs), **kwargs)


def remove_float_params(params: Any, quantized: Any) -> Any:
    """Replaces every weight that `quantized` has by a `Removed`.

    A QArray belongs to the parameter of its shape in the module around it.

    >>> from midtread.ops.recipe import recipe
    >>> options = {"recipe": recipe("aqt_int8w"), "mode": "convert"}
    >>> cls = functools.partial(QuantizedDotGeneral, **options)
    >>> variables = nn.Dense(4, dot_general_cls=cls).init(
    ...     jax.random.key(0), jax.numpy.ones((2, 8)))
    >>> left = remove_float_params(variables["params"], variables["quantized"])
    >>> type(left["kernel"]).__name__, type(left["bias"]).__name__
    ('Removed', 'ArrayImpl')

    Args:
        params: the parameters that the collection was converted from.
        quantized: the collection that mode='convert' wrote.

    Returns:
        A tree like `params`.

    Raises:
        ValueError: Two parameters could be the one that a QArray was made of.
    """
    flatten, unfreeze = flax.traverse_util.flatten_dict, flax.core.unfreeze
    is_leaf = lambda _, v: isinstance(v, QArray)
    stored: dict[Any, Any] = flatten(unfreeze(quantized), is_leaf=is_leaf)
    flat: dict[Any, Any] = flatten(unfreeze(params), keep_empty_nodes=True)
    twins = collections.Counter((path[:-2], q.shape) for path, q in stored.items())
    for (owner, shape), count in twins.items():
        alike = [
            path
            for path, v in flat.items()
            if path[:-1] == owner and getattr(flaxlib.unbox(v), "shape", None) == shape
        ]
        if len(alike) != count:
            raise ValueError(
                f"{'/'.join(owner)!r}: {count} quantized weights of shape {shape}, but "
                f"{len(alike)} parameters ({', '.join(p[-1] for p in alike)}). Put "
                "Removed in the place of those that are to go."
            )
        for path in alike:
            weight = flaxlib.unbox(flat[path])
            flat[path] = Removed(tuple(weight.shape), jnp.dtype(weight.dtype))
    return flax.traverse_util.unflatten_dict(flat)
