"""Tiles of one dtype, converted to another."""

import numpy as np
import pytest

from numbattn.cuda.tile import bfloat16, bitcast, convert, load, save

from .tiles import LAYOUTS, SHAPE, numbers, run


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float64, np.int32, np.uint64])
def test_convert(dtype):
    layout = LAYOUTS["simt"]

    def kernel(x, z):
        save(z, convert(load(x, layout, 0), np.float32) * 2, 0)

    x = numbers(SHAPE, dtype)
    given = x.view(np.uint16) if dtype == bfloat16 else x
    np.testing.assert_array_equal(run(kernel, given), x.astype(np.float32) * 2)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_bitcast(dtype):
    """To uint32, the lowest bit changed, and back."""
    layout = LAYOUTS["simt"]

    def kernel(x, z):
        save(z, bitcast(bitcast(load(x, layout, 0), np.uint32) ^ 1, dtype), 0)

    x = numbers(SHAPE, dtype)
    np.testing.assert_array_equal(run(kernel, x, out=dtype), (x.view(np.uint32) ^ 1).view(dtype))


FAULTS = {
    "cuda/tile/test_tensor_cores.py": {
        "b.xor(word, _both(0x8080))": "word",
        "b.and_(pair, _both(0xFF80))": "b.and_(pair, _both(0xFF00))",
        "b.or_(b.and_(pair, _both(0x8000)), size)": "size",
        "word), 2 * i": "word), i",
    },
}
