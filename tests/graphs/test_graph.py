"""Lists of neighbours, and the transposed ones."""

import copy
import pickle

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from numbattn import graphs

from ..accuracy import to_numpy


def test_lists(xp, rng):
    """By key the edges of each are in the order of their numbers."""
    i, j = rng.integers(9, size=50), rng.integers(7, size=50)
    g, order = graphs.Graph.from_edges(xp.asarray(i), xp.asarray(j), (9, 7))
    order, indptr, indices = map(to_numpy, (order, g.indptr, g.indices))
    assert (g.queries, g.keys, g.edges, repr(g)) == (9, 7, 50, "Graph(9 queries, 7 keys, 50 edges)")
    assert_array_equal(order, np.argsort(i, kind="stable"))
    assert_array_equal(indices, j[order])
    assert_array_equal(indptr, np.searchsorted(i[order], np.arange(10)))
    starts, queries, numbers = map(to_numpy, (g._by_key.starts, g._by_key.others, g._by_key.numbers))
    for key in range(7):
        edges = np.flatnonzero(indices == key)
        assert_array_equal(numbers[starts[key] : starts[key + 1]], edges)
        assert_array_equal(queries[starts[key] : starts[key + 1]], i[order][edges])
    g.check()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint64])
def test_more_queries_than_a_dtype_counts(xp, rng, dtype):
    i, j = rng.integers(100, size=50).astype(dtype), rng.integers(7, size=50).astype(dtype)
    g, order = graphs.Graph.from_edges(xp.asarray(i), xp.asarray(j), (300, 7))
    assert_array_equal(to_numpy(g.indptr), np.searchsorted(np.sort(i), np.arange(301)))
    assert_array_equal(to_numpy(g.indices), j[to_numpy(order)])


@pytest.mark.gpu
def test_edges_without_a_key_on_a_gpu():
    """They are in no list by key, and `check` finds them."""
    import cupy

    g = graphs.Graph(cupy.array([0, 2, 4]), cupy.array([3, 2**40, -1, 0]), 3)
    assert_array_equal(to_numpy(g._by_key.starts), [1, 2, 2, 2])
    with pytest.raises(ValueError, match="indices: got values from -1 to 3"):
        g.check()


def test_arrays_of_int32_are_not_copied():
    indptr, indices = np.array([0, 1], np.int32), np.array([0], np.int32)
    g = graphs.Graph(indptr, indices)
    assert g.indptr is indptr
    assert g.indices is indices
    assert g == g
    assert g != graphs.Graph(indptr.copy(), indices)
    for again in (copy.copy(g), pickle.loads(pickle.dumps(g))):
        assert_array_equal(again.indptr, indptr)


@pytest.mark.parametrize(("error", "words", "arguments"), [
    (TypeError, "indptr: got \\[0, 1\\], expected|indptr: got list", ([0, 1], np.array([0]))),
    (TypeError, "indices: got numpy.ndarray of float64, expected an array of integers", (np.array([0]), np.zeros(0))),
    (ValueError, r"indptr: got the shape \(0,\), expected \(queries \+ 1,\)", (np.zeros(0, int), np.zeros(0, int))),
    (ValueError, "indptr: got offsets from 0 to 2, expected from 0 to 1", (np.array([0, 2]), np.array([0]))),
    (ValueError, "indptr: got offsets from 1 to 1, expected from 0 to 1", (np.array([1, 1]), np.array([0]))),
    (ValueError, "indptr: got offsets that decrease", (np.array([0, 2, 1]), np.array([0]))),
    (ValueError, "indices: got values from 0 to 2, allowed 0 to 1", (np.array([0, 1, 2]), np.array([0, 2]))),
    (ValueError, "indices: got values from -1 to 0", (np.array([0, 1, 2]), np.array([0, -1]))),
    (ValueError, "keys: got -1, allowed 0", (np.array([0]), np.zeros(0, int), -1)),
])  # fmt: skip
def test_what_is_no_graph(error, words, arguments):
    with pytest.raises(error, match=words):
        graphs.Graph(*arguments)


def test_what_is_no_edge():
    for words, arguments in (
        ("queries: got values from 0 to 3, allowed 0 to 2", (np.array([0, 3]), np.array([0, 0]), (3, 3))),
        ("keys: got values from 0 to 3, allowed 0 to 2", (np.array([0, 0]), np.array([0, 3]), (3, 3))),
        (r"shape: got \(3,\), expected the numbers of queries and of keys", (np.array([0]), np.array([0]), (3,))),
        (r"keys: got the shape \(1,\), expected \(2,\)", (np.array([0, 0]), np.array([0]), (3, 3))),
    ):
        with pytest.raises(ValueError, match=words):
            graphs.Graph.from_edges(*arguments)


FAULTS = {
    'order = np.argsort(x, kind="stable")': 'order = np.argsort(x, kind="stable")[::-1]',
    'numbers, side="right").astype': 'numbers, side="left").astype',
    "(indptr[1:] < indptr[:-1]).any()": "False",
    "indptr[0] != 0 or": "",
    'check_values("indices", indices, keys - 1)': 'check_values("indices", indices, keys)',
    'check_values("queries", x, m - 1)': "pass",
    "x, y = _int32(x, m), _int32(y, n)": "pass",
}
