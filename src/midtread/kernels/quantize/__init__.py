"""Float operands to codes, in the memory order that their matmuls want.

adapter.py    from an operand's axes to a matrix, or why not
triton.py     scales and codes in one pass over the data
"""
