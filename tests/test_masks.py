"""Every mask against its definition, element by element, and what follows from the definitions."""

import operator
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import numbattn as na
from numbattn.masks import All, AnyOf, as_mask

from .accuracy import assert_equal

LENGTHS = st.tuples(st.integers(0, 20), st.integers(0, 20))
SHIFT = st.integers(-25, 25)


def by_definition(m, n, sees):
    return np.array([[sees(i, j) for j in range(n)] for i in range(m)], bool).reshape(m, n)


@given(LENGTHS, st.none() | SHIFT)
def test_causal(lengths, offset):
    m, n = lengths
    own = n - m if offset is None else offset
    np.testing.assert_array_equal(na.Causal(offset).dense(m, n), by_definition(m, n, lambda i, j: j <= i + own))


@given(LENGTHS, st.none() | SHIFT, st.none() | SHIFT, st.none() | SHIFT)
def test_window(lengths, left, right, offset):
    m, n = lengths
    own = n - m if offset is None else offset

    def sees(i, j):
        return (left is None or j >= i + own - left) and (right is None or j <= i + own + right)

    np.testing.assert_array_equal(na.Window(left, right, offset).dense(m, n), by_definition(m, n, sees))


@given(LENGTHS, st.data())
def test_lengths(lengths, data):
    m, n = lengths
    keys, queries = data.draw(st.integers(0, n)), data.draw(st.integers(0, m))
    want = by_definition(m, n, lambda i, j: i < queries and j < keys)
    np.testing.assert_array_equal(na.Lengths(keys, queries).dense(m, n), want)
    np.testing.assert_array_equal(na.Lengths(keys=keys).dense(m, n), by_definition(m, n, lambda i, j: j < keys))


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


@given(st.lists(st.integers(-1, 30), min_size=1, max_size=12))
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


ARRAY = np.array([[2], [3]])
KINDS = [na.Causal(), na.Window(3, 1), na.Lengths(keys=ARRAY), na.Dense(np.eye(5, 6, dtype=bool)[None, None]),
         na.Bits.pack(np.tri(5, 6, dtype=bool)[None, None]), na.BlockSparse(np.eye(3, dtype=bool)[None, None], (2, 2))]


@pytest.mark.parametrize("one", KINDS, ids=repr)
@pytest.mark.parametrize("other", KINDS, ids=repr)
def test_and(one, other):
    want = one.dense(5, 6) & other.dense(5, 6)
    np.testing.assert_array_equal((one & other).dense(5, 6), want)
    np.testing.assert_array_equal((one & other & one).dense(5, 6), want)


UNIONS = {
    "stream": na.Causal() & (na.Window(1, 0) | na.Lengths(keys=2)),
    "lengths": na.Window(1, 0) | KINDS[2],
    "two gaps": (na.Window(0, 0) | na.Lengths(1)) & (na.Causal(-1) | na.Window(None, 2, np.array([[1], [3]]))),
    "nobody": na.Lengths(0) | na.Lengths(queries=0),
    "nested": (na.Causal() | na.Lengths(2) & (na.Window(0, 0) | na.Lengths(1))) & na.Window(3, 3),
    "three": na.Window(0, 0) | na.Lengths(1) | na.Window(None, -3),
    "grids": na.Window(0, 0) & (KINDS[3] | KINDS[4]) | KINDS[2] & KINDS[5],
}


@pytest.mark.parametrize("one", KINDS, ids=repr)
@pytest.mark.parametrize("other", KINDS, ids=repr)
def test_or(one, other):
    want = one.dense(5, 6) | other.dense(5, 6)
    np.testing.assert_array_equal((one | other).dense(5, 6), want)
    np.testing.assert_array_equal((one | other | one).dense(5, 6), want)


@st.composite
def trees(draw, depth=3):
    """A mask of & and |, and the booleans it stands for, in which every mask has a row."""
    if depth == 0 or draw(st.booleans()):
        seed, number = draw(st.integers(0, 999)), st.integers(-3, 7)
        leaf = draw(st.sampled_from([
            na.Causal(draw(number)), na.Window(draw(number), draw(number)), na.Lengths(keys=draw(st.integers(0, 6))),
            na.Lengths(queries=draw(st.integers(0, 5))), na.Dense(np.random.default_rng(seed).random((5, 6)) < 0.5),
            na.Prefix(draw(st.integers(0, 6)), draw(number)),
            na.Intervals(*np.random.default_rng(seed).integers(-2, 8, (2, 5))),
        ]))  # fmt: skip
        return leaf, leaf.dense(5, 6)
    (one, seen), (other, also_seen) = draw(trees(depth - 1)), draw(trees(depth - 1))
    join = draw(st.sampled_from([operator.and_, operator.or_]))
    return join(one, other), join(seen, also_seen)


