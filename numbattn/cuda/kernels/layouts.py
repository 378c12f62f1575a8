"""The layouts that a plan's unit asks for. Nothing else in a kernel depends on who multiplies."""

import numpy as np
from numba.cuda import types

from ... import problem
from ..tile import allocate, col_index, device, mma, put, row_index, simt, sync_warp
from ..views import VECTOR_BYTES

DTYPES = {dtype.name: dtype for dtype in problem.DTYPES}


def sum_type(dtype):
    """The type of all sums of a dtype."""
    return np.float64 if dtype == np.float64 else np.float32


def array_type(dtype, ndim):
    """Numba's type of an array of any strides. It has no arrays of bfloat16: they come as uint16."""
    name = "uint16" if dtype == DTYPES["bfloat16"] else np.dtype(dtype).name
    return types.Array(getattr(types, name), ndim, "A")


def vector(dtype):
    """Elements in 16 bytes."""
    return VECTOR_BYTES // dtype.itemsize


def sums(unit, lanes, rows, cols, threads, run=1):
    """The layout of a tile of sums: by mma.sync on tensor cores, by fused multiply-adds on CUDA cores."""
    return mma(rows, cols, threads) if unit == "mma" else simt(rows, cols, threads, lanes, run)


def places_of(transposed):
    """The device function (layout, i0, j0): queries i and keys j of a tile from query i0 and key j0 on.

    The tile's rows are queries, or keys if it is transposed.
    """

    @device
    def upright(layout, i0, j0):
        return row_index(layout, i0), col_index(layout, j0)

    @device
    def on_its_side(layout, i0, j0):
        return col_index(layout, i0), row_index(layout, j0)

    return on_its_side if transposed else upright


def left_operand(layout, shared, dtype):
    """How a tile of sums becomes the left operand of the next product.

    Tensor cores take it from the registers that it lies in. CUDA cores read it from shared memory, each row by the
    warp that wrote it.
    """
    if layout.unit == "mma":

        @device
        def left(P):
            return P

        return left

    PLACE = shared.tile(*layout.shape, dtype)

    @device
    def left(P):
        sP = allocate(PLACE)
        put(sP, P)
        sync_warp()
        return sP

    return left
