"""A rank a GPU: with a CuPy that is not there."""

import pickle
import sys

import numpy as np
import pytest

import numbattn as na
from numbattn import distributed as nad
from numbattn.call import passes
from numbattn.distributed import devices

from .fakes import Array, Cupy


@pytest.fixture
def cupy(monkeypatch):
    fake = Cupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(nad.Devices, "_library", "numpy")
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


@pytest.mark.parametrize(("rows", "blocks"), [
    (np.s_[..., 2:6, :], (6, 128, 256)), (np.s_[1, :, 2:6], (3, 128, 256)), (np.s_[:, :1, 2:6], (2, 128, 768)),
    (np.s_[..., 2:5, :], None), (np.s_[1], None),
])  # fmt: skip
def test_some_rows_of_all_matrices_are_copied_as_they_lie(rng, cupy, monkeypatch, rows, blocks):
    """Unless there are few."""
    monkeypatch.setattr(devices, "SMALLEST_BLOCK", 128)
    monkeypatch.setattr(cupy, "ascontiguousarray", cupy.ascontiguousarray if blocks is None else None)
    ring, x = nad.Devices([3, 5]), cupy.on(3, rng.standard_normal((2, 3, 8, 4)))[rows]
    assert devices.blocks_of(x) == blocks
    copy = ring._copied(x, 3, 5)
    np.testing.assert_array_equal(copy, x)
    assert copy.place == 5


def test_numbers_are_copied_without_axes(cupy):
    copy = nad.Devices([3, 5])._copied(cupy.on(3, np.array(0.5)), 3, 5)
    assert (copy.shape, copy.place, copy) == ((), 5, 0.5)


@pytest.mark.parametrize("axes", [(1, 0, 2), (2, 1, 0)])
def test_transposed_arrays_are_packed(rng, cupy, monkeypatch, axes):
    """Also those that are broadcast, and whose matrices are too far apart."""
    monkeypatch.setattr(devices, "SMALLEST_BLOCK", 1)
    ring, x = nad.Devices([3, 5]), cupy.on(3, rng.standard_normal((3, 4, 5)))
    np.testing.assert_array_equal(ring._copied(x.transpose(axes), 3, 5), x.transpose(axes))
    wide = np.broadcast_to(x, (2, 3, 4, 5)).view(type(x))
    np.testing.assert_array_equal(ring._copied(wide, 3, 5), wide)
    monkeypatch.setattr(devices, "LARGEST_STEP", 4 * 5 * 8 - 1)
    assert devices.blocks_of(x[:, 1:]) is None


def test_devices_reach_each_other_where_they_can(cupy):
    cupy.cuda.runtime.reachable = 5
    for _ in range(2):
        nad.Devices([3, 5, 4, 3])
    assert cupy.cuda.runtime.reached == {(3, 4), (4, 3)}


@pytest.fixture
def where(cupy, monkeypatch):
    """Of all calls of kernels the devices, and with each the devices of the arrays in masks and scores there."""
    found, run = set(), passes.run

    def watching(name, problem, *given):
        inputs = given[name == "run"]  # after the pass, if any is run by name
        arrays = [x for value in (inputs.mask, *inputs.score) for x in value._all_arrays]
        found.update((cupy.current[-1], x.place) for x in arrays if isinstance(x, Array))
        return run(name, problem, *given)

    monkeypatch.setattr(passes, "run", watching)
    return found


