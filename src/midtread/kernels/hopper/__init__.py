"""Hopper: what the kernels for this GPU are made of.

threads.py     words for what a single thread does: numbers, addresses, PTX, registers
lanes.py       which thread holds which column of a weight, and how it decodes them
decoding.py    PTX that turns codes into bfloat16
mma.py         the tensor cores' instruction for single warps
"""

SHARED = 226 * 1024  # bytes of shared memory; 1 kB more is for barriers
