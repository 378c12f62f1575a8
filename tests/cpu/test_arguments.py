"""Addresses, and tiles of queries."""

import itertools

import numba
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import numbattn as na
from numbattn.call.problem import describe
from numbattn.cpu import arguments


@pytest.mark.parametrize("shape", [(30, 8), (6, 30, 8), (2, 30, 8), (4, 6, 30, 8), (4, 1, 30, 8), (1, 3, 30, 8)])
def test_matrices_of(rng, shape):
    """Entry (b, h) is the address of the matrix that NumPy's broadcasting and head groups give."""
    problem, _ = describe(np.zeros((4, 6, 5, 8)), *np.zeros((2, 4, 6, 30, 8)))
    x = rng.standard_normal((*shape[:-1], 11))[..., :8]
    matrices = arguments.matrices_of(x, problem)
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
    assert arguments.matrices_of(x, problem).offsets.size == 0


def test_what_a_mask_lowers_to_is_kept():
    """Beside a cache by its lengths, which all layers share; of many queries, where it is large, it is not."""
    def lowered(seqlen_q, lengths):
        cache = na.KVCache(*np.zeros((2, 2, 2, 90, 8)), np.array(lengths, np.int32))
        problem, inputs = describe(np.zeros((2, 4, seqlen_q, 8)), cache, None, mask=mask)
        return arguments.mask_of(problem, inputs.mask).arguments[0]

    mask = na.Causal() & (na.Window(9, 0) | na.Lengths(keys=2))
    first = lowered(1, [20, 30])
    assert first.bands[:, 0, 3].tolist() == [20, 30]
    assert lowered(1, [20, 30]) is first
    assert lowered(1, [20, 31]).bands[:, 0, 3].tolist() == [20, 31]
    assert lowered(30, [30, 40]) is not lowered(30, [30, 40])


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
        np.testing.assert_array_equal(np.broadcast_to(copy, view.shape), view)     # axes that are broadcast have size 1
    assert arguments.readable(x.astype(np.float16), np.float32).dtype == np.float32


OFFSETS = st.lists(st.integers(0, 300), min_size=2, max_size=9).map(sorted)


@given(st.lists(OFFSETS, min_size=3, max_size=3))
@example([[10, 11, 12, 13]] * 3)            # the keys 5 to 5, 5 to 6 and 6 to 6
def test_tiles(offsets):
    """Of three segmentations: every query is in one tile, and every tile in one segment, whose keys are the tile's."""
    size = min(map(len, offsets))
    queries = np.array([row[:size] for row in offsets])[:, None]
    q = np.zeros((3, 2, 300, 1))
    problem, inputs = describe(q, q, q, mask=na.Segments(queries, queries // 2))
    tiles = arguments.tiles_of(problem, inputs.mask, 32)
    visible, found = inputs.mask.dense(300, 300), np.zeros((3, 2, 300), int)
    pairs = 0
    for batch, head in np.ndindex(3, 2):
        for row in tiles.table[tiles.starts[2 * batch + head] : tiles.starts[2 * batch + head + 1]]:
            assert tuple(row[:2]) == (batch, head)
            m0, m_end, first, end, offset = row[2:]
            assert 0 < m_end - m0 <= 32
            found[batch, head, m0:m_end] += 1
            keys = np.arange(300)
            np.testing.assert_array_equal(visible[batch, 0, m0:m_end], [(first <= keys) & (keys < end)] * (m_end - m0))
            if first < end:                             # its last key is that of the segment's last query
                ends = queries[batch, 0].tolist()
                assert offset == end - next(x for x in ends if x >= m_end)
            pairs += visible[batch, 0, m0:m_end].sum()
    assert (found == 1).all()
    assert tiles.pairs == pairs


def test_tiles_without_segments():
    problem, inputs = describe(np.zeros((2, 70, 1)), *np.zeros((2, 2, 90, 1)), causal=True)
    tiles = arguments.tiles_of(problem, inputs.mask, 32)
    rows = [(64, 70, 0, 90, 20), (32, 64, 0, 90, 20), (0, 32, 0, 90, 20)]       # the heaviest first
    np.testing.assert_array_equal(tiles.table, [(0, head, *row) for head in range(2) for row in rows])
    assert tiles.starts.tolist() == [0, 3, 6]


FAULTS = {
    " and problem.seqlen_q <= FEW)": ")",
    "(mask._is_immutable and": "(False and",
    ("cpu/test_arguments.py", "cpu/test_tile.py::test_grids", "cpu/test_tile.py::test_draw"): {
        "(col == item or cols <= 1)": "(col == item or cols <= 2)",
        "(row >= cols * item or rows <= 1)": "(row > 0 or rows <= 1)",
        " and x.flags.aligned": "",
        "max(strides[-2] // itemsize, cols, 1)": "max(cols, 1)",
        "np.repeat(steps[-1], heads": "np.tile(steps[-1], heads",
        "[np.arange(size) * stride for": "[np.arange(size)[::-1] * stride for",
        "return np.array(offsets": "return np.asarray(offsets",
        "cells, rows = cells[..., :1, :], rows * cells.shape[-2]": "cells = cells[..., :1, :]",
        "cells[..., :1], cols * cells.shape[-1]": "cells[..., :1], cols",
        "np.minimum(m0 + tile_m, np.repeat(bounds[1:], counts))": "m0 + tile_m",
        "(np.diff(first) != 0) | (np.diff(end) != 0)": "np.diff(first) != 0",
        "(m_end - m0) * (end - first)": "(m_end - m0 + 1) * (end - first)",
        "own[m0] - m0], axis=-1)[::-1]": "own[m0] - m0], axis=-1)",
        "batch[-1] if batch else 1), cut": "1), cut",
    },
    ("caches/test_kv_cache.py::test_8_bits[16-1-int8]", "caches/test_kv_cache.py::test_8_bits[None-1-int8]"): {
        "slice(1 if is_paged(problem) else 0, -2)": "slice(0, -2)",
        "end = tiles.table.copy(), lengths[tiles.table[:, 0], 0]": "end = tiles.table.copy(), 0 * tiles.table[:, 0]",
    },
    (
        "cpu/test_record.py::test_what_is_kept_keeps_no_array_of_a_mask",
        "cpu/test_record.py::test_arrays_of_masks_and_scores_are_read_anew",
    ): {
        "return known(problem, NO_FRAME, *more)": "return known(problem, mask, *more)",
        "known if mask._is_immutable else function": "known",
    },
}
