"""Many rows against a stored weight on Hopper.

kernel.py       how the work is divided; the call
pipeline.py     what warpgroups do: fetch, decode, multiply, write
registers.py    which thread holds which column
tuned.py        block sizes, from <device>.json
"""
