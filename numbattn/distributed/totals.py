"""Sums over the steps of a rank, in as few passes over memory as possible.

The first term is taken as it is if it has all rows, as the only result of a step does; the last one is added while the
sum is rounded. Attention resumes from o and lse over the keys so far, and rounds with the last ones.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..base.checks import dtype_of_sums
from ..call import passes
from ..call.problem import Inputs, Problem
from ..merging import merge_into, sum_into
from ..scores.sink import Sink


class Total:
    """A sum of arrays that each have some of its rows: in the library of `like`, in its dtype of sums, and of its
    shape, unless another one is given."""

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
        """Add the last term, whose memory is free then."""
        if self.last is not None:
            rows, part = self.last
            self._write(self.whole[..., rows, :], rows, part)
            self.last = None

    def result(self, dtype: Any) -> Any:
        """The sum in this dtype, to be called once: if it is rounded, the last term is added at the same time."""
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
        """The sum without the last term."""
        if self.sum is None:
            self._take(*self._nothing())
        return self.sum

    def _nothing(self) -> tuple[Any, ...]:
        """The sum of no terms."""
        return (np.zeros(self.shape, self.dtype, like=self.like),)

    def _take(self, *part: Any) -> None:
        (self.sum,) = part

    def _write(self, out: Any, rows: slice, part: tuple[Any, ...]) -> None:
        """Write these rows of the sum with the part added."""
        sum_into(out, self.whole[..., rows, :], *part)


class Output(Total):
    """o and lse of all queries of a rank over the keys so far, in the dtype of sums."""

    def __init__(self, problem: Problem, like: Any) -> None:
        super().__init__(like, problem.out_shape)
        self.lse: Any = None
        self.rounded: tuple[Any, slice] | None = None  # o in another dtype, and which of its rows are there

    def attend(self, rows: slice, problem: Problem, inputs: Inputs) -> None:
        """Add attention over other keys, which resumes from the sum. If its results have another dtype than sums, it is
        the last."""
        out = onto = None
        if self.sum is not None or problem.out_shape != self.shape:
            out, _ = onto = self.whole[..., rows, :], self.lse[..., rows]
        if problem.result_dtype != self.dtype:
            o = np.empty(self.shape, problem.result_dtype, like=self.like)
            self.rounded, out = (o, rows), o[..., rows, :]
        o, state = passes.forward(problem, inputs, out, onto=onto)
        if onto is None:
            self._take(o, state.lse)

    def result(self, dtype: Any) -> Any:
        return super().result(dtype) if self.rounded is None else self._with_others(*self.rounded)

    def add_sink(self, sink: Sink | None) -> None:
        """Add it as a key without a value, for queries that see any key."""
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
