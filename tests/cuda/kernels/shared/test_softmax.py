"""Tile by tile it is the softmax of the whole row, with a maximum that lags by no more than a bit."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from numbattn.cuda.kernels.shared.softmax import LN_2, alpha_steps, logsumexp, low_step, softmax_steps
from numbattn.cuda.tile import full, load, mma, reciprocal, row_sum, save, simt
from numbattn.cuda.words.numbers import LOG2_E
from tests.tools.launch import launch, poisoned

ROWS, TILES, COLS = 16, 24, 8
CASES = {
    "float32": (simt(ROWS, COLS, 32, 4, 2), np.float32),
    "float64": (simt(ROWS, COLS, 32, 4, 2), np.float64),
    "mma": (mma(ROWS, COLS, 32), np.float32),
}
SCALE_LOG2 = 0.75
GROWTH = 0.05, 0.3, 0.5, 0.99, 1, 1.01, 2.5, 7  # of the maxima of the first rows, in bits a tile


def scores(rng):
    """[row, tile, column], in bits."""
    S = rng.uniform(-9, 0, (ROWS, TILES, COLS))
    for row, growth in enumerate(GROWTH):
        S[row, :, row] = growth * np.arange(TILES)
    S[8] = S[5, ::-1]                           # its maximum comes first
    S[9] -= 300
    S[10] = -40                                 # all the same
    S[11:13] = -np.inf                          # one sees nothing,
    S[12, -1, 3] = 5                            # one its last key only
    S[13, :5] = S[14, 5:20] = -np.inf
    return S


class Steps(NamedTuple):
    """What is given and found, in float64; scores and m in bits."""

    S: Any  # [tile, row, column]
    P: Any
    m: Any  # [tile, row]
    alpha: Any
    l: Any  # [row]
    lse: Any
    eps: float


@pytest.fixture(params=CASES)
def steps(request, world):
    return steps_of(request.param, world)


@cache
def steps_of(case, world):
    layout, dtype = CASES[case]
    ROW_VECTOR, PARTS = layout.row_vector(), layout.row_parts()
    ZERO, LN2, SCALE = dtype(0), dtype(LN_2), dtype(SCALE_LOG2)
    no_max, softmax_step = softmax_steps(dtype)

    def kernel(mS, mP, mM, mAlpha, mL, mLse):
        m, l = full(ROW_VECTOR, no_max(SCALE)), full(PARTS, ZERO)
        for tile in range(TILES):
            P, m, l, alpha = softmax_step(load(mS[tile], layout, 0), m, l, SCALE)
            save(mP[tile], P, 0)
            save(mM[tile], m, 0)
            save(mAlpha[tile], alpha, 0)
        total = row_sum(l, ZERO)
        save(mL, total, 0)
        save(mLse, logsumexp(m * (SCALE * LN2), total, LN2), 0)

    S = (scores(np.random.default_rng(0)) / SCALE_LOG2).astype(dtype).swapaxes(0, 1)
    P, (m, alpha), (l, lse) = (poisoned(shape, dtype) for shape in (S.shape, (2, TILES, ROWS), (2, ROWS)))
    launch(kernel, (1, 1, 1), layout.threads, 0, S, P, m, alpha, l, lse)
    S, P, m, alpha, l, lse = (x.astype(np.float64) for x in (S, P, m, alpha, l, lse))
    return Steps(S * SCALE_LOG2, P, m * SCALE_LOG2, alpha, l, lse, float(np.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", [(True, LOG2_E, 1), (False, 0.75, 0.98), (False, 1e9, 0.68e-9)])
def test_a_row_of_the_lowest_scores(world, dtype, case):
    """They are visible; -inf is not. far: as padding has, times log2(e) they are beyond the floats."""
    far, scale_log2, of_lowest = case
    layout, (no_max, softmax_step) = simt(4, 8, 32, 8, 1), softmax_steps(dtype, far)
    ROW_VECTOR, PARTS = layout.row_vector(), layout.row_parts()
    ZERO, LN2, SCALE, LOWEST = dtype(0), dtype(LN_2), dtype(scale_log2), dtype(np.finfo(dtype).min * of_lowest)

    def kernel(mS, mP, mLse):
        m, l = full(ROW_VECTOR, no_max(SCALE)), full(PARTS, ZERO)
        for tile in range(2):
            P, m, l, alpha = softmax_step(load(mS[tile], layout, 0), m, l, SCALE)
            save(mP[tile], P, 0)
        save(mLse, logsumexp(m * (SCALE * LN2), row_sum(l), LN2), 0)

    S = np.full((2, 4, 8), -np.inf, dtype)
    S[:, 0], S[0, 1], S[0, 2, 3:], S[1, 2, 1] = LOWEST, LOWEST, LOWEST, 1.5 / (scale_log2 * LN_2)
    P, lse = poisoned(S.shape, dtype), poisoned(4, dtype)
    launch(kernel, (1, 1, 1), layout.threads, 0, S, P, lse)
    np.testing.assert_array_equal(P, np.isfinite(S))
    lowest = LOWEST * (scale_log2 * LN_2)
    np.testing.assert_allclose(lse, [lowest, lowest, 1.5, -np.inf], rtol=1e-6)


def test_m_lags_behind_the_maximum_by_no_more_than_a_bit(steps):
    largest = np.maximum.accumulate(steps.S.max(axis=2))
    seen, rounding = np.isfinite(largest), 1000 * steps.eps
    assert (steps.m <= largest + rounding)[seen].all()
    assert (steps.m >= largest - 1 - rounding)[seen].all()
    assert steps.P.max() <= 2 + rounding


def test_sums_are_rescaled_once_a_bit_at_most(steps):
    rescaled = (steps.alpha[1:] != 1).sum(axis=0)[: len(GROWTH)]
    assert (rescaled <= np.array(GROWTH) * (TILES - 1)).all()


def test_it_is_the_softmax_of_the_whole_row(steps):
    S, P, m, alpha, l, lse, eps = steps
    largest = S.max(axis=(0, 2))
    seen = np.isfinite(largest)
    E = np.exp2(S[:, seen] - largest[seen, None])
    total = E.sum(axis=(0, 2))
    np.testing.assert_allclose(lse[seen], (largest[seen] + np.log2(total)) * np.log(2), rtol=10 * eps, atol=10 * eps)
    assert np.isneginf(lse[~seen]).all()
    after = np.cumprod(np.vstack([np.ones(ROWS), alpha[:0:-1]]), axis=0)[::-1]     # by what a tile is still multiplied
    weights = P[:, seen] * (after[:, seen] / l[seen])[..., None]
    np.testing.assert_allclose(weights, E / total[:, None], rtol=0, atol=1000 * eps)
    assert not P[:, ~seen].any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.usefixtures("world")
def test_what_rounding_takes_from_a_large_lse(rng, dtype):
    """With it lse is m, in base 2 as P has it, plus the logarithm of the sum; 0 for a row that sees nothing."""
    VECTOR, SCALE, LN2, UNIT = simt(ROWS, COLS, 32, 4, 2).row_vector(), *map(dtype, (0.7, LN_2, 0.7 * LN_2))
    low_of, (_, alpha_of) = low_step(dtype), alpha_steps(dtype, exact=True)

    def kernel(ms, totals, lses, lows, alphas):
        m, total = load(ms, VECTOR, 0), load(totals, VECTOR, 0)
        lse = logsumexp(m * UNIT, total, LN2)
        save(lses, lse, 0)
        save(lows, low_of(lse, m, SCALE, reciprocal(total)), 0)
        save(alphas, alpha_of(m, m + 3, SCALE), 0)

    m, total = (10 ** rng.uniform(0, 6, ROWS)).astype(dtype), rng.uniform(1, 100, ROWS).astype(dtype)
    m[:2], total[:2] = (-1e6, 0), (2, 0)
    lse, low, alpha = poisoned((3, ROWS), dtype)
    launch(kernel, (1, 1, 1), 32, 0, m, total, lse, low, alpha)
    seen, eps = total > 0, np.finfo(dtype).eps
    high, want = lse * dtype(np.log2(np.e)), m * SCALE + np.log2(np.longdouble(np.where(seen, total, 1)))
    got = np.longdouble(high) + low * np.log2(np.e)
    np.testing.assert_allclose(got[seen], want[seen], rtol=0, atol=40 * eps)
    assert (lse[~seen], low[~seen]) == (-np.inf, 0)
    exact = np.exp2(np.longdouble(m * SCALE) - (m + 3) * SCALE)
    np.testing.assert_allclose(alpha, exact, rtol=10 * eps)


FAULTS = {
    "test_what_rounding_takes_from_a_large_lse": {
        "maximum(m * scale_log2, LOWEST) if EXACT else m * scale_log2": "m * scale_log2",
        " - log2(factor)) * LN2": ") * LN2",
        "in_log2(m, scale_log2) - in_log2(m_new, scale_log2) if EXACT else (m - m_new)": "(m - m_new)",
    },
    "SLACK = 1 ": "SLACK = 40 ",
    "LOWEST if FAR else LOWEST / maximum(scale_log2, ONE)": "-ONE",
    "test_a_row_of_the_lowest_scores": {
        "LOWEST if FAR else": "LOWEST if False else",
        "LOWEST / maximum(scale_log2, ONE)": "LOWEST",
    },
    "subtracted_first if far else fused": "fused",
    "(m_new - m) * scale_log2 > SLACK": "m_new - m > SLACK",
    "> SLACK, m_new, m)": "> SLACK, m, m_new)",
    "else (m - m_new) * scale_log2)": "else m - m_new)",
    "return m_new, alpha, m_new if": "return m_new, alpha, m if",
    "part_sum(P, l * alpha)": "part_sum(P, l)",
    "m + log2(total)": "log2(total)",
    "log2(total) * ln_2": "log2(total)",
    "cuda/kernels/hopper/test_linear_bias.py::test_slopes_far_from_the_diagonal": {
        "row_max(S) * factor) + level, m)": "row_max(S) * factor), m)",
        "else m_new - level": "else m_new",
    },
    "cuda/kernels/scores/test_relative.py": {
        "else factor * scale_log2": "else scale_log2",
    },
}
