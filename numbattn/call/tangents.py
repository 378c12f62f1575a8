"""Tangents of a call's arrays and of its results, checked. Backends see them with an axis of the tangents in front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple

import numpy as np

from ..base.checks import A, library, other_dtype, same_library, words_for
from ..base.values import moved
from ..scores import Part
from .problem import Inputs, Problem, Saved, converted


class Tangents(NamedTuple):
    """Directions in which the arrays of a call change; None stands for zero."""

    q: Any  # (count, *shape of q)
    k: Any
    v: Any
    score: tuple[Any, ...]  # one for each array that has a place in `grads.score`, (count, *shape of it)
    count: int = 1  # type: ignore[assignment]  # it hides a method of tuples

    def some(self, first: int, end: int) -> Tangents:
        """The tangents [first, end)."""
        if first == 0 and end >= self.count:
            return self
        q, k, v, *score = (x if x is None else x[first:end] for x in (self.q, self.k, self.v, *self.score))
        return Tangents(q, k, v, tuple(score), len(range(self.count)[first:end]))


def parts_of(inputs: Inputs, tangents: Tangents, number: int, backward: bool = False) -> list[Any]:
    """For each part of the score, what moves S along tangent `number` of its arrays, see `Part._tangent`."""
    given, found, dtype = iter(tangents.score), list[Any](), np.promote_types(inputs.q.dtype, np.float32)
    for part in inputs.score:
        own = [x if x is None else x[number, ...] for _, x in zip(part._weights, given)]  # an array even for a number
        tangent = part._tangent(own, dtype, backward) if own else None
        found.append(tangent and tangent._within(inputs.mask._frame))
    return found


@dataclass(frozen=True, eq=False, repr=False)
class SavedTangents(Generic[A]):
    """What the tangent of the forward pass leaves for the tangent of the backward pass. It refers to the tangents of q,
    k, v and o; it does not copy them.

    Attributes
    ----------
    to : array, (..., seqlen_q, head_dim_v)
        The tangent of o; for several tangents with their axis in front.
    tlse : array, (..., seqlen_q), float32, or float64 for float64
        The tangent of lse, likewise; 0 where a query sees nothing.
    """

    problem: Problem
    tangents: Tangents
    to: A
    tlse: A
    several: bool  # whether there is an axis of tangents

    def __getstate__(self) -> dict[str, Any]:  # for copies and pickle: of a Score's kind `_call` compares only the type
        problem = replace(self.problem, score_kinds=tuple([kind[:1] for kind in self.problem.score_kinds]))
        return vars(self) | {"problem": problem}

    def __repr__(self) -> str:
        count = f"{self.tangents.count} tangents" if self.several else "a tangent"
        return f"<SavedTangents: {count} of {self.to.dtype}, {self.problem.xp}>"


class GivenTangent(NamedTuple):
    """A tangent that is given."""

    name: str  # of the argument
    tangent: Any
    array: Any  # that it is the tangent of
    of: str  # the name of that


def checked_tangents(
    inputs: Inputs, q: Any, k: Any, v: Any, score: Any = (), prefix: str = "t", several: bool | None = None
) -> tuple[Tangents, bool]:
    """The Tangents of a call, and whether those given have an axis in front.

    prefix: of the arguments' names, as in tq; several: whether they must have that axis, if it is known.
    """
    tangents, weights = (q, k, v, *of_score(f"{prefix}score", score, inputs)), weights_of(inputs)
    names = [*(f"{prefix}{name}" for name in "qkv"), *(f"{prefix}score[{i}]" for i in range(len(weights)))]
    arrays = inputs.q, inputs.k, inputs.v, *(x for _, x in weights)
    wanted = map(GivenTangent, names, tangents, arrays, [*"qkv", *(type(part).__name__ for part, _ in weights)])
    several, count = checked_along([x for x in wanted if x.tangent is not None], inputs, several)
    q, k, v, *score = (x if x is None or several else x[None] for x in tangents)
    score = tuple([x if x is None else moved(x, inputs.q) for x in score])
    return Tangents(q, k, v, score, count), several


def checked_along(given: list[GivenTangent], inputs: Any, several: bool | None = None) -> tuple[bool, int]:
    """Check tangents; whether they have an axis in front, unless that is known, and how many there are."""
    for x in given:
        _check_array(x, inputs)
    may_be_several = several is None
    if several is None:
        several = bool(given) and given[0].tangent.ndim > given[0].array.ndim
    lead: tuple[int, ...] = () if not several else given[0].tangent.shape[:1] if given else (0,)
    for x in given:
        _check_shape(x, lead, given[0], may_be_several)
    return several, lead[0] if several else 1


def weights_of(inputs: Any) -> list[tuple[Part, Any]]:
    """The arrays that have a place in `grads.score`, each with its part of the score."""
    return [(part, x) for part in inputs.score for x in part._weights]


def of_score(name: str, score: Any, inputs: Any) -> Sequence[Any]:
    """The tangents of arrays in the score, one for each."""
    if not isinstance(score, list | tuple):
        raise TypeError(f"{name}: got {words_for(score)}, expected a list or tuple of arrays or None")
    parts = [part for part, _ in weights_of(inputs)]
    wanted = [each for part in inputs.score for each in part._wanted]
    if not score:
        return [None] * len(parts)
    if len(score) != len(parts):
        names = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(f"{name}: got {len(score)} tangents, expected {len(parts)}, one for each array in score"
                         f"{f', of {names}' * bool(names)}")  # fmt: skip
    for number, (part, tangent, is_wanted) in enumerate(zip(parts, score, wanted)):
        if tangent is None or is_wanted:
            continue
        if part._is_nonlinear:
            kind = type(part).__name__
            raise NotImplementedError(f"{name}[{number}]: got {words_for(tangent)} for an array of a {kind} whose "
                                      "gradient is not wanted, expected None: pass gradient=True")  # fmt: skip
        if name == "ddscore":
            raise ValueError(f"{name}[{number}]: got {words_for(tangent)} for a {type(part).__name__} whose gradient "
                             "is not wanted, expected None")  # fmt: skip
    return score


def _check_array(x: GivenTangent, inputs: Any) -> None:
    if library(x.tangent) != "numpy" or x.of in "qkv":  # arrays in scores may be of NumPy with inputs of CuPy
        same_library(q=inputs.q, **{x.name: x.tangent})
    if x.tangent.dtype != x.array.dtype:
        raise other_dtype(x.name, x.tangent.dtype, x.array.dtype, x.of)


def _check_shape(x: GivenTangent, lead: tuple[int, ...], first: GivenTangent, may_be_several: bool) -> None:
    """Refuse a tangent of another shape. lead: the axis of tangents of the first tangent given, if it has one;
    may_be_several: whether that was free to have one or not."""
    expected = (*lead, *x.array.shape)
    if x.tangent.shape == expected:
        return
    said = f"{expected}, the shape of {x.of}"
    if x is first and lead:
        said += " after an axis of tangents"
    elif lead:
        said += f" after the axis of {first.name}, of {lead[0]} tangents"
    elif x is first and may_be_several:
        said += ", or one axis more in front, of several tangents"
    elif may_be_several:
        said += f": {first.name} has no axis of tangents"
    raise ValueError(f"{x.name}: got the shape {x.tangent.shape}, expected {said}")


def checked_tangents_of_gradients(
    saved: Saved[Any], tangents: SavedTangents[Any], tdo: Any, dlse: Any, tdlse: Any
) -> tuple[Any, Any]:
    """The tangents of do and dlse, checked, in the dtypes of these, with an axis in front."""
    if not isinstance(tangents, SavedTangents):
        raise TypeError(f"tsaved: got {words_for(tangents)}, expected what attention_forward_jvp returned")
    problem, own = saved.problem, tangents.problem
    if _call(own) != _call(problem):
        raise ValueError(f"tsaved: got {tangents} of the shapes {own.shapes}, expected that of the same call as saved, "
                         f"{saved}, with the same kinds of mask and score")  # fmt: skip
    if tdlse is not None and dlse is None:
        raise ValueError(f"tdlse: got {words_for(tdlse)} without dlse, whose tangent it is: pass dlse, too")
    lead = (tangents.tangents.count,) if tangents.several else ()
    if tdo is not None:
        tdo = converted("tdo", tdo, "to", (*lead, *problem.out_shape), problem.dtype, saved.inputs)
    if tdlse is not None:
        tdlse = converted("tdlse", tdlse, "tlse", (*lead, *problem.lse_shape), problem.sum_dtype, saved.inputs)
    tdo, tdlse = (x if x is None or tangents.several else x[None] for x in (tdo, tdlse))
    return tdo, tdlse


def _call(problem: Problem) -> tuple[Any, ...]:
    """What two Problems share if one call's arrays are copies of the other's, functions of a Score aside."""
    parts = [kind for kind, *_ in problem.score_kinds]
    return problem.xp, problem.dtype, problem.shapes, problem.mask_kinds, parts, problem.dropout