@pytest.mark.parametrize("plan", ["ring", "heads"])
def test_arrays_in_masks_and_scores_lie_on_any_device(rng, cupy, where, plan):
    """Each rank computes with copies on its device. Gradients are where the arrays are, of one on no rank's device on
    the first rank's."""
    ring, (q, k, v, do) = nad.Devices([3, 5]), rng.standard_normal((4, 3, 2, 200, 8))

    def options(on, at):
        return {"mask": na.Causal(on(3, np.array([[0], [9], [50]]))) & na.Window(150, 0), "score": [
            na.Alibi(on(at, np.array([0.1, 0.2])), offset=on(5, np.array([[0, 3]]))), na.Sink(on(5, np.array(0.5))),
        ]}  # fmt: skip

    o, backprop = na.attention_vjp(q, k, v, **options(lambda _, x: x, 0))
    expected = backprop(do)
    for at in (0, 3, 5):
        o_parts, backprop = nad.attention_vjp(ring, *map(ring.split, (q, k, v)), plan=plan, **options(cupy.on, at))
        grads = backprop(ring.split(do))
        for got, exact in zip((o_parts, *grads), (o, *expected)):
            np.testing.assert_allclose(ring.join(got), exact, atol=1e-12)
        for got, exact in zip(grads.score, expected.score, strict=True):
            np.testing.assert_allclose(got, exact, rtol=1e-11)
        assert [x.place for x in grads.score] == [at or 3, 5]
    assert where == {(3, 3), (5, 5)}


def test_caches_beside_arrays_of_any_device(rng, cupy, where):
    ring, (k, v) = nad.Devices([3, 5]), rng.standard_normal((2, 1, 2, 100, 8))
    queries, caches = [], []
    for device, first, end in ((3, 0, 70), (5, 70, 100)):
        own = k[:, :, first:end], v[:, :, first:end], np.array([end - first], np.int32)
        caches.append(na.KVCache(*(cupy.on(device, x) for x in own)))
        queries.append(cupy.on(device, k[:, :, -2:]))

    def options(on):
        return {"mask": na.Lengths(on(3, np.array([[90]]))), "score": na.Alibi(on(5, np.array([0.1, 0.2])))}

    found = nad.attention_over_keys(ring, queries, caches, **options(cupy.on))
    expected = na.attention(k[:, :, -2:], k, v, **options(lambda _, x: x))
    for o in found:
        np.testing.assert_allclose(o, expected, atol=1e-13)
    assert where == {(3, 3), (5, 5)}


def test_arrays_are_copied_where_they_are_not(rng, cupy):
    """In each call: they may have been written to since."""
    ring, slopes = nad.Devices([3, 5]), cupy.on(5, np.zeros(2))
    x, score = rng.standard_normal((2, 100, 8)), na.Alibi(slopes)
    for slope in (0.0, 1.0):
        slopes[...] = slope
        parts = ring.split(x)
        cupy.log.clear()
        o = nad.attention(ring, *[parts] * 3, causal=True, plan="ring", score=score)
        copies = [entry for entry in cupy.log if entry[0] == "copy" and entry[2] == slopes.nbytes]
        assert copies == [("copy", "second of 3", slopes.nbytes)]
        np.testing.assert_allclose(ring.join(o), na.attention(x, x, x, causal=True, score=na.Alibi(slope)), atol=1e-13)


def test_all_kinds_of_masks_and_scores_are_copied(cupy):
    """What lies on the device, or on the host, is not."""
    ring, x, numbers = nad.Devices([3, 5]), cupy.on(3, np.ones((8, 8), bool)), cupy.on(3, np.arange(9.0))
    values = [na.Dense(x), na.Lengths(cupy.on(3, np.arange(2))) | na.Tail(x), na.Causal() & na.BlockSparse(x, (8, 8)),
              na.Bias(numbers), na.Score(lambda s, b, h, i, j, x: s, arrays=[numbers])]  # fmt: skip
    assert ring._near(values, 0) == values
    near = ring._near([*values, na.Alibi(np.ones(2))], 1)
    assert [[x.place for x in value._all_arrays] for value in near[:-1]] == [[5], [5, 5], [5], [5], [5]]
    assert near[-1].slopes.__class__ is np.ndarray


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


