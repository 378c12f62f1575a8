import numpy as np
import pytest

from numbattn import distributed as nad
from numbattn.distributed.messages import AllReduce, Exchange, Gather, Like, Wait

ONE = Like((1,), np.dtype(float))


def passing_on(place, x):
    """Each rank gets the array of the one before, and changes its own after it was sent."""
    rank, ranks, _ = place
    ticket = yield Exchange((rank + 1) % ranks, [x], (rank - 1) % ranks, [ONE])
    x[0] = -1
    (found,) = yield Wait(ticket)
    (total,) = yield AllReduce([found])
    ranks = yield Gather(rank)
    return found, total, ranks


def test_messages():
    found, totals, ranks = nad.Simulated(3)._run(passing_on, {"x": [np.full(1, rank) for rank in range(3)]})
    assert [x[0] for x in found] == [2, 0, 1]
    assert [x[0] for x in totals] == [3, 3, 3]
    assert ranks == [[0, 1, 2]] * 3


def added(place, x):
    (total,) = yield AllReduce([x])
    return (total,)


def test_sums_of_arrays_without_axes_are_arrays():
    (totals,) = nad.Simulated(2)._run(added, {"x": [np.ones(())] * 2})
    assert [isinstance(x, np.ndarray) and float(x) for x in totals] == [2, 2]


def waiting(place, x):
    if place.rank == 1:
        yield Gather(None)
    elif place.rank == 2:
        yield Wait((yield Exchange(0, [], 1, [ONE])))
    return ()


def test_who_waits_for_ever_is_named():
    named = "these ranks wait for ever: rank 1 for all others to gather; rank 2 for all others to exchange"
    with pytest.raises(nad.Deadlock, match=named):
        nad.Simulated(3)._run(waiting, {"x": None})


FAULTS = {
    ("distributed/test_simulated.py", "distributed/test_ring.py::test_errors"): {
        'x.copy(order="C")': "x",
        "self.waiting[message.source].arrays, message.source,": "self.waiting[message.to].arrays, message.to,",
        'raise Deadlock(f"': 'raise RuntimeError(f"',
        "enumerate(of_ranks))[...]": "enumerate(of_ranks))",
    },
    "distributed/test_driver.py": {
        "            turns.close()": "            pass",
    },
}
