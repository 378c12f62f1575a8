"""What all drivers share, with ranks that take turns."""

import numpy as np
import pytest

import numbattn as na
from numbattn import distributed as nad
from numbattn.distributed.facts import agreed_fit
from numbattn.distributed.messages import Gather

from .alarms import Alarm, alarmed

Q, K, V, DO = np.random.default_rng(0).standard_normal((4, 2, 200, 8))


def results(ring, scale=1.0, plan="ring"):
    o, backprop = nad.attention_vjp(ring, *map(ring.split, (Q, K, V)), scale=scale, score=na.Sink(0.5), plan=plan)
    grads = backprop(ring.split(DO))
    return [*map(ring.join, (o, *grads)), *grads.score]


def check(ring, scale=1.0, plan="ring"):
    o, backprop = na.attention_vjp(Q, K, V, scale=scale, score=na.Sink(0.5))
    grads = backprop(DO)
    for x, y in zip(results(ring, scale, plan), (o, *grads, *grads.score), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError])
@pytest.mark.parametrize("number", [0, 3])
def test_a_call_that_ends_halfway(monkeypatch, error, number):
    """All others are refused until ranks have met again."""
    ring, count = nad.Simulated(3), iter(range(99))

    def begun(*_, usual=ring._begun):
        if next(count) == number:
            raise error
        return usual(*_)

    monkeypatch.setattr(ring, "_begun", begun)
    with pytest.raises(error):
        results(ring)
    parts = ring.split(Q)
    for call in (lambda: nad.attention(ring, *[parts] * 3), lambda: ring.join(parts)):
        with pytest.raises(nad.Interrupted, match=r"ended halfway: forward\. All ranks have to call its reset\(\)"):
            call()
    ring.reset()
    check(ring)


def test_an_error_on_which_ranks_agree_is_no_end_of_the_ring():
    ring = nad.Simulated(2)
    parts = ring.split(Q)
    for wrong in ({"scale": "much"}, {"mask": na.Causal(np.zeros(7, int))}, {"plan": "both"}):
        with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
            nad.attention(ring, *[parts] * 3, **wrong)
    with pytest.raises(ValueError, match="on rank 0, expected"):
        nad.attention(ring, *[parts[::-1]] * 3)
    with pytest.raises(TypeError, match="saved: got None"):
        nad.attention_backward(ring, parts, [None, None])
    with pytest.raises(MemoryError):
        ring._run(too_much, {"x": None})
    check(ring)


@pytest.mark.parametrize("call", [
    lambda: nad.attention(None, Q, K, V), lambda: nad.attention_backward(None, DO, None),
    lambda: nad.attention_over_keys(None, Q, K, V),
])  # fmt: skip
def test_no_ring(call):
    with pytest.raises(TypeError, match="ring: got None, expected Simulated, Devices, Nccl or Mpi"):
        call()


def too_much(place, x):
    """An error of another kind, of which ranks are told as of any other."""
    def check():
        raise MemoryError

    yield from agreed_fit(place, [{}] * place.ranks, check)


def test_generators_are_closed():
    found = []

    def waiting(place, x):
        try:
            yield Gather(1)
            if place.rank == 1:
                raise Alarm
            yield Gather(2)
        finally:
            found.append(place.rank)

    with pytest.raises(Alarm) as error:
        nad.Simulated(3)._run(waiting, {"x": None})
    assert sorted(found) == [0, 1, 2], error  # which keeps what its frames refer to


def test_alarms():
    """Whenever an exception comes, in another call or again and again, the next result is right or there is none."""
    ring, rng = nad.Simulated(2), np.random.default_rng(0)
    check(ring)
    check(ring, plan="heads")
    alarms = refused = 0
    for _ in range(40):
        scale, plan = rng.choice([0.5, 1.0]), rng.choice(["ring", "heads"])
        try:
            with alarmed(rng.uniform(1e-5, 4e-3), rng.choice([0, 2e-4])):
                check(ring, scale, plan)
        except Alarm:
            alarms += 1
        except nad.Interrupted:
            pass
        try:
            check(ring, scale, plan)
        except nad.Interrupted:
            refused += 1
        ring.reset()
        check(ring, scale, plan)
    assert alarms >= refused > 5


FAULTS = {
    "self._interrupted = self._interrupted or name": "pass",
    "except Agreed as agreed:": "except Agreed as agreed:\n            self._interrupted = name",
    "        self._check()\n": "",
    "distributed/test_mpi.py::test_errors": {
        "if not found > 0:": "if found <= 0:",
    },
    "distributed/test_devices.py": {
        "            self._abandon()\n            raise": "            raise",
        "        self._abandon()\n        self._interrupted": "        self._interrupted",
    },
}
