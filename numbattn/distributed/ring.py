"""Keys travel around a ring: what a rank computes, and the messages that it yields.

In step s a rank computes with the keys of the rank s before it, and has sent its own to the rank s after it, except
those that no query there sees. Meanwhile keys of the next step, and gradients of the last one, are in flight. Partial
results have the dtype of sums, whatever that of q, k and v.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.origin import Crop
from ..base.values import rounded, rowsum
from ..call import passes, problem
from ..scores import Part
from .messages import AllReduce, Exchange, Like, Wait
from .share import Share
from .totals import Output, Total

Messages = Generator[Any, Any, Any]
Tickets = list[Any]  # of exchanges in flight, at most one; each keeps the memory of its arrays


@dataclass(frozen=True, eq=False, repr=False)
class Saved:
    """What a rank's forward pass leaves for its backward pass. It refers to q, k and v.

    Attributes
    ----------
    lse : array, (..., seqlen_q of the rank), float32, or float64 for float64
        As in `numbattn.Saved`.
    """

    share: Share
    o: Any
    lse: Any
    of_heads: problem.Saved[Any] | None = None  # if heads are split, of the call on the rank's heads

    @property
    def _as_of_a_call(self) -> problem.Saved[Any]:
        return problem.Saved(self.share.problem, self.share.inputs, self.o, self.lse)


# ------------------------------------------------------------------------------------------------------------- forward
def forward(share: Share) -> Messages:
    """o and what is saved."""
    hops = [share.hop(step) for step in range(share.place.ranks)]
    output, keys = Output(share.problem, share.inputs.q), rows_of([share.inputs.k, share.inputs.v], hops[0].keys)
    left = sum(len(hop.blocks) for hop in hops)
    sent: Tickets = []
    for step, hop in enumerate(hops):
        yield from send_keys(share, step + 1, sent)
        for block in hop.blocks:
            left -= 1
            k, v = rows_of(keys, hop.keys_of(block))
            output.attend(block.queries, *share.call(block, k, v, wide=left > 0 or share.sink is not None))
        keys = yield from arrived(sent)
    output.add_sink(share.sink)
    o = output.result(share.problem.dtype)
    return o, Saved(share, o, output.lse)


# ----------------------------------------------------------------------------------------------------------- exchanges
def send_keys(share: Share, step: int, sent: Tickets) -> Messages:
    """Send the keys and values of a step, if there is such a step."""
    if step < share.place.ranks:
        keys, theirs, own = [share.inputs.k, share.inputs.v], share.other_hop(step).keys, share.hop(step).keys
        to, source = share.place.after(step), share.place.before(step)
        sent.append((yield Exchange(to, rows_of(keys, theirs), source, likes_of(keys, own))))


def send_gradients(share: Share, step: int, grads: list[Any], sent: Tickets) -> Messages:
    """Send the gradients of a step's keys and values back to where these came from."""
    expected = likes_of([share.inputs.k, share.inputs.v], share.other_hop(step).keys, share.problem.sum_dtype)
    sent.append((yield Exchange(share.place.before(step), grads, share.place.after(step), expected)))


def arrived(sent: Tickets) -> Messages:
    """The arrays received in the last exchange, if there was one."""
    return (yield Wait(sent.pop())) if sent else []


def rows_of(arrays: list[Any], rows: slice) -> list[Any]:
    """These rows of each array; no arrays if there are no rows."""
    return [x[..., rows, :] for x in arrays] if rows.stop else []


def likes_of(arrays: list[Any], rows: slice, dtype: Any = None) -> list[Like]:
    """What arrays of these rows are like, with another dtype if one is given."""
    shapes = [(*x.shape[:-2], rows.stop - rows.start, x.shape[-1]) for x in arrays]
    return [Like(shape, dtype or x.dtype) for shape, x in zip(shapes, arrays)] if rows.stop else []