@given(trees())
def test_trees_of_masks(tree):
    mask, want = tree
    np.testing.assert_array_equal(mask.dense(5, 6), want)


def test_or_with_a_boolean_array_on_either_side(rng, xp):
    visible = rng.random((1, 1, 4, 4)) < 0.5
    want = na.Causal(-2).dense(4, 4) | visible
    visible = xp.asarray(visible)
    assert_equal((na.Causal(-2) | visible).dense(4, 4), want)
    assert_equal((visible | na.Causal(-2)).dense(4, 4), want)


def test_two_intervals_are_no_grid():
    """What becomes of an `|` follows from the kinds of its parts alone."""
    intervals, words = na.Window(1, 0) | na.Lengths(1), na.Window(1, 0) | na.Lengths(1) | na.Causal()
    assert (na.Causal() & intervals)._kinds == (na.Causal, AnyOf)
    assert (na.Causal() & words)._kinds == (na.Causal, na.Bits)
    assert (intervals & (na.Causal() | KINDS[5]))._kinds == (AnyOf, na.Bits)
    assert len((intervals & (na.Causal() | na.Prefix(3)))._gaps(np.arange(9), 9)) == 2


def test_and_with_a_boolean_array_on_either_side(rng, xp):
    visible = rng.random((1, 1, 4, 4)) < 0.5
    want = na.Causal().dense(4, 4) & visible
    visible = xp.asarray(visible)
    assert_equal((na.Causal() & visible).dense(4, 4), want)
    assert_equal((visible & na.Causal()).dense(4, 4), want)


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


# --------------------------------------------------------------------------------------------------- arrays of CuPy
def copied(mask, xp):
    """A mask with arrays of xp, the same there and back again."""
    there, here = xp.empty(0), np.empty(0)
    copy = mask._like(there)
    assert copy._like(there) is copy
    assert (copy is mask) == (xp is np or not any(leaf._arrays() for leaf in mask._leaves))
    assert_equal(copy.dense(5, 6), mask.dense(5, 6))
    np.testing.assert_array_equal(copy._like(here).dense(5, 6), mask.dense(5, 6))
    return copy


@pytest.mark.parametrize("mask", [*KINDS, KINDS[2] & KINDS[3], All(), *UNIONS.values()], ids=repr)
def test_like(xp, mask):
    copy = copied(mask, xp)._drawn(5, 6, xp.empty(0))
    for number in copy._band(5, 6):
        assert isinstance(number, int | xp.ndarray)
    for grid in copy._grids():
        assert isinstance(grid.cells, xp.ndarray)


@pytest.mark.parametrize("one", KINDS, ids=repr)
@pytest.mark.parametrize("other", KINDS, ids=repr)
def test_arrays_of_both_libraries(xp, one, other):
    want = one.dense(5, 6) & other.dense(5, 6)
    assert_equal((one & other._like(xp.empty(0))).dense(5, 6), want)
    assert_equal((one._like(xp.empty(0)) & other).dense(5, 6), want)


def test_lengths_out_of_range_are_clamped(xp):
    mask = na.Lengths(xp.asarray([-3, 4, 99]), xp.asarray([99, 2, -1]))
    assert_equal(mask.dense(5, 6), na.Lengths(np.array([0, 4, 6]), np.array([5, 2, 0])).dense(5, 6))


def test_bits_of_cupy_arrays(rng, xp):
    visible = rng.random((2, 1, 5, 70)) < 0.5
    bits = na.Bits.pack(xp.asarray(visible))
    assert_equal(bits.dense(5, 70), visible)
    assert_equal(na.Bits(np.repeat(bits.words, 2, axis=-1)[..., ::2]).dense(5, 70), visible)
    tree = na.Bits.tree(xp.asarray([-1, 0, 0, 1]))
    assert isinstance(tree.words, xp.ndarray)
    assert_equal(tree.words, na.Bits.tree([-1, 0, 0, 1]).words)


def test_no_mask_shows_everything():
    assert All().dense(2, 3).all()
    assert as_mask(None) == All()


