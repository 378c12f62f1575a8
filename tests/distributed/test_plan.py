"""The plan that moves less is taken, as long as ranks have equal work; what it costs is what travels."""

import numpy as np
import pytest

import numbattn as na
from numbattn import distributed as nad
from numbattn.distributed import plan
from numbattn.distributed.passes import backward, forward
from numbattn.distributed.share import Call, share_of

from .test_ring import Watched


def shares(ring, q, k, **options):
    """Of all ranks."""
    def alone(place, *given):
        return ((yield from share_of(place, *given)),)

    call = Call(False, None, None, None, None)._replace(**options)
    (found,) = ring._run(alone, {name: ring.split(x) for name, x in zip("qkv", (q, k, k))}, call)
    return found


def arrays(heads, heads_k, m=1024, n=1024, dtype=np.float32):
    return np.zeros((2, heads, m, 8), dtype), np.zeros((2, heads_k, n, 8), dtype)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"mask": na.Window(64, 0)}, {"mask": na.Segments([0, 512, 1024])},
], ids=["", "causal", "window", "documents"])  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_cost_is_what_travels(options, order, dtype):
    """And all ranks know it."""
    ring = Watched(4, order)
    q, k = arrays(8, 4, 1024, 1024 if "mask" in options else 1000, dtype)
    for name, cost_of in (("ring", plan.cost_of_ring), ("heads", plan.cost_of_heads)):
        costs = [cost_of(share) for share in shares(ring, q, k, **options)]
        assert costs == [costs[0]] * 4
        call = {"causal": False, "mask": None, "scale": None, "dropout": None, "score": None} | options
        o, saved = ring._run(forward, {"q": ring.split(q), "k": ring.split(k), "v": ring.split(k)},
                             Call(**call, plan=name))  # fmt: skip
        assert ring.sent == costs[0].forward
        ring._run(backward, {"do": o, "dlse": None, "saved": saved}, False)
        assert ring.sent == costs[0].backward


@pytest.mark.parametrize("mask", [
    None, na.Causal(), na.Window(100, 20), na.Segments([0, 300, 512]) & na.Causal(), na.Window(9, 0) | na.Prefix(40),
    na.Lengths(keys=np.arange(8).reshape(2, 4) * 60),
], ids=str)  # fmt: skip
def test_pairs_are_those_that_see_each_other(mask):
    ring, (q, k) = nad.Simulated(4), arrays(4, 4, 512, 512)
    share, *_ = shares(ring, q, k, mask=mask)
    visible = np.broadcast_to(True if mask is None else mask.dense(512, 512), (2, 4, 512, 512))
    by_query = ring.split(visible.sum(axis=(0, 1, 3)), axis=0)
    assert plan.cost_of_ring(share).pairs == pytest.approx([x.sum() for x in by_query])
    assert plan.cost_of_heads(share).pairs == pytest.approx(visible.sum(axis=(0, 2, 3)))


def test_what_no_rank_knows_counts_as_visible():
    ring, (q, k) = nad.Simulated(2), arrays(2, 2, 64, 64)
    for mask in (np.zeros((64, 64), bool), na.Intervals(np.zeros(64, int), np.zeros(64, int)), na.Causal() | (
        np.zeros((64, 64), bool))):  # fmt: skip
        share, _ = shares(ring, q, k, mask=mask)
        assert plan.cost_of_heads(share).pairs == [2 * 64 * 64] * 2


def test_which_plan_is_taken():
    ring = nad.Simulated(4)
    many, few, one = arrays(8, 8), arrays(8, 4), arrays(8, 2)
    chosen = {
        "all see all": shares(ring, *many),
        "a window": shares(ring, *few, mask=na.Window(32, 0)),
        "few key heads": shares(ring, *one),
        "heads of unequal lengths": shares(ring, *many, mask=na.Lengths(keys=np.arange(8).reshape(1, 8) * 100)),
        "causal, contiguous": shares(nad.Simulated(4, "contiguous"), *many, causal=True),
        "the first queries see": shares(ring, *many, mask=na.Lengths(queries=128)),
    }
    found = {name: plan.chosen(of_all[0]) for name, of_all in chosen.items()}
    for of_all in chosen.values():
        assert {plan.plan_of(share, None) for share in of_all} == {plan.chosen(of_all[0])[0]}
    assert {name: taken for name, (taken, _) in found.items()} == {
        "all see all": "heads", "a window": "ring", "few key heads": "ring", "heads of unequal lengths": "ring",
        "causal, contiguous": "heads", "the first queries see": "heads",
    }  # fmt: skip
    assert found["few key heads"][1] == ("heads cannot be split for 2 heads of k and v on 4 ranks, expected as many "
                                         "heads as ranks, or a multiple")
    assert found["heads of unequal lengths"][1] == "the other plan leaves work unequal, 1.86 times the mean"
    assert found["a window"][1].startswith("it sends ")


def test_a_choice_is_made_once(monkeypatch):
    """For calls of a kind, by what is in arrays of the mask on the host."""
    ring, (q, k) = nad.Simulated(2), arrays(2, 2, 64, 64)
    counted = []
    monkeypatch.setattr(plan, "KNOWN", {})
    monkeypatch.setattr(plan, "cost_of_ring", lambda share: counted.append(1) or plan.Cost([1.0], [0], [0]))
    for end in (30, 30, 40):
        nad.attention(ring, *map(ring.split, (q, k, k)), mask=na.Segments([0, end, 64]))
    assert len(counted) == 2
