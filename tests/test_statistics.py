"""Statistics of P, of random problems and of known ones, within what rounding explains; gradients by differences."""

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from numbattn.base.checks import DTYPES, dtype_of_sums
from numbattn.call.problem import without_v
from tests.accuracy import assert_equal, to_numpy

from .problems import LIMITS, Problem
from .rounding import finite, rounding_of_weights

ALL = {"column_sums": True, "row_max": True, "entropy": True}


def errors(q, k, weights, **options):
    """The largest errors of column_sums, row_max, entropy and lse that rounding explains."""
    problem, inputs = reference.describe(q, k, without_v(q, k, options["mask"], options["score"]), **options)
    x = rounding_of_weights(problem, inputs)
    seen = x.P > 0
    S = np.where(seen, finite(x.scores[-1]), 0)
    of_S = np.where(seen, x.S_error, 0) + x.eps * abs(S)
    of_lse, P_error = x.lse_error, x.P_error + x.eps * x.P
    of_entropy = (P_error * (1 + abs(S - x.lse)) + x.P * (of_S + of_lse)).sum(-1) + of_lse[..., 0]
    w = 1 if weights is None else abs(weights.astype(float)).reshape(x.P.shape[:-1])[..., None]
    by_row = of_S.max(-1, initial=0), of_entropy + x.eps * (1 + abs(x.lse[..., 0])), x.lse_error[..., 0]
    by_column = ((P_error + x.eps * x.P) * np.where(np.isfinite(w), w, 0)).sum(-2)
    return by_column.reshape(*problem.batch, problem.seqlen_k), *(each.reshape(problem.lse_shape) for each in by_row)


def assert_close(got, want, most):
    for name, x, exact, error in zip(got._fields, got, want, most):
        x = to_numpy(x).astype(float)
        with np.errstate(invalid="ignore"):
            right = (x == exact) | (abs(x - exact) <= 4 * error)
        assert right.all(), (name, np.argwhere(~right)[:3], x[~right][:3], exact[~right][:3], error[~right][:3])


def check(q, k, weights=None, xp=np, **options):
    """All statistics, and each alone."""
    q_, k_, w_ = (x if x is None else xp.asarray(x) for x in (q, k, weights))
    found = na.attention_statistics(q_, k_, **ALL, weights=w_, **options)
    options = {"causal": False, "mask": None, "scale": None, "score": None, **options}
    assert all(x.dtype == dtype_of_sums(q.dtype) for x in found)
    with np.errstate(all="ignore"):
        want = reference.attention_statistics(q, k, weights=weights, **options)
        assert_close(found, want, errors(q, k, weights, **options))
    return found


def draw(number, limit=LIMITS["cpu"]):
    """q, k and options of a random problem."""
    problem = Problem(11, number, limit)
    options = problem.options | {}
    options.pop("dropout")
    q, k, _ = problem.arrays
    return q, k, options


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (10, 20, 30))])
def test_random_problems(first):
    for number in range(first, first + 10):
        q, k, options = draw(number)
        check(q, k, **options)


OPTIONS = {
    "nothing": {},
    "causal": {"causal": True},
    "window": {"mask": na.Window(20, 3) & na.Lengths([[50], [0]])},
    "score": {"score": [na.Softcap(5.0), na.Alibi([0.1, 0.2, 0.3, 0.4]), na.Sink(1.0)]},
    "drawn": {"mask": np.random.default_rng(5).random((70, 90)) < 0.02},
    "packed": {"mask": na.Segments([0, 20, 20, 60], [0, 30, 40, 90]) & na.Causal()},
}


def drawn(rng, dtype, m=70, n=90, d=16):
    q, k = rng.standard_normal((2, 4, m, d)).astype(dtype), (2 * rng.standard_normal((2, 2, n, d))).astype(dtype)
    return q, k, rng.standard_normal((2, 4, m)).astype(dtype_of_sums(np.dtype(dtype)))


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_known_problems(rng, xp, dtype, kind):
    q, k, weights = drawn(rng, dtype)
    check(q, k, weights, xp=xp, **OPTIONS[kind])


def test_long_rows(rng):
    """Of several tiles, and so many queries that sums lose digits if they are added one by one."""
    q, k, weights = drawn(rng, np.float32, m=1500, n=1300)
    check(q, k, abs(weights), causal=True)


