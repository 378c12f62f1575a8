"""What a rank adds up from step to step, in as few passes over memory as may be.

What comes first and has all rows, as the only result of a step has, is taken as it is; what comes last is added while
the sum is rounded. Attention goes on from the o and lse of the keys so far, and rounds with the last ones.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..backends import run
from ..checks import dtype_of_sums
from ..merging import merge_into, sum_into
from ..problem import Inputs, Problem
from ..scores.sink import Sink


class Total:
    """A sum of arrays that have some of the rows each: of the library of `like`, in the dtype of its sums, and of its
    shape if no other one is given."""

    def __init__(self, like: Any, shape: tuple[int, ...] | None = None) -> None:
        self.like, self.shape, self.dtype = like, like.shape if shape is None else shape, dtype_of_sums(like.dtype)
        self.sum: Any = None
        self.last: tuple[slice, tuple[Any, ...]] | None = None  # not yet added

    def add(self, rows: slice, *part: Any) -> None:
        self.settle()
        if self.sum is None and part[0].shape == self.shape:
            self._take(*part)
        else:
            self.last = rows, part

    def settle(self) -> None:
        """Add what came last, whose memory is free then."""
        if self.last is not None:
            rows, part = self.last
            self._write(self.whole[..., rows, :], rows, part)
            self.last = None

    def result(self, dtype: Any) -> Any:
        """The sum in this dtype, once: in another one than that of sums, what came last is added on the way."""
        if dtype == self.dtype:
            self.settle()
            return self.whole
        out = np.empty(self.shape, dtype, like=self.like)
        rows, part = self.last or (slice(0, 0), ())
        if part:
            self._write(out[..., rows, :], rows, part)
        return self._with_others(out, rows)

    def _with_others(self, out: Any, rows: slice) -> Any:
        """What these rows of the sum are in already, and all others."""
        for others in slice(0, rows.start), slice(rows.stop, self.shape[-2]):
            sum_into(out[..., others, :], self.whole[..., others, :])
        return out

    @property
    def whole(self) -> Any:
        """The sum but for what came last."""
        if self.sum is None:
            self._take(*self._nothing())
        return self.sum

    def _nothing(self) -> tuple[Any, ...]:
        """What is there before anything is added."""
        return (np.zeros(self.shape, self.dtype, like=self.like),)

    def _take(self, *part: Any) -> None:
        (self.sum,) = part

    def _write(self, out: Any, rows: slice, part: tuple[Any, ...]) -> None:
        """These rows of the sum, and the part."""
        sum_into(out, self.whole[..., rows, :], *part)


class Output(Total):
    """o and lse of all queries of a rank over the keys so far, in the dtype of sums."""

    def __init__(self, problem: Problem, like: Any) -> None:
        super().__init__(like, problem.out_shape)
        self.lse: Any = None
        self.rounded: tuple[Any, slice] | None = None  # o in another dtype, and which of its rows are there

    def attend(self, rows: slice, problem: Problem, inputs: Inputs) -> None:
        """Add attention over other keys, which goes on from what is there. What has results of another dtype than that
        of sums is the last."""
        out = onto = None
        if self.sum is not None or problem.out_shape != self.shape:
            out, _ = onto = self.whole[..., rows, :], self.lse[..., rows]
        if problem.result_dtype != self.dtype:
            o = np.empty(self.shape, problem.result_dtype, like=self.like)
            self.rounded, out = (o, rows), o[..., rows, :]
        o, state = run(problem, "forward", problem, inputs, out, onto=onto)
        if onto is None:
            self._take(o, state.lse)

    def result(self, dtype: Any) -> Any:
        return super().result(dtype) if self.rounded is None else self._with_others(*self.rounded)

    def add_sink(self, sink: Sink | None) -> None:
        """As keys without values, where a query sees any."""
        if sink is not None:
            self.settle()
            o, lse = self.whole, self.lse
            logits = np.where(lse == -math.inf, lse, sink._like(o)._logits(lse))
            self.last = slice(0, self.shape[-2]), (np.broadcast_to(np.zeros((), o.dtype, like=o), o.shape), logits)

    def _nothing(self) -> tuple[Any, ...]:
        lse = np.zeros(self.shape[:-1], self.dtype, like=self.like)
        lse[...] = -math.inf
        return *super()._nothing(), lse

    def _take(self, *part: Any) -> None:
        self.sum, self.lse = part

    def _write(self, out: Any, rows: slice, part: tuple[Any, ...]) -> None:
        merge_into(out, self.whole[..., rows, :], self.lse[..., rows], *part)
