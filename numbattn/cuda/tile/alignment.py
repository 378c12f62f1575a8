"""The layout of an array in memory, and the vectors by which its rows may be moved. No CUDA here."""

import math
from typing import Any, NamedTuple

from ...base.values import address_of

VECTOR_BYTES = 16  # the most that one thread moves at once


class ArrayLayout(NamedTuple):
    """What a kernel may depend on in an array."""

    shape: tuple
    strides: tuple  # bytes
    dtype: Any
    address: int = 0  # modulo VECTOR_BYTES


def layout_of(array, address):
    return ArrayLayout(array.shape, array.strides, array.dtype, address % VECTOR_BYTES)


def alignment(layout):
    """The alignment of all matrices (last two axes) of an array, in bytes, at most 16.

    Their last axis is contiguous; each row starts at a multiple of it and is a multiple of it long; rows are less than
    2**31 bytes apart. 0 promises nothing.
    """
    shape, strides, dtype, address = layout
    *outer, rows, cols = strides
    if (shape[-1] > 1 and cols != dtype.itemsize) or (shape[-2] > 1 and abs(rows) >= 2**31):
        return 0
    steps = [abs(stride) for stride, n in zip((*outer, rows), shape) if n > 1]
    common = math.gcd(VECTOR_BYTES, address, shape[-1] * dtype.itemsize, *steps)
    return common if common >= dtype.itemsize else 0


def alignment_of(x):
    """The `alignment` of a NumPy or CuPy array."""
    return alignment(layout_of(x, address_of(x)))
