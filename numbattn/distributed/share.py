"""A rank's share of an attention: its queries, keys and values, their places in the whole, the keys that it needs."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from ..base.forks import cached_property
from ..base.origin import Origin
from ..call.fitting import check_mask, check_numbers, check_part
from ..call.problem import Inputs, Problem, describe, mask_of, refuse_cache
from ..dropout import Dropout
from ..masks import All, Mask, apart, cropped, takers
from ..masks.logic import Joined
from ..scores import Part, as_parts, sink_of, steps_of
from ..scores.placed import takes_positions
from ..scores.sink import Sink
from .blocks import Block, Hop, hop_by_numbers, hop_of
from .facts import ALIKE, LENGTHS, ROWS, Facts, agreed, agreed_fit, options
from .messages import Near
from .pieces import RankPlace, TokenRange, lengths_of, pieces_of

Pieces = tuple[tuple[TokenRange, ...], ...]  # of each rank


RING, HEADS = PLANS = "ring", "heads"


class RingOptions(NamedTuple):
    """What a user asks for."""

    causal: bool
    mask: Any
    scale: Any
    dropout: Any
    score: Any
    plan: Any = None


@dataclass(frozen=True, eq=False)
class Share:
    """What a rank knows of a call, once all ranks have agreed."""

    place: RankPlace
    problem: Problem  # of the rank's own queries and keys, as are the inputs
    inputs: Inputs
    mask: Mask  # of the whole, except that arrays with rows may have the rank's rows only
    score: tuple[Part, ...]
    queries: Pieces
    keys: Pieces
    facts: list[Facts]  # of all ranks
    given: tuple[Part, ...] = ()  # the score, with its arrays where the user has them
    known: dict[tuple[int, int], Hop] = field(default_factory=dict)  # by rank and source

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """How many queries and keys there are in all."""
        seqlen_q, seqlen_k = (max((piece.end for own in of_all for piece in own), default=0)
                              for of_all in (self.queries, self.keys))  # fmt: skip
        return seqlen_q, seqlen_k

    @property
    def values(self) -> list[Part | Mask]:
        """The parts of the score, then those of the mask."""
        return [*self.score, *self.mask._leaves]

    @cached_property
    def has_own_rows(self) -> tuple[bool, ...]:
        """For each of these values, whether its arrays have the rows of the rank's own queries alone."""
        seqlen_q, _ = self.sizes
        return tuple(any(rows not in (1, seqlen_q) for rows in of_value)
                     for of_value in zip(*(x[ROWS] for x in self.facts)))  # fmt: skip

    @property
    def sink(self) -> Sink | None:
        return sink_of(self.score)

    @property
    def parts(self) -> list[Part]:
        """The parts of the score that apply to a block of scores; a sink is one logit for all keys."""
        return steps_of(self.score)

    @property
    def holds_arrays(self) -> bool:
        """Whether the mask or the score holds arrays; else all ranks find the same errors in them."""
        return _holds_arrays(self.mask, self.score)

    @cached_property
    def joins(self) -> bool:
        """Whether a call may have several pieces, since only the mask depends on their places."""
        needs_positions = any(part._needs_positions for part in self.parts)
        return not (needs_positions or self.problem.dropout or self.mask._holds_arrays)

    def hop(self, step: int) -> Hop:
        """The rank's work in a step."""
        return self.between(self.place.rank, self.place.before(step))

    def other_hop(self, step: int) -> Hop:
        """Another rank's work in a step, with the keys of this one."""
        return self.between(self.place.after(step), self.place.rank)

    def between(self, rank: int, source: int) -> Hop:
        """The work of a rank's queries and another one's keys, as all ranks know it."""
        if (rank, source) not in self.known:
            pieces = self.queries[rank], self.keys[source], self.sizes, self.joins
            found = (hop_of(_without_rows(self.mask), *pieces) if self.mask._holds_arrays
                     else hop_by_numbers(self.mask, *pieces))  # fmt: skip
            self.known[rank, source] = found
        return self.known[rank, source]

    def call(self, block: Block, k: Any, v: Any, wide: bool = True) -> tuple[Problem, Inputs]:
        """The call for a block. k, v: of its keys; wide: whether its results have the dtype of sums."""
        crop = block.crop
        mask = cropped(self.mask, crop) if self.mask._holds_arrays else block.mask
        return describe(
            self.inputs.q[..., block.queries, :], k, v, False, mask, self.inputs.scale, self.inputs.dropout,
            [part._cropped(crop, self.mask._frame) for part in self.parts],
            origin=Origin(crop.first_query, crop.first_key, heads=self.problem.heads), wide=wide,
        )  # fmt: skip

    def check(self) -> None:
        """Refuse masks and scores that do not fit the whole, or the rank's rows of it."""
        batch, xp = self.problem.batch, self.problem.xp
        shape = *batch, *self.sizes
        if not self.holds_arrays:
            check_numbers(self.mask, shape, xp)
            return
        check_mask(_without_rows(self.mask)._fit(shape), shape, xp)
        for a in self.queries[self.place.rank][:1]:
            for b in [b for own in self.keys for b in own][:1]:
                block = Block.of(self.mask, a, b, self.sizes, self.problem.seqlen_q)
                shape = *batch, a.length, b.length
                check_mask(block.mask._fit(shape), shape, xp)
                for part in self.parts:
                    check_part(part._cropped(block.crop, self.mask._frame), shape, xp)
        if self.sink is not None:
            self.sink._fit(batch, *self.sizes)