# ------------------------------------------------------------------------------------------------------------ backward
def backward(saved: Saved, do: Any, dlse: Any, deterministic: bool) -> Messages:
    """dq, dk and dv of the rank's own parts, and the gradients of the score, summed for arrays that all ranks hold."""
    share, inputs, sums = saved.share, saved.share.inputs, saved.lse.dtype
    place, (dq, dk, dv) = share.place, map(Total, inputs[:3])
    of_score = [zeros_of(part, sums, inputs.q) for part in share.parts]
    keys = rows_of([inputs.k, inputs.v], share.hop(0).keys)
    sent: Tickets = []
    sent_back: Tickets = []
    for step in range(place.ranks):
        yield from send_keys(share, step + 1, sent)
        hop = share.hop(step)
        totals = [Total(x) for x in keys]
        for block in hop.blocks:
            dq.settle()
            rows, some = hop.keys_of(block), block.queries
            attention, given = share.call(block, *rows_of(keys, rows))
            state = problem.Saved(attention, given, saved.o[..., some, :], saved.lse[..., some])
            of_lse = None if dlse is None else dlse[..., some]
            grads = passes.backward(state, do[..., some, :], of_lse, deterministic)
            for total, at, dx in zip((dq, *totals), (some, rows, rows), grads):
                total.add(at, dx)
            add_gradients(share, of_score, block.crop, grads.score)
            del grads
        found = [total.result(sums) for total in totals]
        if step == 0:
            add_rows((dk, dv), hop.keys, found)
        else:
            add_rows((dk, dv), share.other_hop(step - 1).keys, (yield from arrived(sent_back)))
            yield from send_gradients(share, step, found, sent_back)
        keys = yield from arrived(sent)
    add_rows((dk, dv), share.other_hop(place.ranks - 1).keys, (yield from arrived(sent_back)))
    score = yield from gradients_of_score(share, saved, do, dlse, of_score)
    return *(total.result(x.dtype) for total, x in zip((dq, dk, dv), inputs)), score


def add_rows(totals: tuple[Total, Total], rows: slice, arrays: list[Any]) -> None:
    for total, x in zip(totals, arrays):
        total.add(rows, x)


# ----------------------------------------------------------------------------------------------- gradients of the score
def zeros_of(part: Part, sums: Any, q: Any) -> Part:
    """The part with zeros for its arrays, in the dtype of sums and where q is, to add gradients to."""
    trained = [x for x, wanted in zip(part._weights, part._wanted) if wanted]

    def zeros(x: Any) -> Any:
        is_trained = any(x is each for each in trained)
        return np.zeros(x.shape, np.promote_types(sums, x.dtype), like=q) if is_trained else x

    return part._mapped(zeros)


def add_gradients(share: Share, of_score: list[Part], crop: Crop, grads: tuple[Any, ...]) -> None:
    """Add the gradients of a block to its share of each part's arrays."""
    found = iter(grads)
    for part in of_score:
        own = [next(found) for _ in part._weights]
        if part._wants_gradient:
            for total, dx in zip(part._cropped(crop, share.mask._frame)._weights, own):
                if dx is not None:
                    total[...] += dx


def gradients_of_score(share: Share, saved: Any, do: Any, dlse: Any, of_score: list[Part]) -> Messages:
    """A gradient for each array in the score, None where it is not wanted."""
    found: list[Any] = []
    rest = iter(of_score)
    for part in share.score:
        if part._has_step:
            of_part = next(rest)
            found += [x if wanted else None for x, wanted in zip(of_part._weights, part._wanted)]
        elif part._wants_gradient:
            delta = rowsum(*(x.astype(saved.lse.dtype, copy=False) for x in (do, saved.o)))
            delta = delta - (0 if dlse is None else dlse)
            found.append(part._like(do)._gradient(None, saved.lse, delta))
        else:
            found.append(None)
    weights = [(x, is_own) for part, is_own in zip(share.score, share.has_own_rows) for x in part._weights]
    shared = [n for n, (dx, (_, is_own)) in enumerate(zip(found, weights)) if dx is not None and not is_own]
    if shared:
        for n, dx in zip(shared, (yield AllReduce([found[n] for n in shared]))):
            found[n] = dx
    return tuple(dx if dx is None else rounded(dx, x.dtype) for dx, (x, _) in zip(found, weights))