def test_extremes():
    """A row that is one key's, rows of equal scores, scores of 1e4."""
    q, k = np.zeros((3, 2)), np.zeros((8, 2))
    q[1], q[2], k[3] = [1, 0], [1e4, 0], [1, 0]
    found = na.attention_statistics(q, k, **ALL, scale=1.0)
    np.testing.assert_allclose(found.entropy[[0, 2]], [np.log(8), 0], atol=1e-15)
    np.testing.assert_allclose(found.row_max, [0, 1, 1e4])
    np.testing.assert_allclose(found.column_sums[3], 1 / 8 + np.e / (np.e + 7) + 1)
    found = na.attention_statistics(q, k, **ALL, scale=1.0, score=na.Sink(np.log(8.0)))
    np.testing.assert_allclose(found.entropy[0], np.log(2) / 2 + np.log(16) / 2)
    np.testing.assert_allclose(found.row_max[0], 0)
    found = na.attention_statistics(q, k, **ALL, mask=np.zeros((3, 8), bool), score=na.Sink(1.0))
    for x, nothing in zip(found, (0, -np.inf, 0, -np.inf)):
        assert (x == nothing).all()


@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0), (0, 0)])
def test_empty(xp, m, n):
    found = na.attention_statistics(xp.zeros((2, 4, m, 8)), xp.zeros((2, 2, n, 8)), **ALL)
    assert [x.shape for x in found] == [(2, 4, n), *[(2, 4, m)] * 3]
    for x, nothing in zip(found, (0, -np.inf, 0, -np.inf)):
        assert (x == nothing).all()


@pytest.mark.parametrize("name", ALL)
def test_what_is_asked_for(rng, xp, name):
    """The same bits as with all others, lse besides, and with what was saved."""
    q, k, weights = map(xp.asarray, drawn(rng, np.float32))
    found, every = na.attention_statistics(q, k, **{name: True}), na.attention_statistics(q, k, **ALL)
    assert [x for x in found._fields if getattr(found, x) is not None] == [*[x for x in ALL if x == name], "lse"]
    assert_equal(getattr(found, name), getattr(every, name))
    _, saved = na.attention_forward(q, k, k)
    again = na.attention_statistics(q, k, **{name: True}, saved=saved)
    np.testing.assert_allclose(to_numpy(getattr(again, name)), to_numpy(getattr(every, name)), rtol=1e-5, atol=1e-6)
    if name == "column_sums":
        assert again.lse is saved.lse


def test_on_a_grid(rng):
    """Whose tokens are computed in another order."""
    grid = na.Grid((8, 9)).window(3)
    q, k = rng.standard_normal((2, 2, 72, 8))
    weights = rng.standard_normal((2, 72))
    check(q, k, weights, mask=grid)
    check(q, k, weights, mask=np.asarray(grid.dense(72, 72)))


@pytest.mark.parametrize("held", [np.float32, np.int8, ml_dtypes.bfloat16])
@pytest.mark.parametrize("page_size", [None, 16])
def test_caches(rng, xp, held, page_size):
    """By token, 0 beyond lengths; packed queries, too."""
    q, k, _ = drawn(rng, np.float32 if held == np.int8 else held, m=5)
    q, k = map(xp.asarray, (q, k))
    cache = na.KVCache.zeros(2, 2, 100, 16, like=k, dtype=held, page_size=page_size, head_dim_v=3)
    cache.append(k, k[..., :3])
    cache.truncate([90, 33])
    found = na.attention_statistics(q, cache, **ALL, causal=True)
    keys = xp.asarray(cache._dense()[0])[:, :, :90].astype(q.dtype)
    for b, n in enumerate((90, 33)):
        alone = na.attention_statistics(q[b], keys[b, :, :n], **ALL, causal=True)
        for x, want in zip(found, alone):
            want = to_numpy(want)
            np.testing.assert_allclose(to_numpy(x[b])[..., : want.shape[-1]], want, rtol=1e-4, atol=1e-5)
        assert not found.column_sums[b, :, n:].any()
    packed = xp.asarray(np.concatenate([to_numpy(q)[0, :, :5], to_numpy(q)[1, :, :2]], axis=1))
    mask = na.Segments([0, 5, 7], max_queries=5) & na.Causal()
    few = na.attention_statistics(packed, cache, **ALL, mask=mask)
    assert few.lse.shape == (4, 7)
    assert few.column_sums.shape[:2] == (2, 4)
    for x, want in zip(few[1:], found[1:]):
        np.testing.assert_allclose(to_numpy(x[:, :5]), to_numpy(want[0]), rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["nothing", "cap", "sink", "bias"])
