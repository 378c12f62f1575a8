"""Small masks, and what they are to show."""

import numpy as np
from hypothesis import strategies as st

import numbattn as na

from ..accuracy import assert_equal

LENGTHS = st.tuples(st.integers(0, 20), st.integers(0, 20))
NUMBER = st.integers(-25, 25)
WINDOWS = st.tuples(st.none() | NUMBER, st.none() | NUMBER).filter(lambda ends: None in ends or sum(ends) >= 0)
ARRAY = np.array([[2], [3]])
KINDS = [na.Causal(), na.Window(3, 1), na.Lengths(keys=ARRAY), na.Dense(np.eye(5, 6, dtype=bool)[None, None]),
         na.Bits.pack(np.tri(5, 6, dtype=bool)[None, None]), na.BlockSparse(np.eye(3, dtype=bool)[None, None], (2, 2)),
         na.Tail(np.eye(5, dtype=bool)[None, None]), na.First(ARRAY)]  # fmt: skip
FIRST, END = np.array([[0, 5, 2, 1, 9]]), np.array([[3, 6, 6, 1, 2], [1, 2, 3, 4, 5]])[:, None]
INTERVALS = [na.Segments([1, 2, 2, 5], [0, 2, 3, 5]), na.Segments([[[0, 4]], [[1, 5]]], [0, 6]), na.Prefix(2),
             na.Prefix(np.array([[1], [4]]), 0), na.Intervals(FIRST[None], END)]  # fmt: skip


def by_definition(m, n, sees):
    return np.array([[sees(i, j) for j in range(n)] for i in range(m)], bool).reshape(m, n)


def copied(mask, xp):
    """A mask with arrays of xp, the same there and back again."""
    there, here = xp.empty(0), np.empty(0)
    copy = mask._like(there)
    assert copy._like(there) is copy
    assert (copy is mask) == (xp is np or not any(leaf._arrays() for leaf in mask._leaves))
    assert_equal(copy.dense(5, 6), mask.dense(5, 6))
    np.testing.assert_array_equal(copy._like(here).dense(5, 6), mask.dense(5, 6))
    return copy


# ---------------------------------------------------------------------------------------------------------- segments
@st.composite
def offsets(draw, count):
    """Of segments, with tokens before and beyond them: offsets and the number of tokens."""
    before, *lengths, beyond = draw(st.lists(st.integers(0, 6), min_size=count + 2, max_size=count + 2))
    found = np.cumsum([before, *lengths])
    return found, found[-1] + beyond


@st.composite
def segments(draw):
    """Offsets of queries and keys, and how many of these there are."""
    count = draw(st.integers(0, 4))
    (queries, m), (keys, n) = draw(offsets(count)), draw(offsets(count))
    return queries, keys, m, n


def in_segment(queries, keys, i, j):
    """The number of the segment in which both are, or None."""
    for s in range(len(queries) - 1):
        if queries[s] <= i < queries[s + 1] and keys[s] <= j < keys[s + 1]:
            return s
    return None
