"""Heads are split instead of sequences: each rank computes all queries and keys of its share of the heads.

Jacobs et al., "DeepSpeed Ulysses" (2023). A rank sends each other rank its own tokens for that one's heads, of q, k, v,
and of arrays in masks and scores that only have the rows of its own queries. Then it computes one call, and o travels
back in the same way. Everything has the dtype of the inputs, except gradients of what heads share, which are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple, cast

import numpy as np

from ..base.origin import Origin
from ..base.values import rounded
from ..call import passes
from ..call.problem import describe
from ..masks import Mask, Tail
from ..masks.logic import Joined
from ..scores import Part
from .facts import LENGTHS, ROWS
from .messages import AllReduce, Exchange, Like, Wait
from .pieces import RankPlace, _along, joined, part_of, tokens_of
from .ring import Messages, Saved
from .share import Pieces, Share


class Axes(NamedTuple):
    """The axes of tokens and of heads in an array."""

    tokens: int
    pieces: Pieces  # how ranks split them; empty if each has all
    heads: int | None  # None where heads share the array


def why_not(share: Share) -> str:
    """Why heads cannot be split, for an error; "" if they can."""
    heads, ranks = share.problem.heads_k, share.place.ranks
    if not heads or heads % ranks:
        return f"for {heads} heads of k and v on {ranks} ranks, expected as many heads as ranks, or a multiple"
    own_rows = [rows for rows, is_own in zip(zip(*(x[ROWS] for x in share.facts)), share.has_own_rows) if is_own]
    queries = [x[LENGTHS][0] for x in share.facts]
    if any(rows not in (1, size) for of_value in own_rows for rows, size in zip(of_value, queries)):
        return "with an array that has all rows on some ranks and their own on others, expected the same on all ranks"
    return ""


# ------------------------------------------------------------------------------------------------------------- forward
def forward(share: Share) -> Messages:
    """o and what is saved."""
    inputs, place, heads = share.inputs, share.place, share.problem.heads
    rows = rows_of(share)
    q, k, v, *rest = yield from to_heads(share, [*zip(inputs[:3], axes_of_inputs(share)), *rows])
    values = of_heads(share, iter(rest))
    score = [next(values) for _ in share.score]
    block, given = describe(
        q, k, v, False, joined_again(share.mask, values), inputs.scale, inputs.dropout, score,
        origin=Origin(head=place.rank * heads // place.ranks, heads=heads), wide=sums_over_ranks(share),
    )  # fmt: skip
    o, saved = passes.forward(block, given)
    o, lse = yield from to_tokens(share, list(zip((rounded(o, q.dtype), saved.lse), axes_of_results(share))))
    return o, Saved(share, o, lse, saved)


def backward(saved: Saved, do: Any, dlse: Any, deterministic: bool) -> Messages:
    """dq, dk and dv of the rank's own parts, and the gradients of the score, summed for arrays that all ranks hold."""
    share, state = saved.share, cast(Any, saved.of_heads)
    given = [(x, axes) for x, axes in zip((do, dlse), axes_of_results(share)) if x is not None]
    do, dlse = [*(yield from to_heads(share, given)), None][:2]
    grads = passes.backward(state, do, dlse, deterministic)
    weights = weights_of(share)
    found = {n: dx for n, dx in enumerate((*grads, *grads.score)) if dx is not None}
    split = {n: (found[n], *weights[n]) for n in found if weights[n].axes.pieces}
    travels = [(dx if axes.heads is None else rounded(dx, x.dtype), axes)
               for dx, x, axes, _ in split.values()]  # fmt: skip
    found |= zip(split, (yield from to_tokens(share, travels)))
    whole = {n: in_whole(share, found[n], weights[n]) for n in found if n not in split}
    found |= zip(whole, (yield AllReduce([*whole.values()])) if whole else ())
    dq, dk, dv, *score = (rounded(found[n], x.dtype) if n in found else None
                          for n, (x, _, _) in enumerate(weights))  # fmt: skip
    return dq, dk, dv, tuple(score)


class Weight(NamedTuple):
    """An array that may have a gradient: q, k, v or one of the score."""

    x: Any
    axes: Axes
    wanted: bool


def weights_of(share: Share) -> list[Weight]:
    found = [Weight(x, axes, True) for x, axes in zip(share.inputs, axes_of_inputs(share))]
    for part, is_own in zip(share.score, share.has_own_rows):
        own = part._axes_of_arrays()
        for name, x, wanted in zip(part._arrays(), part._weights, part._wanted):
            axes = Axes(part._axis_of_queries or 0, share.queries if is_own else (), axis_of_heads(x, own.get(name)))
            found.append(Weight(x, axes, wanted))
    return found


def sums_over_ranks(share: Share) -> bool:
    """Whether gradients are summed over ranks: then each rank's have the dtype of sums."""
    return any(wanted and axes.heads is None for _, axes, wanted in weights_of(share))


def in_whole(share: Share, dx: Any, weight: Weight) -> Any:
    """The gradient of an array that all ranks hold, 0 for other ranks' heads."""
    found = np.zeros(weight.x.shape, share.problem.sum_dtype, like=dx)
    own_heads(found, weight.axes.heads, share.place)[...] = dx
    return found


