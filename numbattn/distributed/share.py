"""A rank's share of an attention: its queries, keys and values, their places in the whole, the keys that it needs."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..checks import flag
from ..masks import All, Causal, Mask, as_mask, cropped
from ..masks.logic import Joined
from ..origin import Crop, Origin
from ..problem import Inputs, Problem, _check_held, describe, refuse_cache
from ..scores import Part, Sink, as_parts, sink_of
from .facts import LENGTHS, ROWS, Facts, agreed, options
from .pieces import Piece, lengths_of, pieces_of

Pieces = tuple[tuple[Piece, ...], ...]  # of each rank


class Place(NamedTuple):
    """Which of the ranks this is, and how sequences are split over them."""

    rank: int
    ranks: int
    order: str


class Call(NamedTuple):
    """What a user asks for."""

    causal: bool
    mask: Any
    scale: Any
    dropout: Any
    score: Any
    plan: Any = None


@dataclass(frozen=True, eq=False)
class Share:
    place: Place
    problem: Problem  # of the rank's own queries and keys alone, as are the inputs
    inputs: Inputs
    mask: Mask  # of the whole, but for arrays with rows, which may be those of the rank
    score: tuple[Part, ...]
    queries: Pieces
    keys: Pieces
    facts: list[Facts]  # of all ranks
    known: dict[Any, Any] = field(default_factory=dict)  # the pairs of two ranks

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """How many queries and keys there are in all."""
        seqlen_q, seqlen_k = (max((piece.end for own in of_all for piece in own), default=0)
                              for of_all in (self.queries, self.keys))  # fmt: skip
        return seqlen_q, seqlen_k

    @property
    def values(self) -> list[Part | Mask]:
        """The parts of the score, then what the mask consists of."""
        return [*self.score, *self.mask._leaves]

    @cached_property
    def alone(self) -> tuple[bool, ...]:
        """For each of these, whether its arrays have only the rows of the rank."""
        seqlen_q, _ = self.sizes
        return tuple(any(rows not in (1, seqlen_q) for rows in of_value)
                     for of_value in zip(*(x[ROWS] for x in self.facts)))  # fmt: skip

    @property
    def sink(self) -> Sink | None:
        return sink_of(self.score)

    @property
    def parts(self) -> list[Part]:
        """Of the score, those that a block of scores has: a sink is beside all keys."""
        return [part for part in self.score if not isinstance(part, Sink)]

    def pairs(self, rank: int, source: int) -> list[tuple[Piece, Piece]]:
        """Pieces of a rank's queries and of another one's keys which they may see: the same on all ranks."""
        if (rank, source) not in self.known:
            found = [(a, b) for a in self.queries[rank] for b in self.keys[source] if self.shows(a, b)]
            self.known[rank, source] = found
        return self.known[rank, source]

    def needed(self, rank: int, source: int) -> list[Piece]:
        """The keys in these pairs."""
        return list(dict.fromkeys(b for _, b in self.pairs(rank, source)))

    def shows(self, a: Piece, b: Piece) -> bool:
        mask, crop = _without_rows(self.mask), self.crop(a, b)
        return _shows(mask, crop) if mask._holds_arrays else _shows_by_numbers(mask, crop)

    def crop(self, a: Piece, b: Piece) -> Crop:
        return Crop(a.first, a.length, b.first, b.length, *self.sizes, a.row, self.problem.seqlen_q)

    def block(self, a: Piece, b: Piece, k: Any, v: Any) -> tuple[Problem, Inputs]:
        """The call of a piece of the rank's queries with a piece of anyone's keys."""
        crop = self.crop(a, b)
        return describe(
            self.inputs.q[..., a.rows, :], k, v, False, cropped(self.mask, crop), self.inputs.scale,
            self.inputs.dropout, [part._cropped(crop, self.mask._frame) for part in self.parts],
            origin=Origin(a.first, b.first, heads=self.problem.heads), wide=True,
        )  # fmt: skip

    def check(self) -> None:
        """Refuse masks and scores that do not fit the whole, or the rank's rows of it."""
        seqlen_q, seqlen_k = self.sizes
        whole = replace(self.problem, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        for leaf in _without_rows(self.mask)._fit((*whole.batch, *self.sizes))._leaves:
            _check_held(whole, "mask", leaf)
        for a in self.queries[self.place.rank][:1]:
            for b in [b for own in self.keys for b in own][:1]:
                k, v = (np.broadcast_to(np.zeros((), x.dtype, like=x), (*x.shape[:-2], b.length, x.shape[-1]))
                        for x in (self.inputs.k, self.inputs.v))  # fmt: skip
                self.block(a, b, k, v)
        if self.sink is not None:
            self.sink._fit(whole.batch, *self.sizes)


def share_of(place: Place, q: Any, k: Any, v: Any, call: Call) -> Generator[Any, Any, Share]:
    """The Share of a rank, when all ranks have agreed."""
    own: Facts | Exception
    try:
        refuse_cache(k)
        mask, score = as_mask(call.mask), as_parts(call.score)
        mask = Causal() & mask if flag("causal", call.causal) else mask
        problem, inputs = describe(q, k, v, scale=call.scale, dropout=call.dropout)
        own = {"plan": call.plan, **_facts(problem, mask, inputs, score)}
    except (TypeError, ValueError) as error:
        own = error
    facts = yield from agreed(place.rank, own)
    queries, keys = (_pieces(name, [found[LENGTHS][side] for found in facts], place)
                     for side, name in enumerate(("q", "k and v")))  # fmt: skip
    share = Share(place, problem, inputs, mask, score, queries, keys, facts)
    own = {"fits": True, **facts[place.rank]}
    try:
        share.check()
    except (TypeError, ValueError) as error:
        own = error
    yield from agreed(place.rank, own)
    return share


def _facts(problem: Problem, mask: Mask, inputs: Inputs, score: tuple[Part, ...]) -> Facts:
    shapes = {
        name: f"{problem.dtype} of {problem.xp}, ({''.join(f'{n}, ' for n in shape[:-2])}..., {shape[-1]})"
        for name, shape in zip("qkv", problem.shapes)
    }
    own = {LENGTHS: (problem.seqlen_q, problem.seqlen_k), ROWS: [_rows(value) for value in (*score, *mask._leaves)]}
    return {**shapes, **options(mask, inputs.scale, inputs.dropout, score), **own}


def _rows(value: Any) -> int:
    """For how many queries its arrays have rows of their own."""
    axis = value._axis_of_queries
    return max([1 if axis is None or x.ndim < -axis else x.shape[axis] for x in value._arrays().values()], default=1)


def _pieces(name: str, lengths: list[int], place: Place) -> Pieces:
    """The pieces of all ranks that have these lengths."""
    wanted = lengths_of(sum(lengths), place.ranks, place.order)
    for rank, (got, length) in enumerate(zip(lengths, wanted)):
        if got != length:
            raise ValueError(f"{name}: got {got} of {sum(lengths)} tokens on rank {rank}, expected {length}: "
                             "what `split` gives it")
    return pieces_of(sum(lengths), place.ranks, place.order)


def _shows(mask: Mask, crop: Crop) -> bool:
    return cropped(mask, crop)._may_show(crop.queries, crop.keys)


_shows_by_numbers = lru_cache(maxsize=4096)(_shows)


def _without_rows(mask: Mask) -> Mask:
    """What a mask hides, whatever is in its arrays with rows for queries, which other ranks do not know."""
    if isinstance(mask, Joined):
        return type(mask)(tuple([_without_rows(part) for part in mask.of]))
    return mask if mask._axis_of_queries is None else All()
