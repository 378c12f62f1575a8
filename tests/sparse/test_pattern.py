"""Lists of the blocks that are there."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import numbattn as na
from numbattn import sparse

BLOCKS = np.array([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 0, 1]], bool)


@pytest.fixture
def pattern():
    return sparse.Pattern(na.BlockSparse(BLOCKS, (16, 32)))


def test_lists(pattern):
    assert (pattern.shape, pattern.count) == ((48, 128), 5)
    assert repr(pattern) == "Pattern(5 of 12 blocks of (16, 32), (48, 128))"
    assert_array_equal(pattern.places, [[0, 1], [0, 3], [2, 0], [2, 1], [2, 3]])
    assert_array_equal(pattern._by_column.starts, [0, 1, 3, 3, 5])
    assert_array_equal(pattern._by_column.entries, [[2, 2], [0, 0], [2, 3], [0, 1], [2, 4]])
    assert_array_equal(pattern._by_row.starts, [0, 2, 2, 5])
    assert_array_equal(pattern._by_row.entries, [[1, 0], [3, 1], [0, 2], [1, 3], [3, 4]])
    assert_array_equal(pattern._groups(2), [[0, 1, 0, 3, 1], [2, 0, 2, 1, 3], [2, 3, 4, -1, -1]])


def test_values_of_a_dense_matrix_and_back(pattern, rng):
    dense = rng.standard_normal(pattern.shape)
    w = pattern.values(dense)
    assert_array_equal(w[3], dense[32:48, 32:64])
    mask = np.repeat(np.repeat(BLOCKS, 16, axis=0), 32, axis=1)
    assert_array_equal(pattern.dense(w), np.where(mask, dense, 0))


def test_a_pattern_stays_as_it_was(rng):
    blocks = BLOCKS.copy()
    pattern = sparse.Pattern(na.BlockSparse(blocks, (16, 32)))
    blocks[:] = True
    assert pattern.count == 5


WRONG = {
    "no mask": (lambda p: sparse.Pattern(BLOCKS), TypeError, "mask: got numpy.ndarray of bool, expected a BlockSparse"),
    "heads": (lambda p: sparse.Pattern(na.BlockSparse(BLOCKS[None])), ValueError, "mask: got blocks of the shape"),
    "size": (lambda p: sparse.Pattern(na.BlockSparse(BLOCKS, (48, 64))), ValueError, "block_size of .48, 64., allowed"),
    "dense": (lambda p: p.values(np.zeros((3, 3))), ValueError, r"dense: got the shape \(3, 3\), expected \(48, 128\)"),
    "a list": (lambda p: p.values([[1.0]]), TypeError, "dense: got list, expected a numpy.ndarray"),
    "a number": (lambda p: p.dense(3), TypeError, "w: got 3, expected a numpy.ndarray"),
    "w": (lambda p: p.dense(np.zeros((3, 3, 3))), ValueError, r"w: got the shape \(3, 3, 3\), expected \(5, 16, 32\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(pattern, case):
    call, error, words = WRONG[case]
    with pytest.raises(error, match=words):
        call(pattern)


FAULTS = {
    "entries = np.stack([self.places[order, 1 - axis], order], axis=1)":
        "entries = np.stack([self.places[order, axis], order], axis=1)",
    "some = entries[first : first + members]": "some = entries[: members]",
}
