"""Keys travel around a ring: what a rank computes and, in messages, what it sends and what arrives.

In step s a rank computes with the keys of the rank s before it, and has sent its own to the rank s behind it: what the
queries there do not see does not travel. Keys of the next step are on their way meanwhile, and gradients of the last.
Partial results are of the dtype of sums, whatever that of q, k and v.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from .. import problem
from ..api import _run
from ..merging import merge
from ..origin import Crop
from ..scores import ArrayPart, Part, Sink
from .messages import Exchange, Like, Sum, Wait
from .pieces import Piece
from .share import Share

Messages = Generator[Any, Any, Any]


@dataclass(frozen=True, eq=False, repr=False)
class Saved:
    """What a rank's forward pass leaves for its backward pass. It refers to q, k and v.

    Attributes
    ----------
    lse : array, (..., seqlen_q of the rank), float32, or float64 for float64
        As that of `numbattn.Saved`.
    """

    share: Share
    o: Any  # of the dtype of sums in a ring
    lse: Any
    of_heads: problem.Saved[Any] | None = None  # where heads are split: of the call on those of the rank

    @property
    def _as_of_a_call(self) -> problem.Saved[Any]:
        return problem.Saved(self.share.problem, self.share.inputs, self.o, self.lse)


# ------------------------------------------------------------------------------------------------------------- forward
def forward(share: Share) -> Messages:
    """o and what is saved."""
    place, q, sums = share.place, share.inputs.q, share.problem.sum_dtype
    o = np.zeros(share.problem.out_shape, sums, like=q)
    lse = np.zeros(share.problem.lse_shape, sums, like=q)
    lse[...] = -math.inf
    ticket = None
    for step in range(place.ranks):
        source, keys = (place.rank - step) % place.ranks, (yield from keys_of(share, step, ticket))
        ticket = yield from send_keys(share, step + 1)
        for a, b in share.pairs(place.rank, source):
            block, given = share.block(a, b, *keys[b])
            part, saved = _run(block, "forward", block, given)
            add(o[..., a.rows, :], lse[..., a.rows], part, saved.lse)
    add_sink(share.sink, o, lse)
    return o.astype(share.problem.dtype, copy=False), Saved(share, o, lse)


def add(o: Any, lse: Any, part: Any, part_lse: Any) -> None:
    """Merge attention over other keys into o and lse."""
    o[...], lse[...] = merge([(o, lse), (part, part_lse)])


def add_sink(sink: Sink | None, o: Any, lse: Any) -> None:
    """As keys without values, where a query sees any."""
    if sink is not None:
        add(o, lse, np.zeros_like(o), np.where(lse == -math.inf, lse, sink._like(o)._logits(lse)))


# ---------------------------------------------------------------------------------------------------------------- keys
def send_keys(share: Share, step: int) -> Messages:
    """The ticket of an exchange of keys and values; None where nothing travels."""
    rank, ranks, _ = share.place
    to, source = (rank + step) % ranks, (rank - step) % ranks
    if to == rank:
        return None
    k, v = share.inputs.k, share.inputs.v
    arrays = [x[..., b.rows, :] for b in share.needed(to, rank) for x in (k, v)]
    expected = [Like(shape_of(x, b), x.dtype) for b in share.needed(rank, source) for x in (k, v)]
    return (yield from exchange(to, arrays, source, expected))


def keys_of(share: Share, step: int, ticket: Any) -> Messages:
    """k and v of the pieces that the rank needs in a step."""
    rank, ranks, _ = share.place
    needed = share.needed(rank, (rank - step) % ranks)
    if step == 0:
        return {b: [x[..., b.rows, :] for x in (share.inputs.k, share.inputs.v)] for b in needed}
    arrays = yield from arrived(ticket)
    return dict(zip(needed, zip(arrays[::2], arrays[1::2])))


def exchange(to: int, arrays: list[Any], source: int, expected: list[Like]) -> Messages:
    return (yield Exchange(to, arrays, source, expected)) if arrays or expected else None


def arrived(ticket: Any) -> Messages:
    return [] if ticket is None else (yield Wait(ticket))


def shape_of(x: Any, piece: Piece) -> tuple[int, ...]:
    return *x.shape[:-2], piece.length, x.shape[-1]


# ------------------------------------------------------------------------------------------------------------ backward
def backward(saved: Saved, do: Any, dlse: Any, deterministic: bool) -> Messages:
    """dq, dk and dv of the rank's own parts, and the gradients of the score, of arrays that all ranks hold summed."""
    share, inputs, sums = saved.share, saved.share.inputs, saved.lse.dtype
    place = share.place
    dq, dk, dv = (np.zeros(x.shape, sums, like=x) for x in (inputs.q, inputs.k, inputs.v))
    of_score = [zeros_of(part, sums, inputs.q) for part in share.parts]
    ticket = sent = None
    for step in range(place.ranks):
        source, keys = (place.rank - step) % place.ranks, (yield from keys_of(share, step, ticket))
        ticket = yield from send_keys(share, step + 1)
        found = {b: [np.zeros(x.shape, sums, like=x) for x in keys[b]] for b in keys}
        for a, b in share.pairs(place.rank, source):
            block, given = share.block(a, b, *keys[b])
            state = problem.Saved(block, given, saved.o[..., a.rows, :], saved.lse[..., a.rows])
            of_block = None if dlse is None else dlse[..., a.rows]
            grads = _run(block, "backward", state, do[..., a.rows, :], of_block, deterministic)
            for total, dx in zip((dq[..., a.rows, :], *found[b]), grads):
                total += dx
            add_gradients(share, of_score, share.crop(a, b), grads.score)
        yield from add_arrived(share, dk, dv, step - 1, sent)
        sent = yield from send_gradients(share, dk, dv, step, found)
    yield from add_arrived(share, dk, dv, place.ranks - 1, sent)
    score = yield from gradients_of_score(share, saved, do, dlse, of_score)
    grads = (dx.astype(x.dtype, copy=False) for dx, x in ((dq, inputs.q), (dk, inputs.k), (dv, inputs.v)))
    return *grads, score


