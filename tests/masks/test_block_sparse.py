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


FAULTS = {
    "(i ^ j) & ((i ^ j) - 1)": "(i ^ j) & (i ^ j)",
    "(abs(i - j) <= local) | (np.minimum(i, j) < everywhere)":
        "(abs(i - j) <= local) | (np.minimum(i, j) <= everywhere)",
    "(abs(i - j) <= local) | ((i - j) % stride == 0)": "(abs(i - j) < local) | ((i - j) % stride == 0)",
    "j = np.arange(n_blocks) * shorter // max(n_blocks, 1)": "j = np.arange(n_blocks)",
    "test_origin.py::test_masks": {
        "(math.gcd(*x) for x in zip(self.block_size,": "(x[0] for x in zip(self.block_size,",
    },
}
