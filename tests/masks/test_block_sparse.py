"""BlockSparse, element by element, and its patterns."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import numbattn as na

from .examples import LENGTHS, by_definition


@given(LENGTHS, st.tuples(st.integers(1, 7), st.integers(1, 7)))
def test_block_sparse(lengths, size):
    m, n = lengths
    rows, cols = size
    blocks = np.random.default_rng(0).random((-(-m // rows), -(-n // cols))) < 0.5
    want = by_definition(m, n, lambda i, j: blocks[i // rows, j // cols])
    np.testing.assert_array_equal(na.BlockSparse(blocks, size).dense(m, n), want)


def test_butterfly():
    """log2(n) + 1 blocks a row, symmetric, and every block reaches every other one in log2(n) steps."""
    blocks = na.BlockSparse.butterfly((1, 64 * 16, 64 * 16)).blocks[0]
    assert (blocks.sum(axis=0) == 5).all()
    np.testing.assert_array_equal(blocks, blocks.T)
    assert np.linalg.matrix_power(blocks.astype(int), 4).all()


SMALL = st.integers(0, 4)


@given(st.integers(0, 12), SMALL, SMALL, st.integers(1, 5))
def test_patterns(n, local, everywhere, stride):
    """Of blocks of one element."""
    patterns = {
        na.BlockSparse.butterfly((n, n), (1, 1)): lambda i, j: bin(i ^ j).count("1") <= 1,
        na.BlockSparse.local_global((n, n), (1, 1), local, everywhere):
            lambda i, j: abs(i - j) <= local or i < everywhere or j < everywhere,
        na.BlockSparse.strided((n, n), (1, 1), local, stride):
            lambda i, j: abs(i - j) <= local or (i - j) % stride == 0,
    }  # fmt: skip
    for mask, sees in patterns.items():
        np.testing.assert_array_equal(mask.dense(n, n), by_definition(n, n, sees))


@pytest.mark.parametrize("build", [na.BlockSparse.butterfly, na.BlockSparse.local_global, na.BlockSparse.strided])
def test_the_pattern_of_the_shorter_axis_is_stretched(build):
    square = build((96, 96), (16, 16)).blocks
    np.testing.assert_array_equal(build((96, 288), (16, 16)).blocks, square.repeat(3, axis=1))
    np.testing.assert_array_equal(build((192, 96), (16, 16)).blocks, square.repeat(2, axis=0))
    np.testing.assert_array_equal(build((96, 192), (16, 32)).blocks, square)


@pytest.mark.parametrize("build", [
    na.BlockSparse.butterfly,
    na.BlockSparse.local_global,
    na.BlockSparse.strided,
])  # fmt: skip
@pytest.mark.parametrize("shape", [(1, 100, 100), (2, 1, 30, 500), (0, 0), (64, 1)])
def test_builders_fit_their_shape(build, shape):
    mask = build(shape, block_size=(16, 32))
    assert mask.blocks.shape == (*shape[:-2], -(-shape[-2] // 16), -(-shape[-1] // 32))
    assert mask.dense(*shape[-2:]).shape == shape
    assert mask.dense(*shape[-2:]).any(axis=-1).all()


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 4), st.integers(0, 2**32))
def test_from_indices(m, n, k, seed):
    """Of blocks of 2 x 3 elements, named twice or not at all, with counts or without."""
    rng, (m_blocks, n_blocks) = np.random.default_rng(seed), (-(-m // 2), -(-n // 3))
    indices = rng.integers(-1, n_blocks, (2, m_blocks, k), np.int32)
    counts = rng.integers(0, k, (2, m_blocks), np.int32, endpoint=True)
    for some, of_rows in [(None, np.full((2, m_blocks), k)), (counts, counts), (counts[:1], counts[[0, 0]]),
                          (k // 2, np.full((2, m_blocks), k // 2))]:  # fmt: skip
        mask = na.BlockSparse.from_indices(indices, some, shape=(m, n), block_size=(2, 3))
        want = np.zeros((2, m_blocks, n_blocks), bool)
        for place in np.ndindex(*of_rows.shape):
            chosen = indices[place][: of_rows[place]]
            want[place][chosen[chosen >= 0]] = True
        np.testing.assert_array_equal(mask.blocks, want)
        assert mask.block_size == (2, 3)
    na.BlockSparse.from_indices(np.full((2, m_blocks, k), n_blocks), 0, shape=(1, m, n), block_size=(2, 3))


@pytest.mark.parametrize(("indices", "about", "error", "words"), [
    ([[0], [3]], {}, ValueError, "indices: got 3, allowed -1 to 2"),
    ([[0], [-2]], {}, ValueError, "indices: got -2, allowed -1 to 2"),
    ([0, 1], {}, ValueError, r"indices: got the shape \(2,\), expected \(..., 2, k\)"),
    ([[0], [1], [1]], {}, ValueError, r"indices: got the shape \(3, 1\), expected \(..., 2, k\)"),
    ([[[0], [1]]] * 2, {"shape": (3, 4, 6)}, ValueError, r"for the shape \(3, 4, 6\) in blocks of 2 x 2"),
    ([[0], [1]], {"shape": (1, 4, 6)}, ValueError, r"for the shape \(1, 4, 6\)"),
    ([[0], [1]], {"counts": [1, 2]}, ValueError, "counts: got values from 1 to 2, allowed 0 to 1"),
    ([[0], [1]], {"counts": 2}, ValueError, "counts: got 2, allowed 0 to 1"),
    ([[0], [1]], {"counts": [1, 1, 1]}, ValueError, "counts: got the shape"),
    ([[0.0], [1.0]], {}, TypeError, "indices: got .* expected an int or an integer array"),
    ([[0], [1]], {"counts": "1"}, TypeError, "counts: got '1'"),
    ([[0], [1]], {"block_size": (0, 2)}, ValueError, "block_size: got 0"),
])  # fmt: skip
def test_indices_that_do_not_fit(indices, about, error, words):
    with pytest.raises(error, match=words):
        na.BlockSparse.from_indices(indices, **{"shape": (4, 6), "block_size": (2, 2), **about})


FAULTS = {
    "indices[is_given & ((indices < -1)": "indices[((indices < -1)",
    "| (indices >= n_blocks))]": ")]",
    "np.nonzero(is_given & (indices >= 0))": "np.nonzero(indices >= 0)",
    "is_given & (indices >= 0)": "is_given & (indices >= -1)",
    "or len(batch) >= len(lead)": "",
    "check_values(name, counts, largest=k)": "pass",
    "(i ^ j) & ((i ^ j) - 1)": "(i ^ j) & (i ^ j)",
    "(abs(i - j) <= local) | (np.minimum(i, j) < everywhere)":
        "(abs(i - j) <= local) | (np.minimum(i, j) <= everywhere)",
    "(abs(i - j) <= local) | ((i - j) % stride == 0)": "(abs(i - j) < local) | ((i - j) % stride == 0)",
    "j = np.arange(n_blocks) * shorter // max(n_blocks, 1)": "j = np.arange(n_blocks)",
    "base/test_origin.py::test_masks": {
        "(math.gcd(*x) for x in zip(self.block_size,": "(x[0] for x in zip(self.block_size,",
    },
}