def send_gradients(share: Share, dk: Any, dv: Any, step: int, found: dict[Piece, list[Any]]) -> Messages:
    """Those of a step's keys to the rank whose they are; its own ones a rank adds at once."""
    rank, ranks, _ = share.place
    if step == 0:
        for b, grads in found.items():
            add_rows(b, (dk, dv), grads)
        return None
    seer = (rank + step) % ranks
    expected = [Like(shape_of(x, b), x.dtype) for b in share.needed(seer, rank) for x in (dk, dv)]
    arrays = [dx for grads in found.values() for dx in grads]
    return (yield from exchange((rank - step) % ranks, arrays, seer, expected))


def add_arrived(share: Share, dk: Any, dv: Any, step: int, ticket: Any) -> Messages:
    """What others have sent in a step."""
    rank, ranks, _ = share.place
    arrays = yield from arrived(ticket)
    for number, b in enumerate(share.needed((rank + step) % ranks, rank) if arrays else ()):
        add_rows(b, (dk, dv), arrays[2 * number : 2 * number + 2])


def add_rows(piece: Piece, totals: tuple[Any, Any], grads: list[Any]) -> None:
    for total, dx in zip(totals, grads):
        total[..., piece.rows, :] += dx


# ----------------------------------------------------------------------------------------------- gradients of the score
def zeros_of(part: Part, sums: Any, q: Any) -> Part:
    """The part with zeros for its array, of the dtype of sums and where q is, to which gradients are added."""
    if not isinstance(part, ArrayPart):
        return part
    value: Any = part
    return replace(value, **{fields(value)[0].name: np.zeros(part._array.shape, sums, like=q)})


def add_gradients(share: Share, of_score: list[Part], crop: Crop, grads: tuple[Any, ...]) -> None:
    """Those of a block, to what of each part's array is in it."""
    found = iter(grads)
    for part in of_score:
        own = [next(found) for _ in part._weights]
        if isinstance(part, ArrayPart) and part.gradient:
            part._cropped(crop, share.mask._frame)._weights[0][...] += own[0]


def gradients_of_score(share: Share, saved: Any, do: Any, dlse: Any, of_score: list[Part]) -> Messages:
    """One for each array in the score; None for one that is not wanted."""
    found: list[Any] = []
    rest = iter(of_score)
    for part in share.score:
        if not isinstance(part, Sink):
            of_part = next(rest)
            found += [of_part._weights[0]] if part._wants_gradient else [None] * len(part._weights)
        elif part.gradient:
            delta = np.einsum("...mc,...mc->...m", do.astype(saved.o.dtype, copy=False), saved.o)
            delta = delta - (0 if dlse is None else dlse)
            found.append(part._like(do)._gradient(None, saved.lse, delta))
        else:
            found.append(None)
    weights = [(x, alone) for part, alone in zip(share.score, share.alone) for x in part._weights]
    shared = [n for n, (dx, (_, alone)) in enumerate(zip(found, weights)) if dx is not None and not alone]
    if shared:
        for n, dx in zip(shared, (yield Sum([found[n] for n in shared]))):
            found[n] = dx
    return tuple(dx if dx is None else dx.astype(x.dtype, copy=False) for dx, (x, _) in zip(found, weights))
