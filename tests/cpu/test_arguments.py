"""Addresses."""

import itertools

import numpy as np
import pytest

from numbattn.cpu import arguments
from numbattn.problem import describe


@pytest.mark.parametrize("shape", [(30, 8), (6, 30, 8), (2, 30, 8), (4, 6, 30, 8), (4, 1, 30, 8), (1, 3, 30, 8)])
def test_matrices_of(rng, shape):
    """Entry (b, h) is the address of the matrix that NumPy's broadcasting and head groups give."""
    problem, _ = describe(np.zeros((4, 6, 5, 8)), *np.zeros((2, 4, 6, 30, 8)))
    x = rng.standard_normal((*shape[:-1], 11))[..., :8]
    matrices = arguments.matrices_of(x, problem)
    assert (matrices.rows, matrices.cols, matrices.stride) == (30, 8, 11)
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
    assert arguments.matrices_of(x, problem).offsets.size == 0


def test_readable_copies_only_what_products_cannot_read(rng):
    x = rng.standard_normal((2, 3, 10, 8)).astype(np.float32)
    swapped, repeated = x.swapaxes(1, 2).copy().swapaxes(1, 2), np.broadcast_to(x, (4, *x.shape))
    for view in (x, swapped, repeated, x[:, ::-1], x[..., ::2, :5]):
        assert arguments.readable(view, np.float32) is view
    unaligned = np.frombuffer(b"x" + x.tobytes(), np.float32, offset=1).reshape(x.shape)
    overlapping = np.lib.stride_tricks.as_strided(x, (3, 10, 8), (0, 16, 4))
    for view in (x[..., ::2], x[..., ::4], x[..., ::-1, :], x[..., ::-1], x.swapaxes(-1, -2),
                 np.broadcast_to(x[:, :, :1], x.shape), unaligned, overlapping):  # fmt: skip
        copy = arguments.readable(view, np.float32)
        assert not np.shares_memory(copy, view)
        np.testing.assert_array_equal(copy, view)
    assert arguments.readable(x.astype(np.float16), np.float32).dtype == np.float32
