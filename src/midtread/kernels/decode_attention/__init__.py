"""One new token a sequence against a cache of codes.

triton.py    the kernel, and from a model's arrays to it, or why not
"""