def test_copies_of_a_call_that_ends_halfway_are_waited_for(rng, cupy, monkeypatch):
    ring, x, count = nad.Devices([3, 5]), rng.standard_normal((2, 100, 8)), iter(range(99))
    parts = ring.split(x)

    def copy(*given, usual=ring._copy):
        if next(count) == 3:
            raise KeyboardInterrupt
        usual(*given)

    waited = [("synchronize", "second of 3"), ("synchronize", "second of 5")]
    with monkeypatch.context() as patch:
        patch.setattr(ring, "_copy", copy)
        with pytest.raises(KeyboardInterrupt):
            nad.attention(ring, *[parts] * 3, plan="ring")
    assert cupy.log[-2:] == waited
    assert cupy.current == [0]
    for call in (lambda: nad.attention(ring, *[parts] * 3), lambda: ring.split(x), lambda: ring.join(parts)):
        with pytest.raises(nad.Interrupted):
            call()
    assert cupy.log[-2:] == waited
    cupy.log.clear()
    ring.reset()  # waits again: a second Ctrl-C may have come
    assert cupy.log == waited
    np.testing.assert_allclose(ring.join(nad.attention(ring, *[parts] * 3, plan="ring")), na.attention(x, x, x))


def test_split_of_an_array_of_another_device(cupy):
    x = cupy.placed(np.zeros((20, 4)))
    full, empty = nad.Devices([3, 5], "contiguous").split(x)
    assert (full.shape, empty.shape) == ((0, 4), (20, 4))
    assert [entry[1] for entry in cupy.log if entry[0] == "copy"] == ["second of 3", "second of 5"]
    assert ("record", "0") in cupy.log


def test_errors(cupy):
    with pytest.raises(TypeError, match="devices: got 'a'"):
        nad.Devices("ab")
    for wrong, got in (([], "list"), (2, "2")):
        with pytest.raises(TypeError, match=f"devices: got {got}, expected a list of CuPy's numbers of GPUs"):
            nad.Devices(wrong)
    with pytest.raises(ValueError, match="devices: got 10, allowed 0 to 9"):
        nad.Devices([0, 10])
    ring, x = nad.Devices([3, 5]), np.zeros((2, 64, 8))
    parts = ring.split(x)
    with pytest.raises(ValueError, match="k: got an array of device 5 for rank 0, expected device 3"):
        nad.attention(ring, parts, parts[::-1], parts)
    with pytest.raises(ValueError, match="parts: got an array of device 3 for rank 1, expected device 5"):
        ring.join([parts[0]] * 2)
    ring._library = "cupy"
    with pytest.raises(TypeError, match=r"q: got numpy\.ndarray of float64, expected arrays of cupy with Devices"):
        nad.attention(ring, [x, x], parts, parts)


def test_a_pickled_ring_is_made_again(cupy):
    ring = pickle.loads(pickle.dumps(nad.Devices([3, 5], "contiguous")))
    assert (ring.devices, ring.order, list(ring.streams)) == ([3, 5], "contiguous", [3, 5])


FAULTS = {
    "stream.wait_event(event)": "pass",
    "and x.device.id != device:": "and False:",
    "if library(x) not in (None, self._library)": "if False",
    "for event in (made, cuda": "for event in (cuda",
    "for transfer in (incoming, outgoing)": "for transfer in (incoming,)",
    "for device in (source, to)": "for device in (to,)",
    "self.cupy.cuda.Device(self.devices[rank])": "self.cupy.cuda.Device(0)",
    "x if own else self.cupy.ascontiguousarray(x)": "x",
    "self.cupy.empty(x.shape, x.dtype) for x in arrays]": "self.cupy.empty(x.shape, x.dtype) for x in packed]",
    "            stream.synchronize()": "            pass",
    "if n > 1]": "]",
    "axes[-1][1] == number * step": "False",
    "not axes and SMALLEST": "SMALLEST",
    "SMALLEST_BLOCK <= nbytes <= step": "nbytes <= step",
    "nbytes <= step <= LARGEST_STEP": "nbytes",
    "if runtime.deviceCanAccessPeer(device, other):": "if True:",
    "suppress(runtime.CUDARuntimeError)": "suppress()",
    "x.device.id == to": "False",
    "not isinstance(x, self.cupy.ndarray) or x.device.id == to": "True",
    "self._brought(x, self.devices[rank])": "self._brought(x, self.devices[0])",
    "self.devices.index(x.device.id) if is_here else 0": "0",
    "x.device.id in self.devices": "True",
}
