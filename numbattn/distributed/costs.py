"""The plan of a call, a ring of keys or a share of the heads for each rank, and what each costs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..base.values import remembered
from ..masks import All, AnyOf, Mask
from ..masks.logic import Joined, _keys
from .driver import Together
from .heads import Axes, axes_of_results, rows_of, weights_of, why_not
from .pieces import RankPlace, lengths_of, tokens_of
from .ring import Messages
from .share import HEADS, RING, RingOptions, Share, share_of

UNEQUAL = 1.1  # if the busiest rank has this times the work of the other plan's, that outweighs all transfers
KNOWN: dict[tuple[Any, ...], str] = {}  # the plan, by the facts of all ranks
MOST_KNOWN = 256


class PlanCost(NamedTuple):
    """What a plan costs each rank."""

    pairs: list[float]  # of queries and keys that see each other, over all batches and heads
    forward: list[int]  # bytes that the rank sends
    backward: list[int]

    @property
    def busiest(self) -> float:
        """The most work of a rank, relative to the mean."""
        return max(self.pairs) * len(self.pairs) / (sum(self.pairs) or 1)

    @property
    def sent(self) -> int:
        """The most bytes that a rank sends, in both passes."""
        return max(map(sum, zip(self.forward, self.backward)))


def plan_of(share: Share, wanted: str | None) -> str:
    """The plan that a user asks for, or for None the choice of `costs_of`: the same on all ranks."""
    reason = why_not(share)
    if wanted == HEADS and reason:
        raise ValueError(f"plan: got {HEADS!r} {reason}")
    if wanted is not None or reason:
        return wanted or RING
    key = tuple(tuple(found.values()) for found in share.facts)
    return remembered(KNOWN, key, lambda: costs_of(share)[1], MOST_KNOWN)


def costs_of(share: Share) -> tuple[dict[str, PlanCost], str, str]:
    """The PlanCost of each plan, the one to take, and why: its work is equal or, if both are, it sends less."""
    ring = cost_of_ring(share)
    if reason := why_not(share):
        return {RING: ring}, RING, f"since heads cannot be split {reason}"
    costs = {RING: ring, HEADS: cost_of_heads(share)}
    even, uneven = sorted(costs, key=lambda plan: costs[plan].busiest)
    if costs[uneven].busiest > UNEQUAL * costs[even].busiest:
        return costs, even, f"since work is more equal than by {uneven}"
    less, more = sorted(costs, key=lambda plan: costs[plan].sent)
    sent = [f"{costs[plan].sent / 1e6:,.1f} MB" for plan in (less, more)]
    return costs, less, f"since a rank sends at most {sent[0]} in both passes, by {more} {sent[1]}"


def shares_of(ring: Together, dtype: Any, *shapes: tuple[int, ...], **options: Any) -> list[Share]:
    """The Share of each rank in a call on q, k and v of these shapes, which are not allocated."""
    def alone(place: RankPlace, *given: Any) -> Messages:
        return ((yield from share_of(place, *given)),)

    parts = {name: [np.broadcast_to(np.zeros((), dtype), (*lead, length, features))
                    for length in lengths_of(tokens, ring.ranks, ring.order)]
             for name, (*lead, tokens, features) in zip("qkv", shapes)}  # fmt: skip
    call = RingOptions(**{"causal": False, "mask": None, "scale": None, "dropout": None, "score": None, **options})
    return ring._run(alone, parts, call)[0]


def cost_of_ring(share: Share) -> PlanCost:
    """Keys and values go to ranks that see them, in both passes, and gradients come back in the dtype of sums."""
    ranks, (_, k, v, *_) = range(share.place.ranks), share.inputs
    elements = sum(math.prod(x.shape[:-2]) * x.shape[-1] for x in (k, v))
    keys = [[share.between(rank, source).keys if rank != source else slice(0, 0) for source in ranks] for rank in ranks]
    needed = np.array([[rows.stop - rows.start for rows in of_rank] for of_rank in keys])
    forward = needed.sum(axis=0) * elements * k.dtype.itemsize
    backward = forward + needed.sum(axis=1) * elements * share.problem.sum_dtype.itemsize
    seen = visible_keys(share).sum(axis=0)
    pairs = [sum(float(seen[a.first : a.end].sum()) for a in own) for own in share.queries]
    return PlanCost(pairs, forward.tolist(), backward.tolist())


def cost_of_heads(share: Share) -> PlanCost:
    """Each array goes once to the ranks that compute its heads, or comes back from them."""
    problem, weights, results = share.problem, weights_of(share), axes_of_results(share)
    o, lse = math.prod(problem.batch) * problem.head_dim_v, math.prod(problem.batch)
    item, sums = problem.dtype.itemsize, problem.sum_dtype.itemsize
    given = [*((x, axes) for x, axes, _ in weights[:3]), *rows_of(share)]
    grads = [(x, axes) for x, axes, wanted in weights if wanted and axes.pieces]
    results_of = list(zip((o * item, lse * sums), results))

    def sent(rank: int) -> tuple[int, int]:
        forward = sum(_to_heads(share, rank, _of_a_token(x, axes, x.dtype.itemsize), axes) for x, axes in given)
        forward += sum(_to_tokens(share, rank, nbytes, axes) for nbytes, axes in results_of)
        backward = _to_heads(share, rank, *results_of[0])
        backward += sum(_to_tokens(share, rank, _of_a_token(x, axes, sums if axes.heads is None else x.dtype.itemsize),
                                   axes) for x, axes in grads)  # fmt: skip
        return forward, backward

    by_head = visible_keys(share).sum(axis=1).reshape(share.place.ranks, -1)
    forward, backward = zip(*map(sent, range(share.place.ranks)))
    return PlanCost(by_head.sum(axis=1).tolist(), list(forward), list(backward))


def _to_heads(share: Share, rank: int, nbytes: int, axes: Axes) -> int:
    """The bytes that a rank sends of an array, with nbytes a token."""
    ranks = share.place.ranks
    return tokens_of(axes.pieces[rank]) * nbytes * (ranks - 1) // (1 if axes.heads is None else ranks)


def _to_tokens(share: Share, rank: int, nbytes: int, axes: Axes) -> int:
    ranks = share.place.ranks
    others = sum(tokens_of(axes.pieces[other]) for other in range(ranks) if other != rank)
    return others * nbytes // (1 if axes.heads is None else ranks)


def _of_a_token(x: Any, axes: Axes, itemsize: int) -> int:
    """The bytes of a token of an array."""
    return math.prod(n for axis, n in enumerate(x.shape, -x.ndim) if axis != axes.tokens) * itemsize


def visible_keys(share: Share) -> Any:
    """How many keys the queries of each head see, (heads, seqlen_q), over all elements of the batch.

    Whatever is not known to all ranks, or is not an interval of keys, counts as visible.
    """
    (seqlen_q, seqlen_k), batch, heads = share.sizes, math.prod(share.problem.batch[:-1]), share.problem.heads
    mask = _in_intervals(share.mask)._fit((*share.problem.batch, seqlen_q, seqlen_k))
    i = np.arange(seqlen_q)
    seen = _keys(mask, i, seqlen_k)
    counts = np.maximum(seen.end - seen.first, 0)
    for gap in mask._gaps(i, seqlen_k):
        inside = np.minimum(seen.end, gap.end) - np.maximum(seen.first, gap.first)
        counts = counts - np.maximum(inside, 0)
    lead = counts.shape[:-2]
    by_head = counts.sum(axis=tuple(range(len(lead)))) * (batch / max(math.prod(lead), 1))
    return np.broadcast_to(by_head, (heads, seqlen_q))


def _in_intervals(mask: Mask) -> Mask:
    """The parts of a mask that show each query an interval of keys, by numbers and arrays that all ranks know."""
    if isinstance(mask, Joined):
        materialised = isinstance(mask, AnyOf) and mask._is_materialised
        return All() if materialised else type(mask)(tuple([_in_intervals(part) for part in mask.of]))
    on_host = all(isinstance(x, np.ndarray) for x in mask._arrays().values())
    return mask if mask._is_interval and mask._axis_of_queries is None and on_host else All()
