"""Join the parts of a sequence that ranks hold."""

from __future__ import annotations

from typing import Any

from ..base.checks import integer, library, words_for
from .facts import ALIKE, LENGTHS, Facts, agreed, check_same
from .heads import all_to_all
from .messages import Like
from .pieces import RankPlace, joined
from .ring import Messages
from .share import pieces_by_rank


def join(place: RankPlace, part: Any, axis: int) -> Messages:
    """The whole array, on every rank."""
    own: Facts | Exception
    try:
        axis = axis_of(part, axis)
        own = facts_of(part, axis)
    except Exception as error:
        own = error
    facts = yield from agreed(place, own)
    lengths = lengths_in(facts)
    with ALIKE:
        pieces_by_rank("parts", lengths, place)

    def expected(source: int) -> list[Like]:
        return [Like((*part.shape[:axis], lengths[source], *part.shape[axis + 1 :]), part.dtype)]

    by_rank = yield from all_to_all(place, lambda to: [part], expected)
    return joined([x for (x,) in by_rank], place.order, axis)


def check_parts(parts: list[Any], axis: int, order: str) -> int:
    """Check the parts of all ranks; return the axis, counted from the first."""
    facts = [facts_of(part, axis_of(part, axis)) for part in parts]
    check_same(facts)
    pieces_by_rank("parts", lengths_in(facts), RankPlace(0, len(parts), order))
    return axis_of(parts[0], axis)


def axis_of(x: Any, axis: int) -> int:
    """The axis, counted from the first one."""
    if library(x) is None:
        raise TypeError(f"parts: got {words_for(x)}, expected arrays of NumPy or CuPy")
    return integer("axis", axis, -x.ndim, x.ndim - 1) % x.ndim


def facts_of(part: Any, axis: int) -> Facts:
    shape = ", ".join("..." if number == axis else str(n) for number, n in enumerate(part.shape))
    return {"call": "join", "parts": f"{part.dtype} of {library(part)}, ({shape})", LENGTHS: part.shape[axis]}


def lengths_in(facts: list[Facts]) -> tuple[int, ...]:
    return tuple([found[LENGTHS] for found in facts])
