"""Dense and Bits, element by element."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import numbattn as na
from numbattn.masks import as_mask

from ..accuracy import assert_equal
from .examples import LENGTHS, by_definition


@given(LENGTHS, st.integers(0, 2**32 - 1))
def test_dense_and_bits(lengths, seed):
    visible = np.random.default_rng(seed).random((2, 1, *lengths)) < 0.5
    np.testing.assert_array_equal(na.Dense(visible).dense(*lengths), visible)
    bits = na.Bits.pack(visible)
    assert bits.words.dtype == np.uint32
    assert bits.words.shape == (2, 1, lengths[0], -(-lengths[1] // 32))
    np.testing.assert_array_equal(bits.dense(*lengths), visible)


def test_bits_by_definition(rng):
    words = rng.integers(0, 2**32, (5, 3), np.uint32)
    want = by_definition(5, 70, lambda i, j: (int(words[i, j // 32]) >> (j % 32)) & 1)
    np.testing.assert_array_equal(na.Bits(words).dense(5, 70), want)


@given(st.lists(st.integers(-1, 30), max_size=12))
def test_tree(parents):
    parents = [min(parent, node - 1) for node, parent in enumerate(parents)]

    def sees(i, j):
        while i not in (j, -1):
            i = parents[i]
        return i == j

    nodes = len(parents)
    np.testing.assert_array_equal(na.Bits.tree(parents).dense(nodes, nodes), by_definition(nodes, nodes, sees))


def test_trees_in_any_order_and_batched():
    trees = na.Bits.tree(np.array([[-1, 0, 1], [1, 2, -1]]))
    chain, backwards = [[1, 0, 0], [1, 1, 0], [1, 1, 1]], [[1, 1, 1], [0, 1, 1], [0, 0, 1]]
    assert trees.dense(3, 3).astype(int).tolist() == [chain, backwards]
    assert na.Bits.tree(np.zeros((2, 0), int)).words.shape == (2, 0, 0)


@pytest.mark.parametrize("shape", [(5,), (4, 1), (1, 1), (4, 5), (3, 1, 5), (2, 1, 1, 5), (2, 1, 4, 1), (2, 3, 4, 5)])
def test_booleans_are_broadcast_as_in_numpy(rng, shape):
    visible = rng.random(shape) < 0.5
    shown = as_mask(visible)._fit((2, 3, 4, 5)).dense(4, 5)
    np.testing.assert_array_equal(np.broadcast_to(shown, (2, 3, 4, 5)), np.broadcast_to(visible, (2, 3, 4, 5)))


@pytest.mark.parametrize("shape", [(4, 2), (1, 2), (3, 1, 2), (2, 1, 1, 2), (2, 3, 4, 2)])
def test_bits_are_broadcast_as_in_numpy(rng, shape):
    words = rng.integers(0, 2**32, shape, np.uint32)
    bits = na.Bits(words)._fit((2, 3, 4, 40))
    assert np.shares_memory(bits.words, words)
    want = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")[..., :40]
    for mask in bits, na.Bits(words), na.Bits(np.repeat(words, 2, axis=-1)[..., ::2]):
        np.testing.assert_array_equal(np.broadcast_to(mask.dense(4, 40), (2, 3, 4, 40)),
                                      np.broadcast_to(want, (2, 3, 4, 40)))  # fmt: skip


def test_any_bytes_but_0_are_true(rng):
    """As NumPy reads a boolean view of other bytes."""
    numbers = rng.integers(0, 4, (5, 40)).astype(np.uint8)
    odd = numbers.view(bool)
    for mask in na.Dense(odd), na.Bits.pack(odd), na.BlockSparse(odd, (1, 1)):
        np.testing.assert_array_equal(mask.dense(5, 40), numbers != 0)


def test_bits_of_cupy_arrays(rng, xp):
    visible = rng.random((2, 1, 5, 70)) < 0.5
    bits = na.Bits.pack(xp.asarray(visible))
    assert_equal(bits.dense(5, 70), visible)
    assert_equal(na.Bits(np.repeat(bits.words, 2, axis=-1)[..., ::2]).dense(5, 70), visible)
    tree = na.Bits.tree(xp.asarray([-1, 0, 0, 1]))
    assert isinstance(tree.words, xp.ndarray)
    assert_equal(tree.words, na.Bits.tree([-1, 0, 0, 1]).words)


FAULTS = {
    "padded[..., bit::8]": "padded[..., 7 - bit::8]",
    "cast(Any, visible).view(np.uint8) != 0": "visible",
    "for _ in range(nodes)": "for _ in range(nodes - 1)",
    "visible[tree, at, node[tree, at]] = True": "visible[tree, node[tree, at], at] = True",
}
