"""`&` and `|`, element by element, and what kernels take of them."""

import operator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import numbattn as na
from numbattn.masks import All, AnyOf, Cached, as_mask, materialised

from ..accuracy import assert_equal
from .examples import INTERVALS, KINDS, WINDOWS, copied

OTHERS = [na.Causal(0), na.Window(3, 1, 1), na.Lengths(keys=np.array([[2], [3]])), na.Dense(np.eye(5, 6, dtype=bool)),
          na.Bits.pack(np.tri(5, 6, dtype=bool)[None, None]),
          na.BlockSparse(np.eye(3, dtype=bool)[None, None], (2, 2))]  # fmt: skip


@pytest.mark.parametrize("one", KINDS, ids=repr)
@pytest.mark.parametrize("other", KINDS, ids=repr)
def test_and(one, other):
    want = one.dense(5, 6) & other.dense(5, 6)
    np.testing.assert_array_equal((one & other).dense(5, 6), want)
    np.testing.assert_array_equal((one & other & one).dense(5, 6), want)


@pytest.mark.parametrize("one", INTERVALS, ids=repr)
@pytest.mark.parametrize("other", [*OTHERS, *INTERVALS[3:]], ids=repr)
def test_and_of_intervals(one, other):
    want = one.dense(5, 6) & other.dense(5, 6)
    assert_equal((one & other).dense(5, 6), want)
    assert_equal((other & one).dense(5, 6), want)


ALIGNED = [
    na.Causal(), na.Window(2, 1), na.Window(None, -1), na.Causal(1), na.Prefix(2), na.Intervals([1], [3]),
    na.Window(1, 0) | na.Lengths(keys=1), na.Causal() & (na.Window(1, 0) | na.Prefix(1)), na.First(2),
    na.Causal() & (na.Window(1, 0) | na.First(1)),
    na.Window(1, 0) | na.Prefix(1) | na.Causal(-9),
]  # fmt: skip


@given(st.sampled_from(ALIGNED), st.integers(0, 9), st.lists(st.integers(0, 12), min_size=1, max_size=3))
def test_beside_the_keys_of_a_cache(mask, m, lengths):
    """Each sequence sees what it sees alone."""
    found = (Cached(np.array(lengths)[:, None]) & mask).dense(m, 12)
    for shown, n in zip(found, lengths, strict=True):
        assert_equal(shown[0, :, :n], mask.dense(m, n))
        assert not shown[..., n:].any()


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
            na.Causal(draw(number)), na.Window(*draw(WINDOWS)), na.Lengths(keys=draw(st.integers(0, 6))),
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


def test_and_with_a_boolean_array_on_either_side(rng, xp):
    visible = rng.random((1, 1, 4, 4)) < 0.5
    want = na.Causal().dense(4, 4) & visible
    visible = xp.asarray(visible)
    assert_equal((na.Causal() & visible).dense(4, 4), want)
    assert_equal((visible & na.Causal()).dense(4, 4), want)


def test_two_intervals_are_no_grid():
    """What becomes of an `|` follows from the kinds of its parts alone."""
    intervals, words = na.Window(1, 0) | na.Lengths(1), na.Window(1, 0) | na.Lengths(1) | na.Causal()
    assert (na.Causal() & intervals)._kinds == (na.Causal, AnyOf)
    assert (na.Causal() & words)._kinds == (na.Causal, na.Bits)
    assert (intervals & (na.Causal() | KINDS[5]))._kinds == (AnyOf, na.Bits)
    assert len((intervals & (na.Causal() | na.Prefix(3)))._gaps(np.arange(9), 9)) == 2
    both_kinds = intervals & (na.Causal() | KINDS[5])
    assert materialised(both_kinds, 5, 6, np.empty(0))._parts[0] is intervals


def test_nobody_sees_the_gap_between_two_intervals():
    mask = na.Window(0, 0, offset=2) | na.Lengths(keys=1)
    np.testing.assert_array_equal(mask.dense(3, 5), [[1, 0, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 0, 1]])


def test_no_mask_shows_everything():
    assert All().dense(2, 3).all()
    assert as_mask(None) == All()


def test_operator_and_leaves_its_operands():
    one, other = na.Causal(), na.Window(1, 1)
    both = operator.and_(one, other)
    assert both._parts == (one, other)
    assert one._parts == (one,)


# --------------------------------------------------------------------------------------------------- arrays of CuPy
@pytest.mark.parametrize("mask", [*KINDS, KINDS[2] & KINDS[3], All(), *UNIONS.values()], ids=repr)
def test_like(xp, mask):
    copy = materialised(copied(mask, xp), 5, 6, xp.empty(0))
    for number in copy._band(5, 6):
        assert isinstance(number, int | xp.ndarray)
    for grid in copy._grids():
        assert isinstance(grid.cells, xp.ndarray)


@pytest.mark.parametrize("mask", [
    *INTERVALS, INTERVALS[0] & na.Causal() & INTERVALS[3], INTERVALS[1] & na.Prefix(3)
], ids=repr)  # fmt: skip
def test_like_of_intervals(xp, mask):
    copy = copied(mask, xp)
    assert all(isinstance(x, xp.ndarray) for x in copy._interval(xp.arange(5), 6))


@pytest.mark.parametrize("one", KINDS, ids=repr)
@pytest.mark.parametrize("other", KINDS, ids=repr)
def test_arrays_of_both_libraries(xp, one, other):
    want = one.dense(5, 6) & other.dense(5, 6)
    assert_equal((one & other._like(xp.empty(0))).dense(5, 6), want)
    assert_equal((one._like(xp.empty(0)) & other).dense(5, 6), want)


FAULTS = {
    ("masks/test_bands.py", "masks/test_dense.py", "masks/test_logic.py"): {
        "(i + lo <= j)": "(i + lo < j)",
        "(j <= i + hi)": "(j < i + hi)",
        "(i < queries) &": "(i <= queries) &",
        "cell = cells[..., row, col]": "cell = cells[..., row, row]",
        ">> (j % cols)": ">> (7 - j % cols)",
        "minimum(i + hi + 1, keys)": "minimum(i + hi, keys)",
        "Interval(np.minimum(one.end, other.end), gap_end)": "Interval(np.maximum(one.end, other.end), gap_end)",
        "np.where(both, ": "np.where(True, ",
    },
    (
        "masks/test_segments.py::test_segments",
        "masks/test_segments.py::test_alignment_within_segments",
        "masks/test_segments.py::test_batch_axes",
        "masks/test_segments.py::test_cupys_offsets_out_of_range_are_clamped",
        "masks/test_segments.py::test_pack_and_unpack",
        "masks/test_calls.py::test_masks[-segments]",
        "masks/test_calls.py::test_unions_of_both_kinds_within_segments",
    ): {
        "if part not in self._within)": ")",
    },
    ("test_two_intervals_are_no_grid", "test_beside_the_keys_of_a_cache"): {
        "if mask._materialises(part) or": "if isinstance(part, AnyOf) or",
        "alternatives = self._inside(frame).of": "alternatives = self.of",
        "seqlen_k if isinstance(part, AnyOf) else keys": "seqlen_k",
        "part._inside(self._frame) if": "part._inside(self._segments) if",
    },
    "base/test_origin.py::test_masks_within_segments": {
        "segments if mask._segments is None else mask._segments": "mask._segments",
        "own is not None and isinstance(mask, Causal | Window)": "own is not None",
        "offset=own)._cropped(crop)": "offset=0 * own + 1)._cropped(crop)",
    },
}
