"""Scores of edges: what happens to S = scale q . (k + k_edge) + bias before the softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple, cast

from ..base.checks import same_library, words_for
from ..base.values import rounded
from ..functions.given import PLACE
from ..scores import Part, Scores
from ..scores.bias import Bias
from ..scores.element import Identity, ScoreTangent
from ..scores.function import Score
from ..scores.softcap import Softcap
from .graph import TAKER


@dataclass(frozen=True, eq=False, repr=False)
class EdgeScore(Score):
    """``S = function(S, batch, head, edge, i, j, *arrays)``: a `numbattn.Score` for `graphs.attention`.

    The function is also told the number of the edge, which leads from query i to key j. All else, parameters, rules
    and errors, is as in `numbattn.Score`.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import graphs
    >>> def of_kind(s, batch, head, edge, i, j, kind, weight):
    ...     return s * weight[kind[edge], head]
    >>> g = graphs.Graph(np.array([0, 2, 2, 3]), np.array([0, 2, 1]))
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 3, 8))      # 4 heads
    >>> score = graphs.EdgeScore(of_kind, arrays=[np.array([0, 1, 0]), np.ones((2, 4))], gradient=True)
    >>> o, backprop = graphs.attention_vjp(q, k, v, g, score=score)
    >>> _, dweight = backprop(o).score
    >>> dweight.shape
    (2, 4)
    """

    _place: ClassVar[tuple[str, ...]] = (*PLACE[:2], "edge", *PLACE[2:])

    def _fit(self, batch: tuple[int, ...], seqlen_q: int, seqlen_k: int) -> None:
        raise TypeError("score: got a graphs.EdgeScore, whose function is one of edges: expected a numbattn.Score")


def checked_score(score: Scores, q: Any) -> tuple[Part, ...]:
    """The parts of what a user gives."""
    parts: Any = tuple(score) if isinstance(score, list | tuple) else (score,)
    for part in parts:
        if not isinstance(part, Softcap | EdgeScore):
            instead = ": pass graphs.EdgeScore(...) of it" * (callable(part) and not isinstance(part, type))
            instead = ": pass bias=" if isinstance(part, Bias) or hasattr(part, "shape") else instead
            instead = ": its function has no edge" if isinstance(part, Score) else instead
            raise TypeError(f"score: got {words_for(part)}, expected numbattn.Softcap, graphs.EdgeScore, or a list of "
                            f"them{instead}")
        same_library(TAKER, q=q, **{f"score: {name}": x for name, x in part._arrays().items()})
    return cast(tuple[Part, ...], parts)


class Link(NamedTuple):
    """What kernels compile of a part."""

    identity: Identity
    wanted: tuple[bool, ...]  # of each array whether its gradient is


def links_of(parts: Sequence[Part], dtype: Any) -> tuple[Link, ...]:
    """The Links of a score, for S of this dtype."""
    return tuple([Link(part._identity_of(dtype), part._wanted) if isinstance(part, EdgeScore) else
                  Link(softcap() if dtype.itemsize == 8 else softcap().of_float32, (False,)) for part in parts])


def given_of(parts: Sequence[Part], real: Any, dtype: Any, moving: Sequence[Any] | None = None) -> tuple[Any, ...]:
    """What the function of each Link is given: its arrays and numbers; the tangents of all their elements, (array,) or
    (), see `reads.along`; where its elements begin among those of all gradients.

    moving: if there are tangents, those of all arrays, None for zero; dtype: of sums.
    """
    found, first, tangents = list[Any](), 0, iter(moving or ())
    for part in parts:
        arrays, along = (real(part.cap),) if isinstance(part, Softcap) else part._weights, tuple[Any, ...]()
        if moving is not None and part._wants_gradient:
            along = (ScoreTangent(cast(EdgeScore, part), [next(tangents, None) for _ in arrays], dtype)._tangents,)
        found.append((arrays, along, first))
        first += elements_of(part)
    return tuple(found)


def elements_of(part: Part) -> int:
    """How many elements the arrays of a part have that have gradients."""
    return part._elements if isinstance(part, EdgeScore) and part._wants_gradient else 0


def gradients_of(parts: Sequence[Part], sums: Any) -> tuple[Any, ...]:
    """The gradient of each array, None if it is not wanted; sums: of all elements, one array after the other."""
    found, first = list[Any](), 0
    for part in parts:
        count = elements_of(part)
        own = part._gradients(sums[first : first + count] if count else None)
        found += [x if x is None else rounded(x, weight.dtype) for x, weight in zip(own, part._weights)]
        first += count
    return tuple(found)


def _capped(s: Any, batch: Any, head: Any, edge: Any, i: Any, j: Any, cap: Any) -> Any:
    return cap * math.tanh(s / cap)


def _slope(s: Any, batch: Any, head: Any, edge: Any, i: Any, j: Any, cap: Any) -> Any:
    e = math.exp(-2.0 * abs(s / cap))  # 1 - tanh(x)^2 without cancellation
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


def _bend(s: Any, batch: Any, head: Any, edge: Any, i: Any, j: Any, cap: Any) -> Any:
    e = math.exp(-2.0 * abs(s / cap))
    return -2.0 / cap * math.tanh(s / cap) * (4.0 * e / ((1.0 + e) * (1.0 + e)))


@cache
def softcap() -> Identity:
    """A Softcap as functions of one element."""
    return Identity(_capped, _slope, _bend)
