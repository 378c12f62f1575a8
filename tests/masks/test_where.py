"""Where: a mask that is a function, and what is kept of it."""

import copy
import pickle

import numpy as np
import pytest

import numbattn as na
from numbattn.base.origin import Crop
from numbattn.cpu import where as on_cpus
from numbattn.masks import cropped

from ..accuracy import assert_equal, check, random

M, N = 70, 150
DOCUMENTS = np.sort(np.random.default_rng(1).integers(0, 4, N))
REACH = np.array([4, 20, 100], np.uint8)


def same_document(batch, head, i, j, document):
    return document[i] == document[j] and j <= i + 80


def within(batch, head, i, j, reach):
    return abs(i + 80 - j) <= reach[head] - batch


def striped(batch, head, i, j):
    return j <= i + 80 and (i + 80 - j < 40 or j % 7 == 0)


def shown_by(function, batch, heads, m=M, n=N):
    """An array of booleans, element by element."""
    return np.array([function(*at) for at in np.ndindex(batch, heads, m, n)]).reshape(batch, heads, m, n)


WHERE = {
    "striped": lambda: na.Where(striped),
    "documents": lambda: na.Where(same_document, [DOCUMENTS], block_size=32),
    "by head and batch": lambda: na.Where(within, [REACH], block_size=7),
}


@pytest.mark.parametrize("name", WHERE)
def test_what_it_shows(name):
    mask, arrays = WHERE[name](), [x.astype(int) for x in WHERE[name]().arrays]
    want = shown_by(lambda *at: mask.function(*at, *arrays), 2, 3)
    assert_equal(np.broadcast_to(mask.dense(M, N, heads=3, batch=2), want.shape), want)
    both = (mask & na.Causal()).dense(M, N, heads=3, batch=2)
    assert_equal(np.broadcast_to(both, want.shape), want & na.Causal().dense(M, N))
    assert_equal(mask.dense(M, N), want[0, 0])
    assert_equal((mask & na.Window(9, 3)).dense(M, N), want[0, 0] & na.Window(9, 3).dense(M, N))
    assert_equal((want[0, 0] | mask).dense(M, N), want[0, 0])


@pytest.mark.parametrize("name", WHERE)
@pytest.mark.parametrize("joined", ["alone", "and", "or"])
def test_attention(rng, xp, name, joined):
    """Of several tiles each way."""
    q, k, v = (random(rng, (2, 3, n, 24), np.float32) for n in (M, N, N))
    mask = WHERE[name]()
    mask = mask & na.Window(60, 50) if joined == "and" else mask | na.Window(9, 3) if joined == "or" else mask
    check(q, k, v, rng, xp, mask=mask)


