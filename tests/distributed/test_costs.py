"""The plan that moves less is taken, as long as ranks have equal work; what it costs is what travels."""

import numpy as np
import pytest

import numbattn as na
from numbattn import distributed as nad
from numbattn.distributed import costs as plans
from numbattn.distributed.rank import backward, forward
from numbattn.distributed.share import RingOptions

from .test_ring import Watched


def shares(ring, heads, heads_k, m=1024, n=1024, dtype=np.float32, **options):
    """Of all ranks."""
    return plans.shares_of(ring, dtype, (2, heads, m, 8), *[(2, heads_k, n, 8)] * 2, **options)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"mask": na.Window(64, 0)}, {"mask": na.Segments([0, 512, 1024])},
], ids=["", "causal", "window", "documents"])  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_cost_is_what_travels(options, order, dtype):
    """And all ranks know it."""
    ring = Watched(4, order)
    n = 1024 if "mask" in options else 1000
    q, k = np.zeros((2, 8, 1024, 8), dtype), np.zeros((2, 4, n, 8), dtype)
    for name, cost_of in (("ring", plans.cost_of_ring), ("heads", plans.cost_of_heads)):
        costs = [cost_of(share) for share in shares(ring, 8, 4, n=n, dtype=dtype, **options)]
        assert costs == [costs[0]] * 4
        call = {"causal": False, "mask": None, "scale": None, "dropout": None, "score": None} | options
        o, saved = ring._run(forward, {"q": ring.split(q), "k": ring.split(k), "v": ring.split(k)},
                             RingOptions(**call, plan=name))  # fmt: skip
        assert ring.sent == costs[0].forward
        ring._run(backward, {"do": o, "dlse": None, "saved": saved}, False)
        assert ring.sent == costs[0].backward


@pytest.mark.parametrize("mask", [
    None, na.Causal(), na.Window(100, 20), na.Segments([0, 300, 512]) & na.Causal(),
    na.Window(9, 0) | na.Window(9, 0, -100), na.Lengths(keys=np.arange(8).reshape(2, 4) * 60),
], ids=str)  # fmt: skip
def test_pairs_are_those_that_see_each_other(mask):
    ring = nad.Simulated(4)
    share, *_ = shares(ring, 4, 4, 512, 512, mask=mask)
    visible = np.broadcast_to(True if mask is None else mask.dense(512, 512), (2, 4, 512, 512))
    by_query = ring.split(visible.sum(axis=(0, 1, 3)), axis=0)
    assert plans.cost_of_ring(share).pairs == pytest.approx([x.sum() for x in by_query])
    assert plans.cost_of_heads(share).pairs == pytest.approx(visible.sum(axis=(0, 2, 3)))


def test_what_no_rank_knows_counts_as_visible():
    nothing, none = np.zeros((64, 64), bool), np.zeros(64, int)
    three = na.Window(0, 0) | na.Window(1, 0) | na.Prefix(1)
    for mask in (nothing, na.Intervals(none, none), na.Causal() | nothing, three):
        share, _ = shares(nad.Simulated(2), 2, 2, 64, 64, mask=mask)
        assert plans.cost_of_heads(share).pairs == [2 * 64 * 64] * 2


@pytest.mark.parametrize(("taken", "why", "heads_k", "order", "options"), [
    ("heads", "a rank sends at most", 8, "zigzag", {}),
    ("heads", "a rank sends at most", 8, "zigzag", {"causal": True, "score": na.Alibi(np.ones(8))}),
    ("ring", "a rank sends at most", 4, "zigzag", {"mask": na.Window(32, 0)}),
    ("ring", "heads cannot be split for 2 heads of k and v on 4 ranks, expected as many heads as ranks, or a multiple",
     2, "zigzag", {}),
    ("ring", "work is more equal than by heads", 8, "zigzag", {"mask": na.Lengths(keys=100 * np.arange(8)[None])}),
    ("heads", "work is more equal than by ring", 8, "contiguous", {"mask": na.Window(32, 0) & na.Lengths(queries=300)}),
], ids=["all", "causal", "window", "few heads", "heads differ", "ranks differ"])  # fmt: skip
def test_which_plan_is_taken(taken, why, heads_k, order, options):
    of_all = shares(nad.Simulated(4, order), 8, heads_k, **options)
    _, found, reason = plans.costs_of(of_all[0])
    assert found == taken
    assert reason.startswith(f"since {why}")
    assert {plans.plan_of(share, None) for share in of_all} == {taken}


def test_a_choice_is_made_once(monkeypatch):
    """For calls of a kind, by what is in arrays of the mask on the host."""
    ring, counted = nad.Simulated(2), []
    x = ring.split(np.zeros((2, 64, 8)))
    known = Forgetful()
    monkeypatch.setattr(plans, "KNOWN", known)
    monkeypatch.setattr(plans, "cost_of_ring", lambda share: counted.append(1) or plans.PlanCost([1.0], [0], [0]))
    for end in (30, 30, 40):
        nad.attention(ring, x, x, x, mask=na.Segments([0, end, 64]))
    assert len(counted) == 2
    known.forgets = True
    nad.attention(ring, x, x, x, mask=na.Segments([0, 50, 64]))


class Forgetful(dict):
    """That another thread clears just then."""

    forgets = False

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        if self.forgets:
            self.clear()


FAULTS = {
    "if rank != source else slice(0, 0)": "",
    "needed.sum(axis=1) * elements": "needed.sum(axis=0) * elements",
    "if costs[uneven].busiest > UNEQUAL": "if costs[uneven].busiest > 9 * UNEQUAL",
    "less, more = sorted": "more, less = sorted",
    "if wanted and axes.pieces": "if wanted",
    "sums if axes.heads is None else x.dtype.itemsize": "sums",
    "counts = counts - np.maximum(inside, 0)": "pass",
    "and mask._axis_of_queries is None and on_host": "and on_host",
    "isinstance(mask, AnyOf) and mask._is_materialised": "False",
    "base/values.py": {
        "if found is None:": "if True:",
        "_keep(known, key, found, most)\n    return found": "_keep(known, key, found, most)\n    return known[key]",
    },
}
