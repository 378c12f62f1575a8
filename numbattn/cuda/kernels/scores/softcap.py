"""Softcap: S -> cap tanh(S / cap)."""

from dataclasses import dataclass

import numpy as np

from ....scores.softcap import Softcap
from ...tile import device, exp2, reciprocal, tanh, where
from ...words.numbers import LOG2_E
from .kind import ScoreKind, ValueAndSlope, nothing_ahead


@dataclass(frozen=True)
class SoftcapKind(ScoreKind):
    of = Softcap
    is_bounded, takes_few_registers, differs_by_head = True, True, False

    is_exact: bool  # whether in the dtype of sums; else 1e-7 is small enough an error

    def types(self, number):
        return number, number  # the cap, and 1 / cap

    def steps(self, at, scaling, layout, ACC, transposed=False, by_tma=False, has_derivative=True):
        value_and_slope = self.derivatives(at, scaling, layout, ACC, order=1)

        @device
        def step(S, F, found, scores, batch, head, m0, n0):
            value, slope = value_and_slope(S, scores, batch, head, m0, n0)
            return ValueAndSlope(value, F * slope)

        return nothing_ahead, step

    def derivatives(self, at, scaling, layout, ACC, transposed=False, order=2):
        (_, to_scaled), TWO_LOG2E, bounded = scaling, ACC(2 * LOG2_E), tanh_step(ACC if self.is_exact else None)

        @device
        def rest(S, scores):
            """r = 1 / (exp(2 x) + 1), so that tanh(x) = 1 - 2 r."""
            _, inverse = scores.parts[at]
            return reciprocal(exp2(S * to_scaled(inverse * TWO_LOG2E, scores)) + 1)

        @device
        def first(S, scores, batch, head, m0, n0):
            """cap tanh(x), and its derivative 4 r (1 - r), off by 1e-7, absolute."""
            (cap, inverse), r = scores.parts[at], rest(S, scores)
            return cap * bounded(S * to_scaled(inverse, scores), r), 4 * r * (1 - r)

        @device
        def both(S, scores, batch, head, m0, n0):
            """The second derivative is -2 tanh(x) / cap times the first."""
            (_, inverse), r = scores.parts[at], rest(S, scores)
            value, slope = first(S, scores, batch, head, m0, n0)
            return value, slope, (2 * r - 1) * (2 * inverse) * slope

        return first if order == 1 else both

    @classmethod
    def lowered(cls, part, number, problem):
        return cls(problem.dtype == problem.sum_dtype), (part.cap, 1 / part.cap), {}


def tanh_step(dtype):
    """The device function (x, r = 1 / (exp(2 x) + 1)) -> tanh(x), in this dtype; None: to an absolute error of 1e-7,
    enough for half precision. For small x, where 1 - 2 r loses digits, by a series."""
    if dtype is None:
        return device(lambda x, r: 1 - 2 * r)
    if dtype is np.float64:
        return device(lambda x, r: tanh(x))
    NEAR, CUBE, FIFTH, SEVENTH = dtype(0.04), dtype(-1 / 3), dtype(2 / 15), dtype(-17 / 315)

    @device
    def step(x, r):
        square = x * x
        return where(square < NEAR, x + x * (square * (CUBE + square * (FIFTH + square * SEVENTH))), 1 - 2 * r)

    return step
