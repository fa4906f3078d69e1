"""Hopper: what the kernels for this GPU are made of.

shared_memory.py   how much there is, and the order that copies and tensor cores agree on
ring.py            the buffers through which a stored weight reaches the tensor cores
threads.py         what a single thread does: numbers, addresses, PTX, registers
lanes.py           which thread holds which column of a weight, and how it decodes them
decoding.py        PTX that turns codes into bfloat16
mma.py             the tensor cores' instruction for single warps
"""