def share_of(place: RankPlace, q: Any, k: Any, v: Any, call: RingOptions) -> Generator[Any, Any, Share]:
    """The Share of a rank, once all ranks have agreed."""
    own: Facts | Exception
    try:
        refuse_cache(k)
        mask, score = by_rows(mask_of(call.causal, call.mask), as_parts(call.score))
        problem, inputs = describe(q, k, v, scale=call.scale, dropout=call.dropout)
        facts_of = _facts if _holds_arrays(mask, score) else _facts_of_numbers
        own = {"call": "forward", "plan": checked_plan(call.plan),
               **facts_of(problem, mask, inputs.scale, inputs.dropout, score)}  # fmt: skip
    except Exception as error:
        own = error
    facts = yield from agreed(place, own)
    with ALIKE:
        queries, keys = (pieces_by_rank(name, tuple([found[LENGTHS][side] for found in facts]), place)
                         for side, name in enumerate(("q", "k and v")))  # fmt: skip
    mask, near = yield from near_by(mask, score)
    share = Share(place, problem, inputs, mask, near, queries, keys, facts, score)
    if not share.holds_arrays:
        with ALIKE:
            share.check()
        return share
    yield from agreed_fit(place, facts, share.check)
    return share


def by_rows(mask: Mask, score: tuple[Part, ...]) -> tuple[Mask, tuple[Part, ...]]:
    """Both, without positions, which are not distributed; refused if they take any."""
    tail, bare = apart(mask)
    if tail is not None:
        found = [*(f"mask: got {leaf}" for leaf in takers(bare)),
                 *(f"score: got {part}" for part in score if takes_positions(part))]  # fmt: skip
        if found:
            raise ValueError(f"{found[0]} beside {tail}, whose positions are not distributed, expected neither")
    return bare, score


def checked_plan(plan: Any) -> str | None:
    if plan is not None and not (isinstance(plan, str) and plan in PLANS):
        raise ValueError(f"plan: got {plan!r}, allowed {', '.join(map(repr, PLANS))} or None")
    return plan


def near_by(mask: Mask, score: tuple[Part, ...]) -> Generator[Any, Any, tuple[Mask, tuple[Part, ...]]]:
    """Both, with their arrays where the rank computes."""
    if not _holds_arrays(mask, score):
        return mask, score
    mask, *parts = yield Near([mask, *score])
    return mask, tuple(parts)


def _holds_arrays(mask: Mask, score: tuple[Part, ...]) -> bool:
    return mask._holds_arrays or any(part._arrays() for part in score)


def _facts(problem: Problem, mask: Mask, scale: float, dropout: Dropout | None, score: tuple[Part, ...]) -> Facts:
    shapes = {
        name: f"{problem.dtype} of {problem.xp}, ({''.join(f'{n}, ' for n in shape[:-2])}..., {shape[-1]})"
        for name, shape in zip("qkv", problem.shapes)
    }
    own = {LENGTHS: (problem.seqlen_q, problem.seqlen_k), ROWS: tuple(map(_rows, (*score, *mask._leaves)))}
    return {**shapes, **options(mask, scale, dropout, score), **own}


_facts_of_numbers = lru_cache(maxsize=1024)(_facts)  # without arrays, which may change


def _rows(value: Any) -> int:
    """How many queries its arrays have rows for."""
    axis = value._axis_of_queries
    return max([1 if axis is None or x.ndim < -axis else x.shape[axis] for x in value._arrays().values()], default=1)


@lru_cache(maxsize=1024)
def pieces_by_rank(name: str, lengths: tuple[int, ...], place: RankPlace) -> Pieces:
    """The pieces of all ranks that have these lengths."""
    wanted = lengths_of(sum(lengths), place.ranks, place.order)
    for rank, (got, length) in enumerate(zip(lengths, wanted)):
        if got != length:
            raise ValueError(f"{name}: got {got} of {sum(lengths)} tokens on rank {rank}, expected {length}: "
                             "what `split` gives it")
    return pieces_of(sum(lengths), place.ranks, place.order)


def _without_rows(mask: Mask) -> Mask:
    """A mask without its arrays with rows for queries, which other ranks do not know."""
    if isinstance(mask, Joined):
        return type(mask)(tuple([_without_rows(part) for part in mask.of]))
    return mask if mask._axis_of_queries is None else All()