def test_gradients(rng, kind, causal):
    """Of each statistic alone and of all, along random directions of all arrays."""
    x = {"q": rng.standard_normal((2, 4, 30, 8)), "k": rng.standard_normal((2, 2, 40, 8)),
         "weights": rng.standard_normal((2, 4, 30))}  # fmt: skip
    given = {"nothing": {}, "cap": {}, "sink": {"logits": rng.standard_normal(4)},
             "bias": {"bias": rng.standard_normal((4, 30, 40)), "logits": rng.standard_normal(4)}}[kind]  # fmt: skip
    dC, dE, dL = rng.standard_normal((2, 4, 40)), *rng.standard_normal((2, 2, 4, 30))

    def options(x):
        parts = [na.Softcap(3.0), na.Alibi(0.1)] * (kind in ("cap", "sink"))
        parts += [part(x[name]) for name, part in (("bias", na.Bias), ("logits", na.Sink)) if name in x]
        return {"column_sums": True, "entropy": True, "weights": x["weights"], "score": parts, "causal": causal}

    def loss(x, d):
        found = na.attention_statistics(x["q"], x["k"], **options(x))
        lse = np.where(np.isfinite(found.lse), found.lse, 0)
        terms = {"dcolumn_sums": found.column_sums, "dentropy": found.entropy, "dlse": lse}
        return sum((terms[name] * dx).sum() for name, dx in d.items())

    every = {"dcolumn_sums": dC, "dentropy": dE, "dlse": dL}
    found, backprop = na.attention_statistics_vjp(x["q"], x["k"], **options(x | given))
    for want, got in zip(na.attention_statistics(x["q"], x["k"], **options(x | given)), found):
        assert (want is None) == (got is None)
        assert want is None or (want == got).all()
    for d in ({"dcolumn_sums": dC}, {"dentropy": dE}, {"dlse": dL}, every):
        grads = backprop(**d)
        dq, dk = grads
        of_score = dict(zip([*given][::-1], grads.score[::-1]))
        every_dx = {"q": dq, "k": dk, "weights": grads.weights, **of_score}
        for name, dx in every_dx.items():
            along, h = rng.standard_normal(dx.shape), 1e-5
            ahead, behind = (loss({**x, **given, name: {**x, **given}[name] + s * along}, d) for s in (h, -h))
            np.testing.assert_allclose((dx * along).sum(), (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_other_dtypes(rng, xp, dtype):
    """As those in float64; of one matrix, and of heads without a group."""
    for shape in ((30, 8), (3, 30, 8)):
        q, k = rng.standard_normal((2, *shape)).astype(dtype)
        dC, dE = rng.standard_normal((2, *shape[:-1]))

        def gradients(q, k, dC, dE):
            _, backprop = na.attention_statistics_vjp(q, k, column_sums=True, entropy=True)
            return backprop(dcolumn_sums=dC, dentropy=dE)

        sums = dtype_of_sums(np.dtype(dtype))
        got = gradients(*map(xp.asarray, (q, k, dC.astype(sums), dE.astype(sums))))
        want = gradients(*(x.astype(float) for x in (q, k, dC, dE)))
        assert (got.weights, got.score) == (None, ())
        for x, exact in zip(got, want):
            assert x.dtype == dtype
            tolerance = 4 * float(ml_dtypes.finfo(dtype).eps) * abs(exact).max() + (1e-14 if x.dtype == float else 1e-6)
            np.testing.assert_allclose(to_numpy(x).astype(float), exact, atol=tolerance, rtol=0)


@pytest.mark.parametrize("lead", [(), (0,), (2, 0)])
def test_gradients_of_one_matrix_and_of_no_heads(rng, xp, lead):
    """Those of each statistic alone add up."""
    q, k = (xp.asarray(rng.standard_normal((*lead, size, 8))) for size in (5, 7))
    found, backprop = na.attention_statistics_vjp(q, k, column_sums=True, entropy=True)
    d = {"dcolumn_sums": found.column_sums, "dentropy": found.entropy, "dlse": found.lse}
    alone = [backprop(**{name: x}) for name, x in d.items()]
    for x, *parts in zip(backprop(**d), *alone):
        np.testing.assert_allclose(to_numpy(x), sum(map(to_numpy, parts)), atol=1e-14)


# -------------------------------------------------------------------------------------------------------------- errors
Q = np.zeros((2, 5, 4))
SAVED = na.attention_forward(Q, Q, Q)[1]
WRONG = [
    (lambda: na.attention_statistics(Q, Q[..., :3]), ValueError, "k: got head_dim 3, expected 4"),
    (lambda: na.attention_statistics(Q, Q, entropy=1), TypeError, "entropy: got 1, expected True or False"),
    (lambda: na.attention_statistics(Q, Q, dropout=na.Dropout(0.5, 1)), ValueError, "dropout: got .*, expected None"),
    (lambda: na.attention_statistics(Q, Q, weights=Q[..., 0]), ValueError, "weights: got some without column_sums"),
    (lambda: na.attention_statistics(Q, Q, column_sums=True, weights=Q), ValueError,
     r"weights: got the shape \(2, 5, 4\), expected \(2, 5\), the shape of lse"),
    (lambda: na.attention_statistics(Q, Q, column_sums=True, weights=[1.0]), TypeError, "weights: got"),
    (lambda: na.attention_statistics(Q, Q, saved=Q), TypeError, "saved: got .*, expected what attention_forward"),
    (lambda: na.attention_statistics(Q[:, :3], Q, saved=SAVED), ValueError, "saved: got .*, expected that of the same"),
    (lambda: na.attention_statistics(Q, Q, saved=SAVED, causal=True), ValueError,
     "saved: got that of a call with scale 0.5, mask None, score None, expected scale 0.5, mask Causal, score None"),
    (lambda: na.attention_statistics(Q, Q, saved=SAVED, scale=2.0), ValueError, "saved: got .*, expected scale 2,"),
    (lambda: na.attention_statistics(Q, Q, saved=SAVED, score=na.Softcap(1.0)), ValueError, "score Softcap"),
    (lambda: na.attention_statistics_vjp(Q, na.KVCache.zeros(1, 2, 5, 4, like=Q)), TypeError, "k: got a KVCache"),
    (lambda: na.attention_statistics_vjp(Q, Q)[1](dlse=Q), ValueError, r"dlse: got the shape \(2, 5, 4\)"),
    (lambda: na.attention_statistics_vjp(Q, Q)[1](dcolumn_sums=Q), ValueError,
     r"dcolumn_sums: got the shape \(2, 5, 4\), expected \(2, 5\), the shape of column_sums"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_errors(number):
    function, error, words = WRONG[number]
    with pytest.raises(error, match=words):
        function()


FAULTS = {
    "test_known_problems": {
        "if any(by_row) or rows is None": "if rows is None",
    },
    "test_caches": {
        "(row_max, -math.inf), (entropy, 0)": "(entropy, -math.inf), (row_max, 0)",
    },
    ("test_gradients", "test_gradients_of_other_dtypes"): {
        "grads.dq - tgrads.dq[0]": "grads.dq + tgrads.dq[0]",
        "less - sink._gradient(None, saved.lse, -dE)": "less",
        "(o * one_hot).sum(axis=-1)": "o.sum(axis=-1)",
        "isinstance(part, Sink) else None": "False else None",
        "dL if dE is None else dL + dE": "dL",
        "        one_hot = one_hot[0]\n": "        pass\n",
    },
    "test_gradients_of_one_matrix_and_of_no_heads": {
        "like=inputs.q), None\n    group": "like=inputs.q), None[0]\n    group",
    },
    "cpu/statistics.py": {
        ("test_known_problems", "test_extremes", "test_long_rows", "test_random_problems"): {
            "t[i] = alpha * (t[i] + l[i] * change)": "t[i] = alpha * t[i]",
            "(least if x < least else x)": "x",
            "exp(change) * (t[i] + l[i] * change) +": "exp(change) * t[i] +",
            "(p * own if p != 0 else p)": "0",
            "m[i] if l[i] != 0 else -np.inf": "m[i]",
            "np.log(l[i]) - t[i] / l[i] if l[i] != 0 else 0": "np.log(l[i]) - t[i] / l[i]",
        },
    },
    "cpu/column_sums.py": {
        ("test_known_problems", "test_long_rows", "test_random_problems"): {
            "max(first, first_key), min(end, end_key)": "first, end",
            "x if is_seen else np.inf": "x",
            "total[n0 - first_key + j] +=": "total[n0 - first_key + j] =",
            "fill(total, 0)": "pass",
        },
    },
}
