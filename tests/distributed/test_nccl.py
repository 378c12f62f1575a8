"""A rank a process with a GPU: threads, and an NCCL that is not there."""

import sys
from multiprocessing.pool import ThreadPool

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn import distributed as nad
from numbattn.distributed import nccl
from numbattn.distributed.messages import Exchange, Like, Wait

from .fakes import Cupy, Event, Nccl, Shared


@pytest.fixture
def ranks_of(monkeypatch):
    """The rings of so many ranks, and what they share."""
    cupy = Cupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    monkeypatch.setattr(nad.Nccl, "_library", "numpy")

    def made(count, **options):
        shared, rings = Shared(count), []
        for rank in range(count):
            cupy.cuda.nccl = Nccl(rank, shared)
            rings.append(nad.Nccl(cupy.cuda.nccl, **options))
        return rings, shared

    return made


def on_all(rings, work):
    """What work(ring) returns on each rank."""
    with ThreadPool(len(rings)) as pool:
        return pool.map(work, rings, chunksize=1)


def test_as_on_one_device(rng, ranks_of):
    q, k, v, do = rng.standard_normal((4, 2, 300, 8))
    options = {"causal": True, "mask": na.Window(150, 0), "score": [na.Alibi(np.ones(2)), na.Sink(0.5)]}
    o, backprop = na.attention_vjp(q, k, v, **options)
    grads = backprop(do)

    def work(ring):
        o, backprop = nad.attention_vjp(ring, *map(ring.split, (q, k, v)), **options)
        grads = backprop(ring.split(do))
        return [*map(ring.join, (o, *grads)), *grads.score]

    rings, _ = ranks_of(3)
    for found in on_all(rings, work):
        for got, want in zip(found, (o, *grads, *grads.score), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_the_host_waits_in_the_first_call_of_a_kind_alone(rng, ranks_of):
    rings, shared = ranks_of(2)
    x = rng.standard_normal((2, 100, 8)).astype(ml_dtypes.bfloat16)

    def work(ring, scale=1.0):
        return nad.attention(ring, *[ring.split(x)] * 3, scale=scale)

    first = on_all(rings, work)
    assert shared.meetings == 2  # of lengths and of what they are of
    again = on_all(rings, work)
    assert shared.meetings == 2
    for one, other in zip(first, again):
        np.testing.assert_array_equal(one.astype(float), other.astype(float))
    on_all(rings, lambda ring: work(ring, 2.0))
    assert shared.meetings == 4


def test_only_so_many_kinds_are_known(ranks_of, monkeypatch):
    monkeypatch.setattr(nccl, "MOST_KNOWN", 2)
    rings, shared = ranks_of(2)
    on_all(rings, lambda ring: [ring._gathered(value) for value in "abcbca"])
    assert shared.meetings == 8
    assert all(len(ring.known) == 2 for ring in rings)


def test_a_copy_runs_beside_what_is_computed_until_the_rank_waits(ranks_of):
    (ring,), _ = ranks_of(1)
    log = ring.cupy.log
    exchange = Exchange(0, [np.arange(3.0)], 0, [Like((3,), np.dtype(float))])
    ticket = ring._answer(exchange)
    copied = [("record", "0"), ("wait", "second of 0", 0)]
    started = [("record", "second of 0"), ("wait", "0", 2)]  # what is computed behind it starts later, then
    assert log == [*copied, *started, ("record", "second of 0")]
    log.clear()
    other = ring._answer(exchange)
    assert log == [*copied, ("record", "second of 0")]  # and does not wait for the first one
    ring._answer(Wait(other))
    log.clear()
    np.testing.assert_array_equal(ring._answer(Wait(ticket)), [[0, 1, 2]])
    assert log == [("wait", "0", 4)]
    log.clear()
    ring._answer(exchange)
    assert log == [*copied, *started, ("record", "second of 0")]


def test_a_rank_that_is_gone_is_noticed(ranks_of, monkeypatch):
    (ring,), _ = ranks_of(1)
    ring.synchronize()
    assert not ring.communicator.aborted
    monkeypatch.setattr(Event, "done", False)
    with pytest.raises(TimeoutError, match=r"rank 0 has waited 0\.01 s for all others"):
        ring.synchronize(timeout=0.01)
    assert ring.communicator.aborted
    monkeypatch.setattr(Event, "done", True)
    with pytest.raises(nad.Interrupted, match="halfway: synchronize"):
        ring.join(np.zeros((64, 8)))
    with pytest.raises(TypeError, match="timeout: got 'long'"):
        ring.synchronize(timeout="long")
    with pytest.raises(ValueError, match="timeout: got nan, allowed are seconds above 0"):
        ring.synchronize(timeout=np.nan)


def test_a_call_that_ends_halfway(ranks_of, monkeypatch):
    """The communicator is aborted, outside of a group, and NCCL no longer uses memory."""
    (ring,), _ = ranks_of(1)
    x, log = np.zeros((2, 64, 8)), ring.cupy.log
    nad.attention(ring, x, x, x)

    def recv(*_):
        log.append("recv")
        raise KeyboardInterrupt

    monkeypatch.setattr(ring.communicator, "recv", recv)
    monkeypatch.setattr(ring.communicator, "groupEnd", lambda: log.append("end"))
    monkeypatch.setattr(ring.communicator, "abort", lambda: log.append("abort"))
    with pytest.raises(KeyboardInterrupt):
        ring._run(exchanging, {"x": x})
    assert log[-4:] == ["recv", "end", "abort", ("synchronize", "second of 0")]
    for call in (lambda: nad.attention(ring, x, x, x), lambda: ring.join(x)):
        with pytest.raises(nad.Interrupted, match="halfway: exchanging"):
            call()
    with pytest.raises(nad.Interrupted, match="make a new NcclCommunicator on all of them, and a new ring"):
        ring.reset()


def exchanging(place, x):
    yield Wait((yield Exchange(0, [x], 0, [Like(x.shape, x.dtype)])))


def test_a_length_that_only_some_ranks_notice(rng, ranks_of):
    """Of 100 and of 98 tokens the second rank has the same part: it asks all the same."""
    rings, _ = ranks_of(2, check="always")
    x = rng.standard_normal((2, 100, 8))

    def work(ring):
        return [ring.join(nad.attention(ring, *[ring.split(x[:, :n])] * 3)) for n in (100, 98)]

    assert [ring.split(x).shape == ring.split(x[:, :98]).shape for ring in rings] == [False, True]
    for found in on_all(rings, work):
        for got, n in zip(found, (100, 98)):
            np.testing.assert_allclose(got, na.attention(*[x[:, :n]] * 3), atol=1e-13)


def test_sums_of_numbers(ranks_of):
    rings, _ = ranks_of(2)
    x = np.random.default_rng(0).standard_normal((64, 8))
    expected = na.attention_vjp(x, x, x, score=na.Alibi(0.5))[1](x).score[0]

    def work(ring):
        part = ring.split(x)
        (found,) = nad.attention_vjp(ring, part, part, part, score=na.Alibi(0.5))[1](part).score
        assert found.shape == ()
        np.testing.assert_allclose(found, expected, rtol=1e-11)

    on_all(rings, work)


def test_ranks_that_differ(ranks_of):
    rings, _ = ranks_of(2)
    x = np.zeros((64, 8))

    def work(ring):
        with pytest.raises(ValueError, match=r"scale: got 0\.5 on rank 0, 1\.5 on rank 1"):
            nad.attention(ring, *[ring.split(x)] * 3, scale=0.5 + ring.rank)

    on_all(rings, work)


def test_errors(ranks_of):
    ranks_of(1)
    with pytest.raises(TypeError, match=r"communicator: got 4, expected a cupy\.cuda\.nccl\.NcclCommunicator"):
        nad.Nccl(4)
    with pytest.raises(ValueError, match="check: got 'never', allowed 'first' or 'always'"):
        ranks_of(1, check="never")


FAULTS = {
    "self.check == ALWAYS or own not in self.known": "True",
    "if self.check == ALWAYS or": "if",
    "del self.known[next(iter(self.known))]": "pass",
    "self.stream.wait_event(current.record())": "pass",
    "self.cupy.cuda.get_current_stream().wait_event(ticket.done)": "pass",
    "self.communicator.abort()": "pass",
    "if not self.in_flight:": "if True:",
    "self.stream.synchronize()": "pass",
    'self._interrupted = "synchronize"': "pass",
    "total, x = self.cupy.empty(x.shape, x": "total, x = self.cupy.empty(x.size, x",
    "self.in_flight -= 1": "pass",
    "self.nccl.NCCL_FLOAT64 if x.dtype == np.float64 else self.nccl.NCCL_FLOAT32": "self.nccl.NCCL_FLOAT32",
    "pickle.loads(row[:size])": "pickle.loads(row[:1])",
    "(message.source, like) for like": "(message.to, like) for like",
}
