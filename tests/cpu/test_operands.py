"""Addresses of matrices, and what kernels read in place."""

import itertools

import numba
import numpy as np
import pytest

from numbattn.call.problem import describe
from numbattn.cpu import operands


@pytest.mark.parametrize("shape", [(30, 8), (6, 30, 8), (2, 30, 8), (4, 6, 30, 8), (4, 1, 30, 8), (1, 3, 30, 8)])
def test_matrices_of(rng, shape):
    """Entry (b, h) is the address of the matrix that NumPy's broadcasting and head groups give."""
    problem, _ = describe(np.zeros((4, 6, 5, 8)), *np.zeros((2, 4, 6, 30, 8)))
    x = rng.standard_normal((*shape[:-1], 11))[..., :8]
    matrices = operands.matrices_of(x, problem)
    assert (matrices.rows, matrices.cols, matrices.stride) == (30, 8, 11)
    assert numba.typeof(matrices.offsets) == numba.int64[:, ::1]  # of any shape, so that kernels are compiled once
    x4 = x.reshape((1,) * (4 - x.ndim) + shape)
    broadcast = np.broadcast_to(np.repeat(x4, 6 // x4.shape[1], axis=1), (4, 6, 30, 8))
    for b, h in itertools.product(range(4), range(6)):
        address = matrices.address + int(matrices.offsets[b, h])
        first = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_double * 8).from_address(address))
        np.testing.assert_array_equal(first, broadcast[b, h, 0])


@pytest.mark.parametrize("batch", [(0, 6), (4, 0), (0, 0)])
def test_no_heads(batch):
    x = np.zeros((*batch, 5, 8))
    problem, _ = describe(x, x, x)
    assert operands.matrices_of(x, problem).offsets.size == 0


def test_readable_copies_only_what_products_cannot_read(rng):
    x = rng.standard_normal((2, 3, 10, 8)).astype(np.float32)
    swapped, repeated = x.swapaxes(1, 2).copy().swapaxes(1, 2), np.broadcast_to(x, (4, *x.shape))
    for view in (x, swapped, repeated, x[:, ::-1], x[..., ::2, :5]):
        assert operands.readable(view, np.float32) is view
    unaligned = np.frombuffer(b"x" + x.tobytes(), np.float32, offset=1).reshape(x.shape)
    overlapping = np.lib.stride_tricks.as_strided(x, (3, 10, 8), (0, 16, 4))
    for view in (x[..., ::2], x[..., ::4], x[..., ::-1, :], x[..., ::-1], x.swapaxes(-1, -2),
                 np.broadcast_to(x[:, :, :1], x.shape), unaligned, overlapping):  # fmt: skip
        copy = operands.readable(view, np.float32)
        assert not np.shares_memory(copy, view)
        np.testing.assert_array_equal(np.broadcast_to(copy, view.shape), view)     # axes that are broadcast have size 1
    assert operands.readable(x.astype(np.float16), np.float32).dtype == np.float32


@pytest.mark.parametrize("shape", [(5, 8), (6, 5, 8), (4, 1, 5, 8)])
def test_tangents_have_an_axis_in_front(rng, shape):
    """Their matrices are found by direction, element of the batch and head; nothing stands for zero."""
    problem, _ = describe(*np.zeros((3, 4, 6, 5, 8)))
    x = rng.standard_normal((3, *shape))
    kinds = operands.Operands(tq=operands.TANGENT, tk=operands.TANGENT, tlse=operands.ROWS_ALONG)
    matrices, none, rows = kinds.record(problem, {"tq": x}).arguments
    assert matrices.offsets.shape == (3, 4, 6)
    assert none.offsets.shape == rows.shape[:3] == (0, 0, 0)
    broadcast = np.broadcast_to(x.reshape(3, *(1,) * (4 - len(shape)), *shape), (3, 4, 6, 5, 8))
    for place in itertools.product(range(3), range(4), range(6)):
        address = x.ctypes.data + int(matrices.offsets[place])
        first = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_double * 8).from_address(address))
        np.testing.assert_array_equal(first, broadcast[place][0])


@pytest.mark.parametrize("x", [np.broadcast_to(np.float32(1), (5, 4, 3, 8)), np.ones((5, 4, 3, 8))[:, :1, ::-1]])
def test_tangents_that_share_matrices_have_as_many_directions_when_copied(x):
    copy = operands.readable_along(x, np.dtype(np.float64))
    assert copy.shape[0] == 5
    np.testing.assert_array_equal(np.broadcast_to(copy, x.shape), x)


FAULTS = {
    "test_tangents_that_share_matrices_have_as_many_directions_when_copied": {
        "found if len(found) == len(x) else": "found if True else",
    },
    ("cpu/test_operands.py", "cpu/test_tile.py::test_grids", "cpu/test_tile.py::test_draw"): {
        "(col == itemsize or cols <= 1)": "(col == itemsize or cols <= 2)",
        "(row >= cols * itemsize or rows <= 1)": "(row > 0 or rows <= 1)",
        " and flags.aligned": "",
        "np.repeat(steps[-1], heads": "np.tile(steps[-1], heads",
        "[np.arange(size) * stride for": "[np.arange(size)[::-1] * stride for",
        "return np.array(offsets": "return np.asarray(offsets",
    },
    ("caches/test_kv_cache.py::test_8_bits[16-1-int8]", "caches/test_kv_cache.py::test_8_bits[None-1-int8]"): {
        "slice(1 if is_paged(problem) else 0, -2)": "slice(0, -2)",
    },
    "test_tangents_have_an_axis_in_front": {
        "[0] * missing": "[8] * missing",
    },
}
