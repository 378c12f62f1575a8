"""What a rank adds up from step to step, in as few passes over memory as may be: what comes first and has all rows, as
the only result of a step has, is taken as it is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..merging import merge_into
from ..problem import Problem


class Total:
    """A sum of arrays that have some of the rows each: of the shape of `like`, in its library, in the dtype of sums."""

    def __init__(self, like: Any, dtype: Any) -> None:
        self.like, self.dtype = like, dtype
        self.sum: Any = None

    def add(self, rows: slice, x: Any) -> None:
        if self.sum is None and x.shape == self.like.shape:
            self.sum = x
        else:
            whole = self.whole[..., rows, :]
            whole += x

    @property
    def whole(self) -> Any:
        if self.sum is None:
            self.sum = np.zeros(self.like.shape, self.dtype, like=self.like)
        return self.sum


class Output:
    """o and lse of all queries of a rank over the keys so far, in the dtype of sums."""

    def __init__(self, problem: Problem, like: Any) -> None:
        self.problem, self.like = problem, like
        self.o: Any = None
        self.lse: Any = None

    def add(self, rows: slice, o: Any, lse: Any) -> None:
        """Those of some queries over other keys."""
        if self.o is None and o.shape == self.problem.out_shape:
            self.o, self.lse = o, lse
        else:
            all_o, all_lse = self.whole
            merge_into(all_o[..., rows, :], all_lse[..., rows], o, lse)

    @property
    def whole(self) -> tuple[Any, Any]:
        if self.o is None:
            sums = self.problem.sum_dtype
            self.o = np.zeros(self.problem.out_shape, sums, like=self.like)
            self.lse = np.zeros(self.problem.lse_shape, sums, like=self.like)
            self.lse[...] = -math.inf
        return self.o, self.lse
