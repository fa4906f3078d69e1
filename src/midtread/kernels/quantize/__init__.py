"""Float operands to codes, in the memory order that their matmuls want.

operand.py    what is to be quantized, and the two ways that XLA does it
adapter.py    from an operand's axes to a matrix and a plan for a kernel, or why not
triton.py     scales and codes in one pass over the data
"""
