"""Ops: JAX's contractions on quantized operands, one engine for all of them.

api.py          dot_general, einsum and the others, with JAX's signatures
contraction.py  what a matmul does to the axes of its operands; dot_general
ragged.py       the same for matmuls over groups of rows
conv.py         the same for convolutions
einsum.py       from subscripts to contractions
engine.py       contract: one contraction of two operands, quantized or not
training.py     train: the same with quantized operands and gradients
recipe.py       how the six operands of a training step are quantized; named recipes
lookup.py       rows of a quantized table
unrolled.py     contract for use inside a Pallas kernel
context.py      what is under way on this thread
witness.py      how `mt.explain` learns of each contraction
"""
