"""Softcap: S -> cap tanh(S / cap)."""

import numpy as np

from ...functions.compiled.exponentials import expm1
from ...scores.softcap import Softcap
from ..tile import inline, tile
from .kind import CPUScoreKind, LoweredStep

NO_MATRIX = np.zeros((1, 1))


def lower(part, problem, order, sums):
    return LoweredStep(NO_MATRIX.shape, NO_MATRIX.strides, cap=part.cap), NO_MATRIX, None


@inline
def apply(S, slopes, row, batch, head, m0, n0):
    """cap tanh(x), and its derivatives. With x = S / cap and e = exp(2 x) - 1, tanh(x) = e / (e + 2)."""
    cap, one, two = S.dtype.type(row.cap), S.dtype.type(1), S.dtype.type(2)
    for j in range(S.shape[0]):
        for i in range(S.shape[1]):
            S[j, i] = expm1(two * (S[j, i] / cap))
    if slopes.size:
        derivative = tile(slopes, S.shape[0], S.shape[1])
        for j in range(S.shape[0]):
            for i in range(S.shape[1]):
                half = two / (S[j, i] + two)
                derivative[j, i] = (S[j, i] + one) * half * half            # 1 - tanh(x)^2 without cancellation
        if slopes.size > S.size:
            curvature = tile(slopes[S.size :], S.shape[0], S.shape[1])
            for j in range(S.shape[0]):
                for i in range(S.shape[1]):
                    curvature[j, i] = -two / cap * (S[j, i] / (S[j, i] + two)) * derivative[j, i]
    for j in range(S.shape[0]):
        for i in range(S.shape[1]):
            S[j, i] = cap * (S[j, i] / (S[j, i] + two))


KIND = CPUScoreKind(Softcap, lower, apply)
