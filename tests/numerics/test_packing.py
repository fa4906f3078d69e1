"""On disk every format takes its own bits, and comes back as it was."""

import math

import jax
import numpy as np
import pytest

import midtread as mt
from midtread.numerics.packing import pack, unpack
from tests.support import every_format


@every_format
def test_round_trip(fmt):
    x = jax.random.normal(jax.random.key(0), (5, 96))
    tiles = {1: fmt.tile} if fmt.tile else {}
    codes = np.asarray(mt.quantize(x, fmt, tiled_axes=tiles).qvalue)
    packed = pack(codes, fmt)
    assert packed.nbytes == math.ceil(codes.size * fmt.bits / 8)
    again = unpack(packed, fmt, codes.shape)
    assert again.dtype == codes.dtype
    np.testing.assert_array_equal(again.astype(np.float64), codes.astype(np.float64))


def test_a_file_of_the_wrong_length_is_refused():
    fmt = mt.as_format("int4")
    with pytest.raises(
        ValueError, match="7 codes of int4 take 4 bytes, but there are 3"
    ):
        unpack(np.zeros(3, np.uint8), fmt, (7,))
