"""Points in float64 and in float32, and what the formula makes of them."""

import numpy as np

from numbattn.call.problem import describe
from numbattn.points import formula
from tests.accuracy import assert_accurate

DTYPES = [np.float16, np.float32, np.float64]
SIZES = [(1, 1, 1), (130, 1, 3), (5, 1200, 8), (131, 1100, 9), (129, 65, 40), (3, 70, 0)]  # m, n, d: beyond tiles


def drawn(rng, m, n, d, e, dtype, batch=()):
    """Problem, Inputs, and a gradient c of a sum."""
    x, y = (rng.standard_normal((*batch, size, d)) / max(d, 1) ** 0.5 for size in (m, n))
    b, c = (rng.standard_normal((*batch, size, e)).astype(dtype) for size in (n, m))
    problem, inputs = describe(x.astype(dtype), y.astype(dtype), b)
    return problem, inputs, c.astype(problem.sum_dtype)


def check(function, got, problem, inputs, *args, **options):
    """A result as accurate as that of the formula in the dtype of sums, of the same points: in float64, or better."""
    wide = np.longdouble if problem.sum_dtype == np.float64 else np.float64
    other = getattr(formula, function)(problem, inputs, *args, **options)
    exact = in_a_wider_dtype(function, problem, inputs, wide, *args, **options)
    assert got.dtype == problem.sum_dtype
    assert_accurate(function, got, exact, other, problem.sum_dtype, bits=2)


def in_a_wider_dtype(function, problem, inputs, wide, *args, **options):
    wide_inputs = inputs._replace(**{name: getattr(inputs, name).astype(wide) for name in "qkv"})
    widened = [x.astype(wide) if isinstance(x, np.ndarray) else x for x in (*args, *options.values())]
    args, options = widened[: len(args)], dict(zip(options, widened[len(args) :]))
    return getattr(formula, function)(Wide(problem, wide), wide_inputs, *args, **options)


class Wide:
    """A Problem whose sums are in another dtype."""

    def __init__(self, problem, dtype):
        self.problem, self.sum_dtype = problem, np.dtype(dtype)

    def __getattr__(self, name):
        return getattr(self.problem, name)
