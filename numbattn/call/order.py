"""Calls that are computed with their tokens in another order: on grids in that of boxes, where neighbours along all
axes see the same tiles of keys."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from ..base.backends import backend
from ..base.values import put
from .fitting import fitted_mask
from .problem import Inputs, Problem, Saved, describe
from .tangents import Tangents

WIDE = np.dtype(np.complex128)  # 16 bytes
# arrays without features, and their tangents
ROWS = "lse", "lse_low", "dlse", "weights", "row_max", "entropy", "column_sums"


def gradient_of_part(number: int) -> str:
    """The name of the gradient of the array of score part `number`."""
    return f"gradient of score {number}"


class Ordered(NamedTuple):
    """A call with its tokens in another order. Among those in order there may be some that stand for none."""

    problem: Problem
    inputs: Inputs
    given: Any  # which of the given tokens is at each place of the order
    place: Any  # of each given token

    def of_arrays(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Arrays by name, in order."""
        return {name: taken(name, x, self.given) for name, x in arrays.items()}

    def of_tangents(self, tangents: Tangents | None) -> Tangents | None:
        if tangents is None:
            return None
        q, k, v = (taken(name, x, self.given) for name, x in zip("qkv", tangents))
        parts = [part for part in self.inputs.score for _ in part._weights]
        score = tuple([x if x is None else part._in_order_of(x) for part, x in zip(parts, tangents.score)])
        return tangents._replace(q=q, k=k, v=v, score=score)

    def back(self, results: dict[str, Any]) -> dict[str, Any]:
        """Results by name, as the tokens were given."""
        parts = {gradient_of_part(number): part for number, part in enumerate(self.inputs.score)}
        return {name: parts[name]._as_given(x) if name in parts else taken(name, x, self.place)
                for name, x in results.items()}  # fmt: skip

    def saved(self, problem: Problem, inputs: Inputs, o: Any, saved: Any, out: Any) -> tuple[Any, Any]:
        """o, in `out` if given, and what is saved of the call as it was given, from these in order."""
        o = taken("o", o, self.place)
        if out is not None:
            put(out, o)
            o = out
        if saved is None:
            return o, None
        rows = self.back({"lse": saved.lse, "lse_low": saved.lse_low})
        return o, Saved(problem, inputs, o, rows["lse"], rows["lse_low"], saved.whole)


def taken(name: str, x: Any, tokens: Any) -> Any:
    """These tokens of an array, or of None."""
    return x if x is None else np.take(x, tokens, axis=-1) if name.removeprefix("t") in ROWS else rows(x, tokens)


def rows(x: Any, tokens: Any) -> Any:
    """These rows of an array (..., tokens, features)."""
    width = x.shape[-1] * x.itemsize
    if isinstance(x, np.ndarray) or width % WIDE.itemsize or not x.flags.c_contiguous:
        return np.take(x, tokens, axis=-2)
    return np.take(x.view(WIDE), tokens, axis=-2).view(x.dtype)     # CuPy's loop over elements is 6 times as fast


def computed_in_order(
    problem: Problem, inputs: Inputs, compute: Callable[[Ordered], Any]
) -> tuple[Ordered | None, Any]:  # fmt: skip
    """The call as from `in_order`, and what compute(it) returns, in memory that in a capture is the graph's."""
    with nullcontext() if problem.xp == "numpy" else backend(problem.xp).scratch():
        order = in_order(problem, inputs)
        return order, order and compute(order)


def as_it_is(problem: Problem, inputs: Inputs) -> Inputs:
    """The call in the order of its tokens, with its mask fitted."""
    if not inputs.mask._may_wait:
        return inputs
    return inputs._replace(mask=fitted_mask(inputs.mask, inputs.q, problem.score_shape, problem.xp))


def order_of(mask: Any, score: Any, array: Any, summed: bool = False) -> tuple[Any, list[Any]] | None:
    """The order of boxes of a mask's grid, for calls on arrays of the library of `array`, and the parts of a score in
    it; None if there is none, or if a part depends on where tokens are. summed: see `boxes_of`."""
    order = mask._windows.in_order(array, summed)
    if order is None:
        return None
    parts = [part._in_order(order) for part in score]
    return None if any(part is None for part in parts) else (order, parts)


def in_order(problem: Problem, inputs: Inputs) -> Ordered | None:
    """The call, on a grid, with its tokens in another order; None if there is none, or if anything else depends on
    where tokens are."""
    if not inputs.mask._may_wait or inputs.dropout or inputs.origin != problem.origin or problem.is_empty:
        return None
    summed = problem.xp != "numpy" and any(part._is_trained_on_grid for part in inputs.score)
    chosen = order_of(inputs.mask, inputs.score, inputs.q, summed)
    if chosen is None:
        return None
    order, score = chosen
    q, k, v = (rows(x, order.given) for x in inputs[:3])
    found = describe(q, k, v, mask=order.mask, scale=inputs.scale, score=score, wide=problem.wide)
    return Ordered(*found, order.given, order.place)
