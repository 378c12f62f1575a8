"""The four sums in blocks against all pairs at once."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import numbattn as na
from numbattn.call.problem import describe
from numbattn.points import formula

from . import plain

MASKS = {
    "none": lambda m, n: None,
    "causal": lambda m, n: na.Causal(),
    "window": lambda m, n: na.Window(9, 4, offset=3) | na.First(5),
    "lengths": lambda m, n: na.Lengths(keys=np.array([[n - 7], [0]]), queries=np.array([[m], [m - 3]])),
    "segments": lambda m, n: na.Segments([0, 3, m // 2, m], [0, 10, n // 3, n]) & na.Causal(),
    "dense": lambda m, n: np.random.default_rng(0).random((2, 1, m, n)) < 0.7,
    "bits": lambda m, n: na.Bits.pack(np.random.default_rng(1).random((m, n)) < 0.3),
    "blocks": lambda m, n: na.BlockSparse(np.eye(-(-m // 10), -(-n // 30), dtype=bool)[None, None], (10, 30)),
    "prefix": lambda m, n: na.Prefix(11),
    "intervals": lambda m, n: na.Intervals(np.arange(m) - 3, np.arange(m) + n // 2),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Many of them in a small problem."""
    for name, size in {"ROWS": 16, "COLUMNS": 32, "PAIRS": 1000}.items():
        monkeypatch.setattr(formula, name, size)


def drawn(rng, mask="none", d=3, e=2, dtype=np.float64, batch=(2, 3), m=41, n=77):
    """Problem, Inputs, and what is visible; NaN where nobody may look."""
    x, y, b = (rng.standard_normal((*batch, *shape)).astype(dtype) for shape in ((m, d), (n, d), (n, e)))
    given = MASKS[mask](m, n)
    problem, inputs = describe(x, y, b, mask=given)
    visible = np.broadcast_to(inputs.mask.dense(m, n), problem.score_shape)
    hidden = x.copy(), y.copy(), b.copy()
    hidden[0][~visible.any(-1)] = np.nan
    for points in hidden[1:]:
        points[~visible.any(-2)] = np.nan
    if mask == "lengths":
        problem, inputs = describe(*hidden, mask=given)
    return problem, inputs, (x, y, b), visible


@pytest.mark.parametrize("kind", [*plain.KINDS, plain.radial()], ids=str)
@pytest.mark.parametrize("d", [3, 20])
def test_sums_and_gradients_of_each_kind(rng, kind, d):
    problem, inputs, (x, y, b), _ = drawn(rng, d=d)
    c = rng.standard_normal((*problem.batch, problem.seqlen_q, 2))
    assert_allclose(formula.sums(problem, inputs, kind), plain.sums(kind, x, y, b), atol=1e-10)
    assert_allclose(formula.gradient(problem, inputs, kind, c), plain.gradient(kind, x, y, b, c), atol=1e-10)


@pytest.mark.parametrize("mask", MASKS)
def test_masks(rng, mask):
    problem, inputs, (x, y, b), visible = drawn(rng, mask)
    kind, c = plain.KINDS[0], rng.standard_normal((*problem.batch, problem.seqlen_q, 2))
    c[~visible.any(-1)] = np.nan
    columns, empty = rng.standard_normal((*problem.batch, problem.seqlen_k)), (problem, inputs, kind)
    assert_allclose(formula.sums(*empty), plain.sums(kind, x, y, b, visible), atol=1e-12)
    assert_allclose(formula.gradient(*empty, c), plain.gradient(kind, x, y, b, np.nan_to_num(c), visible), atol=1e-12)
    assert_allclose(formula.logsumexp(*empty, columns), plain.logsumexp(kind, x, y, visible, columns), atol=1e-12)
    for got, exact in zip(formula.nearest(problem, inputs, 5), plain.nearest(x, y, 5, visible)):
        assert_allclose(got, exact, atol=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in plain.KINDS if kind.is_exponential], ids=str)
