"""A rank a GPU: with a CuPy that is not there."""

import sys

import numpy as np
import pytest

import numbattn as na
from numbattn import distributed as nad

from .fakes import Array, Cupy


@pytest.fixture
def cupy(monkeypatch):
    fake = Cupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


def test_each_rank_computes_on_its_device(rng, cupy):
    q, k, v, do = rng.standard_normal((4, 2, 200, 8))
    ring = nad.Devices([3, 5])
    parts = ring.split(q)
    assert [x.device.id for x in parts] == [3, 5]
    slopes = np.array([0.1, 0.2])
    o, backprop = nad.attention_vjp(ring, parts, ring.split(k), ring.split(v), causal=True, score=na.Alibi(slopes))
    grads = backprop(ring.split(do))
    want_o, want = na.attention_vjp(q, k, v, causal=True, score=na.Alibi(slopes))
    expected = want(do)
    for got, exact in zip((o, *grads), (want_o, *expected)):
        np.testing.assert_allclose(ring.join(got), exact, atol=1e-13)
    np.testing.assert_allclose(grads.score[0], expected.score[0], rtol=1e-12)
    assert cupy.current == [0]
    cupy.log.clear()
    ring.join(o)
    assert {entry[1] for entry in cupy.log if entry[0] == "copy"} == {"second of 3"}


def test_a_copy_is_behind_what_it_reads_and_before_what_overwrites_it(cupy):
    """In the order of both devices' streams; the host waits for neither."""
    ring = nad.Devices([3, 5])
    copy = ring._delivered(np.arange(6.0).reshape(2, 3).T.view(Array), 0, 1)
    np.testing.assert_array_equal(copy, np.arange(6.0).reshape(2, 3).T)
    assert copy.device.id == 5
    assert cupy.log == [*COPIED, ("wait", "3", 5), ("wait", "5", 5)]


COPIED = [("record", "3"), ("record", "5"), ("wait", "second of 5", 0), ("wait", "second of 5", 1),
          ("copy", "second of 5", 48), ("record", "second of 5")]  # fmt: skip


def test_streams_wait_for_a_copy_when_the_rank_does(cupy):
    """And not before: what is computed in between runs beside it. Memory that is read or written is in use until then.
    """
    ring = nad.Devices([3, 5])
    x = np.arange(6.0).view(Array)
    there, back = ring._begun([x], 0, 1), ring._begun([], 1, 0)
    assert cupy.log[:6] == COPIED
    assert there.arrays[0].ctypes.data == x.ctypes.data
    done = there.done, back.done
    cupy.log.clear()
    with ring._at(1):
        (copy,) = ring._arrived(there, back)
    with ring._at(0):
        assert ring._arrived(back, there) == []
    np.testing.assert_array_equal(copy, x)
    assert cupy.log == [*[("wait", "5", event) for event in done], *[("wait", "3", event) for event in done[::-1]]]


def test_split_of_an_array_of_another_device(cupy):
    x = cupy.placed(np.zeros((20, 4)))
    full, empty = nad.Devices([3, 5], "contiguous").split(x)
    assert (full.shape, empty.shape) == ((0, 4), (20, 4))
    assert [entry[1] for entry in cupy.log if entry[0] == "copy"] == ["second of 3", "second of 5"]
    assert ("record", "0") in cupy.log


def test_errors(cupy):
    with pytest.raises(TypeError, match="devices: got 'a'"):
        nad.Devices("ab")
    with pytest.raises(ValueError, match="ranks: got 0, allowed 1 or more"):
        nad.Devices([])