def test_many_keys(rng):
    """Blocks that are empty are skipped, nothing is tested in those that are full: keys are NaN, or they would be."""
    q, k, v = random(rng, (3, 1, 1, 400, 16), np.float32)
    mask = na.Where(lambda batch, head, i, j: i // 128 == j // 128, block_size=128)
    want = na.attention(q, k, v, mask=na.Segments([0, 128, 256, 384, 400]))
    np.testing.assert_allclose(na.attention(q, k, v, mask=mask), want, rtol=1e-5, atol=1e-6)
    assert_equal(mask._fit((400, 400))._with_states(q)._states, 2 * np.eye(4, dtype=np.uint8))


def test_states_are_found_once(rng, monkeypatch):
    found, states = [], on_cpus._states
    monkeypatch.setattr(on_cpus, "_states", lambda mask, size: found.append(size) or states(mask, size))
    x, document = random(rng, (3, 2, 4, 60, 8), np.float32), np.arange(60) // 20
    mask = na.Where(lambda batch, head, i, j, document: document[i] == document[j], [document])
    before = na.attention(*x, mask=mask)
    for _ in range(2):
        o, saved = na.attention_forward(*x, mask=mask)
        na.attention_backward(o, saved)
    na.attention(*x, mask=mask & na.Causal())
    assert found == [64]
    na.attention(*x[..., :50, :], mask=mask)
    assert found == [64, 64]
    document[:] = 0                                             # edited in place: the states are found anew
    for _ in range(2):
        assert not np.array_equal(na.attention(*x, mask=mask), before)
        assert found == [64, 64, 64]
    na.attention(*x, mask=mask._mapped(np.copy))
    assert found == [64, 64, 64, 64]


def test_axes_are_those_of_what_it_reads():
    def shape(function):
        return na.Where(function)._fit((5, 2, 3, 300, 200))._blocks(128)

    assert shape(lambda batch, head, i, j: i > j) == (1, 1, 1, 3, 2)
    assert shape(lambda batch, head, i, j: i > j + head) == (1, 1, 3, 3, 2)
    assert shape(lambda batch, head, i, j: batch > 1) == (5, 2, 1, 3, 2)
    assert shape(lambda *place: place[0] > place[1]) == (5, 2, 3, 3, 2)
    assert shape(lambda *place: striped(*place) and place[2] > 3) == (1, 1, 1, 3, 2)


def test_values():
    one, other = na.Where(same_document, [DOCUMENTS]), na.Where(same_document, [DOCUMENTS])
    assert one == other
    assert hash(one) == hash(other)
    assert one != na.Where(same_document, [DOCUMENTS.copy()])
    assert one != na.Where(same_document, [DOCUMENTS], 128)
    assert na.Where(striped) != na.Where(lambda batch, head, i, j: j > i)
    assert repr(one) == "Where(same_document, arrays=[<int64 array (150,)>])"
    again = pickle.loads(pickle.dumps(one & na.Causal()))
    assert_equal(again.dense(M, N), (one & na.Causal()).dense(M, N))


def test_copies_have_the_function_that_was_taken():
    reach = 1
    mask = na.Where(lambda batch, head, i, j, x: j <= reach + x[i], [np.zeros(3, int)])
    before, reach = mask.dense(3, 4), 2
    again = copy.deepcopy(mask)
    assert_equal(again.dense(3, 4), before)
    again.arrays[0][:] = 5
    assert_equal(mask.dense(3, 4), before)
    assert copy.copy(mask) == mask != again


def test_arrays_edited_in_place_count(rng):
    document, x = np.array([0, 0, 1, 1]), rng.standard_normal((1, 1, 4, 8))
    mask = na.Where(same_document, [document])
    for document[1] in (0, 1, 0):
        assert_equal(na.attention(x, x, x, mask=mask), na.attention(x, x, x, mask=na.Dense(mask.dense(4, 4))))


def test_parts_of_it_count_from_its_first_element():
    mask = na.Where(within, [REACH], 16)
    whole = mask.dense(M, N, heads=3)
    crop = Crop(20, 30, 60, 70, M, N)
    for fitted in (mask, mask._fit((1, 3, M, N))):
        part = cropped(fitted._from_head(1), crop)._fit((1, 2, 30, 70))
        assert_equal(part.dense(30, 70), whole[:, 1:, 20:50, 60:130])
        other = cropped(fitted, Crop(0, 30, 0, 70, M, N))._fit((1, 2, 30, 70))
        states = [x._with_states(whole)._states for x in (other, part)]
        assert_equal(states[1], part._with(_kept={})._with_states(whole)._states)
        assert not np.array_equal(*states)


OTHER_CALLS = {
    "segments": lambda q, k, v, mask: na.attention(q, k, v, mask=na.Segments([0, 30, M], [0, 90, N]) & mask),
    "few queries": lambda q, k, v, mask: na.attention(q[..., :1, :], k, v, mask=mask),
    "a cache": lambda q, k, v, mask: na.attention(q, cache_of(k, v), mask=mask),
    "tangents": lambda q, k, v, mask: na.attention_jvp(q, k, v, q, k, v, mask=mask)[1],
}


def cache_of(k, v):
    cache = na.KVCache.zeros(2, 3, N + 10, 8, like=k)
    cache.append(k, v)
    return cache


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_other_calls(rng, name):
    """As of a mask of the same elements."""
    q, k, v = (random(rng, (2, 3, n, 8), np.float32) for n in (M, N, N))
    mask = na.Where(striped)
    dense = na.Dense(mask.dense(1 if name == "few queries" else M, N + 10 * (name == "a cache")))
    got, want = (OTHER_CALLS[name](q, k, v, mask) for mask in (mask, dense))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


WRONG = {
    "no function": (lambda: na.Where(3), "Where function: got 3, expected a Python function"),
    "too few arguments": (lambda: na.Where(lambda i, j: i > j), r"as \(batch, head, i, j, \*arrays\) with 0 arrays"),
    "no sequence": (lambda: na.Where(striped, DOCUMENTS), "Where arrays: got .*, expected a sequence of arrays"),
    "complex numbers": (lambda: na.Where(same_document, [DOCUMENTS * 1j]), r"Where arrays\[0\]: got .*complex128"),
    "no block": (lambda: na.Where(striped, (), 0), "Where block_size: got 0, allowed 1"),
    "what raises": (lambda: na.Where(raises), "Where function: raises has a raise or an assert"),
    "a number": (lambda: call(lambda batch, head, i, j: i - j), "mask: .* may return something else than True or"),
    "None": (lambda: call(lambda batch, head, i, j: None), "mask: .* may return something else than True or False"),
    "a list": (lambda: call(lambda batch, head, i, j: [i, j][0] > 3), "Where function: .*, makes a list"),
    "a string": (lambda: call(lambda batch, head, i, j: i > "j"), "mask: Numba cannot compile"),
}


def raises(batch, head, i, j):
    assert i > j


def call(function):
    x = np.zeros((3, 4))
    return na.attention(x, x, x, mask=na.Where(function))


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_errors(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.gpu
def test_graphs_streams_and_memory(rng):
    """States are found on each stream; in a capture they are part of the graph."""
    import cupy

    document = cupy.asarray(DOCUMENTS)
    mask, x = na.Where(same_document, [document]), cupy.asarray(random(rng, (1, 2, N, 32), np.float16))
    want = na.attention(x, x, x, mask=na.Where(same_document, [document]))      # which keeps states of its own
    cupy.testing.assert_allclose(want, na.attention(x, x, x, mask=na.Dense(mask.dense(N, N))), atol=0.002)
    for _ in range(2):
        with (stream := cupy.cuda.Stream(non_blocking=True)):
            stream.begin_capture()
            o = na.attention(x, x, x, mask=mask)
            graph = stream.end_capture()
            o[...] = 0
            graph.launch()
            stream.synchronize()
            assert_equal(o, want)
            assert_equal(na.attention(x, x, x, mask=mask), want)
            stream.synchronize()


FAULTS = {
    "test_parts_of_it_count_from_its_first_element": {
        "_at=at, _shape=shape, _states=None": "_shape=shape, _states=None",
        "head=self._at.head + head": "head=self._at.head",
        "(place, self._at, self._lead, self._sizes)": "(place, self._lead, self._sizes)",
    },
    "test_axes_are_those_of_what_it_reads": {
        "*(n if by_head else 1": "*(n if by_batch else 1",
    },
    "test_arrays_edited_in_place_count": {"[0] != held": "[0] is None"},
    "test_states_are_found_once": {
        "arrays=copies, _states=None, _kept={}": "arrays=copies, _states=None",
    },
}