def test_equality_is_by_value_for_numbers_and_by_identity_for_arrays():
    lengths = np.array([1, 2])
    same = [(na.Causal(), na.Causal()), (na.Window(1, 2), na.Window(1, np.int64(2))),
            (na.Causal() & na.Window(1, 2), na.Causal() & na.Window(1, 2)), (na.Lengths(lengths), na.Lengths(lengths)),
            (na.Causal() | na.Lengths(lengths), na.Causal() | na.Lengths(lengths))]
    for one, other in same:
        assert one == other
        assert hash(one) == hash(other)
    different = [(na.Causal(), na.Causal(0)), (na.Causal(), na.Window(None, 0)), (na.Lengths(3), na.Lengths(None, 3)),
                 (na.Lengths(lengths), na.Lengths(lengths.copy())), (na.Causal(), None),
                 (na.Causal() | na.Lengths(3), na.Causal() | na.Lengths(4)),
                 (na.Causal() | na.Lengths(3), na.Causal() & na.Lengths(3))]
    for one, other in different:
        assert one != other


def test_a_pickled_mask_hashes_alike_in_every_process():
    """Types and strings hash differently there: what has been cached stays behind."""
    mask = na.Causal() & (na.Window(3, 0) | na.Lengths(4))
    _, saved = na.attention_forward(*np.zeros((3, 6, 4)), mask=mask)
    assert hash(mask) == hash(saved.inputs.mask)
    code = ("import pickle, sys; import numbattn as na; mask, saved = pickle.load(sys.stdin.buffer); "
            "found = na.Causal() & (na.Window(3, 0) | na.Lengths(4)); assert mask in {found}; "
            "from dataclasses import replace; assert saved.problem in {replace(saved.problem)}")  # fmt: skip
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps((mask, saved)), check=True)


def test_masks_do_not_change():
    with pytest.raises(AttributeError):
        na.Causal().offset = 3


@pytest.mark.parametrize("far", [2**70, -(2**70), 2**63 - 1])
def test_far_numbers(far):
    assert na.Window(far, far).dense(3, 4).all() == (far > 0)
    assert na.Causal(np.array([np.clip(far, -(2**63), 2**63 - 1)])).dense(3, 4).all() == (far > 0)


FAR = np.array([-(2**63), -300, 3, 300, 2**63 - 1])


@pytest.mark.parametrize("mask", [
    na.Causal(FAR), na.Window(2**70, 2**70), na.Window(-(2**70), -(2**70)), na.Window(3, 1, offset=FAR),
    na.Lengths(FAR, FAR), na.Lengths(FAR[:, None]) & na.Causal(FAR),
], ids=repr)  # fmt: skip
def test_bands_end_with_the_matrix(mask):
    """Kernels add to these numbers in int32, and take them for lengths."""
    for number, (low, high) in zip(mask._band(7, 9), [(-7, 9), (-7, 9), (0, 7), (0, 9)]):
        assert np.min(number) >= low
        assert np.max(number) <= high


@pytest.mark.parametrize("make", [
    na.Causal, lambda offset: na.Window(None, 1, offset), lambda offset: na.Window(1, None, offset)
], ids=["causal", "right", "left"])  # fmt: skip
def test_far_beyond_the_matrix_is_beyond_the_matrix(make):
    """Sums of such numbers do not overflow."""
    np.testing.assert_array_equal(make(FAR).dense(7, 9), make(np.clip(FAR, -300, 300)).dense(7, 9))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint64])
def test_integer_dtypes(dtype):
    lengths = np.array([0, 100, 127], dtype)
    np.testing.assert_array_equal(na.Lengths(lengths).dense(1, 300).sum(axis=(-2, -1)), lengths)
    np.testing.assert_array_equal(na.Causal(lengths).dense(1, 300).sum(axis=(-2, -1)), lengths.astype(int) + 1)


def test_unsigned_numbers_do_not_wrap():
    most = np.array([2**64 - 1, 1], np.uint64)
    for mask in (na.Causal(most), na.Window(None, 0, most)):
        np.testing.assert_array_equal(mask.dense(1, 9).sum(axis=(-2, -1)), [9, 2])


@pytest.mark.parametrize(("mask", "text"), [
    (na.Causal(), "Causal()"),
    (na.Causal(offset=0), "Causal(offset=0)"),
    (na.Causal() & na.Window(256, None), "Causal() & Window(256, None)"),
    (UNIONS["stream"], "Causal() & (Window(1, 0) | Lengths(keys=2))"),
    (na.Causal() & na.Window(1, 2) | na.Lengths(3), "Causal() & Window(1, 2) | Lengths(keys=3)"),
    (na.Lengths(keys=ARRAY), "Lengths(keys=<int64 array (2, 1)>)"),
    (KINDS[5], "BlockSparse(blocks=<bool array (1, 1, 3, 3)>, block_size=(2, 2))"),
])  # fmt: skip
def test_repr(mask, text):
    assert repr(mask) == text


def test_operator_and_leaves_its_operands():
    one, other = na.Causal(), na.Window(1, 1)
    both = operator.and_(one, other)
    assert both._parts == (one, other)
    assert one._parts == (one,)