def test_logarithms_of_rows_and_columns(rng, kind):
    problem, inputs, (x, y, b), _ = drawn(rng)
    rows, columns = (rng.standard_normal((*problem.batch, n)) for n in (problem.seqlen_q, problem.seqlen_k))
    columns[..., ::3] = -np.inf
    c = rng.standard_normal((*problem.batch, problem.seqlen_q, 2))
    for given in ({"rows": rows}, {"columns": columns}, {"rows": rows, "columns": columns}):
        assert_allclose(formula.sums(problem, inputs, kind, **given), plain.sums(kind, x, y, b, **given))
        exact = plain.gradient(kind, x, y, b, c, **given)
        assert_allclose(formula.gradient(problem, inputs, kind, c, **given), exact, atol=1e-12)
    assert_allclose(formula.logsumexp(problem, inputs, kind, columns), plain.logsumexp(kind, x, y, True, columns))


def test_large_logarithms_do_not_overflow(rng):
    problem, inputs, (x, y, b), _ = drawn(rng)
    rows, columns = np.full((*problem.batch, problem.seqlen_q), 1e4), np.full((*problem.batch, problem.seqlen_k), -1e4)
    kind = plain.KINDS[0]
    assert_allclose(formula.sums(problem, inputs, kind, rows, columns), plain.sums(kind, x, y, b))
    found = formula.logsumexp(problem, inputs, kind, columns)
    assert_allclose(found, plain.logsumexp(kind, x, y) - 1e4)


def test_what_has_no_weight_at_first(rng):
    """As many points as a block has, and more."""
    problem, inputs, (x, y, _), _ = drawn(rng)
    columns = rng.standard_normal((*problem.batch, problem.seqlen_k))
    columns[..., :40] = -np.inf
    found = formula.logsumexp(problem, inputs, plain.KINDS[0], columns)
    assert_allclose(found, plain.logsumexp(plain.KINDS[0], x, y, True, columns))


def test_equal_distances_go_to_the_lower_index(rng):
    x = np.zeros((50, 2))
    problem, inputs = describe(x, np.tile(np.eye(2), (50, 1)), np.zeros((100, 0)))
    t, j = formula.nearest(problem, inputs, 7)
    assert_array_equal(j, np.broadcast_to(np.arange(7), (50, 7)))
    assert_array_equal(t, np.ones((50, 7)))
    assert (t.dtype, j.dtype) == (np.float64, np.int32)


def test_nothing_in_sight(rng):
    for m, n, batch in ((3, 0, (2,)), (0, 3, (2,)), (3, 3, (0,))):
        problem, inputs, _, _ = drawn(rng, m=m, n=n, batch=batch)
        assert_array_equal(formula.sums(problem, inputs, plain.KINDS[0]), np.zeros((*batch, m, 2)))
        assert_array_equal(formula.gradient(problem, inputs, plain.KINDS[0], np.zeros((*batch, m, 2))),
                           np.zeros((*batch, m, 3)))
        assert formula.logsumexp(problem, inputs, plain.KINDS[0]).shape == (*batch, m)
        t, j = formula.nearest(problem, inputs, 2)
        assert t.shape == j.shape == (*batch, m, 2)
    problem, inputs = describe(np.zeros((3, 2)), np.zeros((0, 2)), np.zeros((0, 0)))
    assert np.isneginf(formula.logsumexp(problem, inputs, plain.KINDS[0])).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_sums_are_of_the_dtype_of_sums(rng, dtype):
    problem, inputs, (x, y, b), _ = drawn(rng, d=16, dtype=dtype)
    found = formula.sums(problem, inputs, plain.KINDS[0])
    assert found.dtype == np.float32
    assert_allclose(found, plain.sums(plain.KINDS[0], x, y, b), atol=2e-5)


FAULTS = {
    "test_masks": {
        "return kappa if self.visible is None else np.where(self.visible, kappa, hidden)": "return kappa",
        "weights = block.only_visible(_kappa(block, kind, rows, columns, derivative=True) * product)": (
            "weights = _kappa(block, kind, rows, columns, derivative=True) * product"
        ),
        "np.where(by_column, y, 0)": "y",
        "here = block.only_visible(distances(block), math.inf)": "here = distances(block)",
    },
    "test_what_has_no_weight_at_first": {
        "finite = np.where(np.isneginf(new), 0, new)": "finite = new",
    },
    "test_logarithms_of_rows_and_columns[ExponentialOfProduct()]": {
        "kind.logarithm(distances(block, kind))": "kind.logarithm(distances(block))",
    },
    "test_sums_and_gradients_of_each_kind": {
        "[..., None] - weights @ y)": "[..., None] + weights @ y)",
    },
}