# ------------------------------------------------------------------------------------------------------- what travels
def to_heads(share: Share, given: list[tuple[Any, Axes]]) -> Messages:
    """All tokens of each array, and the rank's heads."""
    place = share.place

    def sent(to: int) -> list[Any]:
        return [own_heads(x, axes.heads, place._replace(rank=to)) for x, axes in given]

    def expected(source: int) -> list[Like]:
        return [Like(with_tokens(x.shape, axes, source), x.dtype) for x, (_, axes) in zip(sent(place.rank), given)]

    by_rank = yield from all_to_all(place, sent, expected)
    return [joined(list(parts), place.order, axes.tokens) for parts, (_, axes) in zip(zip(*by_rank), given)]


def to_tokens(share: Share, given: list[tuple[Any, Axes]]) -> Messages:
    """The inverse: the rank's tokens of each array, for all heads; the sum over ranks if heads share it."""
    place = share.place

    def sent(to: int) -> list[Any]:
        return [part_of(x, axes.pieces[to], axes.tokens) for x, axes in given]

    def expected(source: int) -> list[Like]:
        return [Like(with_tokens(x.shape, axes, place.rank), x.dtype) for x, axes in given]

    by_rank = yield from all_to_all(place, sent, expected)
    return [reduce(np.add, parts) if axes.heads is None else np.concatenate(parts, axis=axes.heads)
            for parts, (_, axes) in zip(zip(*by_rank), given)]  # fmt: skip


def all_to_all(place: RankPlace, sent: Callable[[int], list[Any]], expected: Callable[[int], list[Like]]) -> Messages:
    """The arrays that each rank has sent to this one."""
    rank, ranks, _ = place
    tickets = {}
    for step in range(1, ranks):
        to, source = place.after(step), place.before(step)
        tickets[source] = yield Exchange(to, sent(to), source, expected(source))
    found = {rank: sent(rank)}
    for source, ticket in tickets.items():
        found[source] = yield Wait(ticket)
    return [found[source] for source in range(ranks)]


def axes_of_inputs(share: Share) -> list[Axes]:
    """The axes of q, k and v."""
    pieces = share.queries, share.keys, share.keys
    return [Axes(-2, own, axis_of_heads(x, 2)) for own, x in zip(pieces, share.inputs)]


def axes_of_results(share: Share) -> list[Axes]:
    """The axes of o and lse."""
    axis = -3 if share.problem.heads > 1 else None
    return [Axes(-2, share.queries, axis), Axes(-1, share.queries, axis and axis + 1)]


def rows_of(share: Share) -> list[tuple[Any, Axes]]:
    """The arrays that only have the rows of each rank's own queries."""
    found = []
    for value, is_own in zip(share.values, share.has_own_rows):
        if is_own:
            arrays = value._like(share.inputs.q)._arrays().values()
            for x, axes in zip(arrays, axes_of_rows(share, value)):
                found.append((np.broadcast_to(x, with_tokens(x.shape, axes, share.place.rank)), axes))
    return found


def axes_of_rows(share: Share, value: Part | Mask) -> list[Axes]:
    axis, own = cast(int, value._axis_of_queries), value._axes_of_arrays()
    return [Axes(axis, share.queries, axis_of_heads(x, own[name])) for name, x in value._arrays().items()]


def with_tokens(shape: tuple[int, ...], axes: Axes, rank: int) -> tuple[int, ...]:
    """The shape with as many tokens as a rank has."""
    sizes = list(shape)
    sizes[axes.tokens] = tokens_of(axes.pieces[rank])
    return tuple(sizes)


# ---------------------------------------------------------------------------------------------------- some of the heads
def own_heads(x: Any, axis: int | None, place: RankPlace) -> Any:
    """What an array has for a rank's heads."""
    if axis is None:
        return x
    size = x.shape[axis] // place.ranks
    return x[_along(x, axis, slice(place.rank * size, (place.rank + 1) * size))]


def axis_of_heads(x: Any, own: int | None) -> int | None:
    """The axis of heads in an array with `own` axes after the batch axes; None if heads share it."""
    return None if own is None or x.ndim <= own or x.shape[-1 - own] == 1 else -1 - own


def of_heads(share: Share, rows: Iterator[Any]) -> Iterator[Any]:
    """The parts of the score and of the mask for the rank's heads; rows: the arrays of `rows_of`, for all queries."""
    first = share.place.rank * share.problem.heads // share.place.ranks
    for value, is_own in zip(share.values, share.has_own_rows):
        value = value._from_head(first) if isinstance(value, Mask) else value
        arrays, own = value._arrays(), value._axes_of_arrays()
        if is_own:
            yield with_arrays(value, {name: next(rows) for name in arrays})
        else:
            axes = {name: axis_of_heads(x, own.get(name)) for name, x in arrays.items()}
            yield with_arrays(value, {name: own_heads(arrays[name], axis, share.place)
                                      for name, axis in axes.items() if axis is not None})  # fmt: skip


def with_arrays(value: Any, arrays: dict[str, Any]) -> Any:
    """A mask or a part of a score with other arrays; itself if there are none."""
    if not arrays:
        return value
    return Tail(with_arrays(value.mask, arrays)) if isinstance(value, Tail) else replace(value, **arrays)


def joined_again(mask: Mask, leaves: Iterator[Any]) -> Mask:
    """A mask made of other leaves."""
    if not isinstance(mask, Joined):
        return next(leaves)
    return mask._with(tuple([joined_again(part, leaves) for part in mask.of]))
