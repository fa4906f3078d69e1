"""Numerics: from arrays to codes and back. Arrays go in, arrays come out.

formats.py      the number systems, one row each
rounding.py     from a number to a code: nearest, or by chance from a key
calibration.py  the range of the data that codes should cover, and statistics of ranges
scales.py       from a range to a scale and a zero point
spec.py         how one array is quantized: all of the above, and which elements share a scale
qarray.py       the quantized array; quantize and dequantize
views.py        reshaping, slicing and sharding an array together with its scales
packing.py      codes at their own width, for files
sparsity.py     N:M pruning
hadamard.py     rotations that spread outliers
dtypes.py       which floats can be quantized
platforms.py    the kind of device that a computation is traced for
"""
