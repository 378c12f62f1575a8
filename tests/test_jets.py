"""Tangents, gradients of gradients and Laplacians, on NumPy and on CuPy arrays."""

import copy
import itertools
import math
import pickle

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn import reference

from .accuracy import assert_equal, check_tangents, present, random, to_numpy

M, N = 150, 270  # several tiles, with tails
MASKS = {
    "all": lambda rng: None,
    "causal": lambda rng: na.Causal(),
    "lengths": lambda rng: na.Lengths(keys=np.array([[200], [0]]), queries=np.array([[140], [7]])),
    "segments": lambda rng: na.Segments([0, 40, 40, 150], [0, 100, 120, 270]) & na.Causal(),
    "dense": lambda rng: na.Dense(rng.random((2, 1, M, N)) < 0.3),
}
SCORES = {  # the parts, and the tangents of their arrays
    "none": lambda rng: ([], []),
    "bias": lambda rng: ([na.Bias(rng.standard_normal((2, M, N)))], [rng.standard_normal((2, M, N))]),
    "linear": lambda rng: (
        [na.Alibi(rng.random(2)), na.RelativeBias(rng.standard_normal((2, 33))), na.Bias(rng.standard_normal(N))],
        [rng.random(2), rng.standard_normal((2, 33)), None],
    ),
    "bent": lambda rng: (
        [na.Bias(rng.standard_normal((M, 1))), na.Softcap(1.5), na.Alibi(rng.random(2)), na.Sink(rng.random(2))],
        [rng.standard_normal((M, 1)), rng.random(2), rng.random(2)],
    ),
}


def qkv(rng, dtype=np.float64, heads_k=1, m=M, n=N, d=8, e=8):
    shapes = (2, 2, m, d), (2, heads_k, n, d), (2, heads_k, n, e)
    return [random(rng, shape, dtype) for shape in shapes]


def like(rng, *arrays):
    return [rng.standard_normal(x.shape).astype(x.dtype) for x in arrays]


def small(rng, m=6, n=7):
    """q, k, v, and an argument of each kind."""
    q, k, v = rng.standard_normal((2, m, 3)), rng.standard_normal((1, n, 3)), rng.standard_normal((2, n, 4))
    bias, logits = rng.standard_normal((2, m, n)), rng.standard_normal(2)
    options = {"mask": na.Causal() & na.Lengths(queries=m - 1), "dropout": na.Dropout(0.2, 3), "scale": 0.7}
    return (q, k, v), (bias, logits), options


def score_of(bias, logits):
    return [na.Bias(bias), na.Softcap(2.0), na.Sink(logits)]


# ----------------------------------------------------------------------------------------------------------- accuracy
@pytest.mark.parametrize("dropout", [None, na.Dropout(0.3, seed=5)], ids=["", "dropout"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(rng, xp, mask, dropout):
    check_tangents(*qkv(rng), rng, xp, mask=MASKS[mask](rng), dropout=dropout)


@pytest.mark.parametrize("score", SCORES)
def test_scores(rng, xp, score):
    score, tscore = SCORES[score](rng)
    options = {"score": score, "tscore": tscore, "mask": na.Causal(), "dropout": na.Dropout(0.3, 5)}
    check_tangents(*qkv(rng, heads_k=2), rng, xp, **options)


FUNCTIONS = {  # derivatives follow from the function, the second one from the first, or all are given
    "alone": na.Score(lambda s, batch, head, i, j: s * math.tanh(s) + (s * (i - j) / 9 if i != 2 * j else -math.inf)),
    "with a derivative": na.Score(lambda s, batch, head, i, j: s * s / 4, lambda s, batch, head, i, j: s / 2),
    "with both": na.Score(lambda s, batch, head, i, j: s**3 / 9, lambda s, batch, head, i, j: s * s / 3, (),
                          lambda s, batch, head, i, j: 2 * s / 3),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(rng, xp, name):
    check_tangents(*qkv(rng, m=12, n=17), rng, xp, score=[FUNCTIONS[name], na.Softcap(3.0)])


def looked_up(s, batch, head, i, j, x, kind, y):
    return s * math.sin(x[i] * s) * x[j + 1] + y[head, kind[j]] ** 2 * x[i] if i != 2 else -math.inf


def derivative_of_looked_up(s, batch, head, i, j, x, kind, y):
    return (math.sin(x[i] * s) + s * x[i] * math.cos(x[i] * s)) * x[j + 1]


def product_of(s, batch, head, i, j, x):
    return s + x[i] * x[j]


@pytest.mark.parametrize("derivative", [None, derivative_of_looked_up])
def test_functions_of_arrays(rng, xp, derivative):
    """Tangents of arrays and of their gradients are finite differences; along several directions, in one of which the
    arrays stay as they are."""
    (q, k, v), _, options = small(rng)
    kind, (x, y, z, bias) = np.arange(7) % 3, [rng.standard_normal(shape) for shape in (8, (2, 3), 7, 7)]

    def score_of(x, y, z, bias):
        return [na.Score(product_of, arrays=[z], gradient=True), na.Bias(bias), na.Softcap(2.0),
                na.Score(looked_up, derivative, arrays=[x, xp.asarray(kind), y], gradient=True)]  # fmt: skip

    do, dlse, *given = map(xp.asarray, (rng.standard_normal((2, 6, 4)), rng.standard_normal((2, 6)), q, k, v, x, y, z,
                                        bias))  # fmt: skip
    tangents = [xp.asarray(np.stack(like(rng, a, a))) for a in (q, k, v, x, y, z, bias)]
    for tangent in tangents[3:]:
        tangent[1] = 0
    q, k, v, *arrays = given
    tx, ty, tz, tbias = tangents[3:]

    def at(h, number):
        q, k, v, *arrays = (a + h * t[number] for a, t in zip(given, tangents))
        o, saved = na.attention_forward(q, k, v, **options | {"score": score_of(*arrays)})
        grads = na.attention_backward(do, saved, dlse=dlse)
        found = map(to_numpy, (o, saved.lse, *grads, *present(grads.score)))
        return [np.where(np.isfinite(a), a, 0) for a in found]

    options["score"], tscore = score_of(*arrays), [tz, tbias, tx, None, ty]
    _, to, saved, tsaved = na.attention_forward_jvp(q, k, v, *tangents[:3], tscore=tscore, **options)
    grads, tgrads = na.attention_backward_jvp(do, saved, tsaved, dlse=dlse)
    assert [x is None for x in tgrads.score] == [x is None for x in grads.score]
    for number in range(2):
        wanted = [(ahead - behind) / 2e-5 for ahead, behind in zip(at(1e-5, number), at(-1e-5, number))]
        for got, want in zip((to, tsaved.tlse, *tgrads, *present(tgrads.score)), wanted, strict=True):
            np.testing.assert_allclose(to_numpy(got[number]), want, rtol=1e-6, atol=1e-6 * abs(want).max())
    one = [x[1] for x in tangents[:3]]
    _, to, saved, tsaved = na.attention_forward_jvp(q, k, v, *one, **options)       # no tangents of arrays at all
    _, alone = na.attention_backward_jvp(do, saved, tsaved, dlse=dlse)
    for got, want in zip(present(alone.score), present(tgrads.score), strict=True):
        np.testing.assert_allclose(to_numpy(got), to_numpy(want[1]), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("d", "e"), [(64, 64), (24, 40)])
def test_dtypes(rng, xp, dtype, d, e):
    check_tangents(*qkv(rng, dtype, heads_k=2, d=d, e=e), rng, xp, causal=True)


@pytest.mark.parametrize("mask", [
    na.Causal(), na.Lengths(np.array([[650, 700], [0, 77]]), np.array([[200, 130], [9, 50]])) & na.Window(99, 40),
    na.Segments([0, 90, 200], [0, 330, 700]),
], ids=["causal", "lengths", "segments"])  # fmt: skip
@pytest.mark.parametrize("d", [64, 100])
def test_sums_in_no_fixed_order(rng, xp, d, mask):
    """As some GPUs add up tdq, unless it is to be deterministic."""
    arrays = qkv(rng, ml_dtypes.bfloat16, m=200, n=700, d=d, e=d)
    check_tangents(*arrays, rng, xp, mask=mask, deterministic=False)


# ---------------------------------------------------------------------------------------------------------- definition
def test_tangents_are_finite_differences(rng, xp):
    """Of o, lse and gradients by the public functions, along all arguments at once, in float64."""
    arrays, of_score, options = small(rng)
    do, dlse = rng.standard_normal((2, 6, 4)), rng.standard_normal((2, 6))
    given = [*arrays, *of_score, do, dlse]
    tangents = like(rng, *given)

    def at(h):
        q, k, v, *parts, do, dlse = (xp.asarray(x + h * tx) for x, tx in zip(given, tangents))
        o, saved = na.attention_forward(q, k, v, **options | {"score": score_of(*parts)})
        grads = na.attention_backward(do, saved, dlse=dlse)
        return [to_numpy(x) for x in (o, saved.lse, *grads, *grads.score)]

    q, k, v, *parts, do, dlse = map(xp.asarray, given)
    tq, tk, tv, *tparts, tdo, tdlse = map(xp.asarray, tangents)
    options["score"] = score_of(*parts)
    o, to, saved, tsaved = na.attention_forward_jvp(q, k, v, tq, tk, tv, tscore=tparts, **options)
    _, tgrads = na.attention_backward_jvp(do, saved, tsaved, tdo=tdo, dlse=dlse, tdlse=tdlse)
    h = 1e-5
    with np.errstate(invalid="ignore"):
        wanted = [(ahead - behind) / (2 * h) for ahead, behind in zip(at(h), at(-h))]
    wanted[1] = np.where(np.isfinite(to_numpy(saved.lse)), wanted[1], 0)
    for got, want in zip((to, tsaved.tlse, *tgrads, *tgrads.score), wanted, strict=True):
        np.testing.assert_allclose(to_numpy(got), want, rtol=1e-6, atol=1e-6 * abs(want).max())


def test_forward_and_reverse_agree(rng, xp):
    """<to, do> + <tlse, dlse> = <t, grads>, arrays of the score included."""
    arrays, of_score, options = small(rng)
    arrays, of_score, tangents, tscore = (
        [*map(xp.asarray, x)] for x in (arrays, of_score, like(rng, *arrays), like(rng, *of_score))
    )  # fmt: skip
    score = score_of(*of_score)
    o, to, saved, tsaved = na.attention_forward_jvp(*arrays, *tangents, tscore=tscore, score=score, **options)
    np.testing.assert_allclose(to_numpy(o), to_numpy(na.attention(*arrays, score=score, **options)), rtol=1e-12)
    do, dlse = map(xp.asarray, like(rng, o, saved.lse))
    grads = na.attention_backward(do, saved, dlse=dlse)
    left = (to * do).sum() + (tsaved.tlse * dlse).sum()
    right = sum((x * y).sum() for x, y in zip((*tangents, *tscore), (*grads, *grads.score), strict=True))
    assert float(left) == pytest.approx(float(right), rel=1e-12)


def test_hessians_are_symmetric(rng, xp):
    """u.H v = v.H u, and backprop2 is the same product."""
    arrays, of_score, options = small(rng)
    q, k, v, bias, logits = map(xp.asarray, (*arrays, *of_score))
    options["score"] = score_of(bias, logits)
    one, other = ([*map(xp.asarray, like(rng, q, k, v, bias, logits))] for _ in range(2))
    do, dlse = xp.asarray(rng.standard_normal((2, 6, 4))), xp.asarray(rng.standard_normal((2, 6)))
    found = []
    for x in one, other:
        _, to, saved, tsaved = na.attention_forward_jvp(q, k, v, *x[:3], tscore=x[3:], **options)
        _, tgrads = na.attention_backward_jvp(do, saved, tsaved, dlse=dlse)
        found.append([*tgrads, *tgrads.score])
        _, backprop2 = na.attention_backward_vjp(do, saved, dlse=dlse)
        second = backprop2(*x[:3], ddscore=x[3:])
        for a, b in zip((*second, second.dlse, *second.score), (*tgrads, to, tsaved.tlse, *tgrads.score), strict=True):
            assert_equal(a, b)
    left, right = (sum(float((a * b).sum()) for a, b in zip(x, y)) for x, y in zip((one, other), reversed(found)))
    assert left == pytest.approx(right, rel=1e-11)


def test_gradients_of_gradients(rng, xp):
    """Of the penalty sum(dk**2) + sum(dbias**2), by q and do, against finite differences."""
    (q, k, v), (bias, logits), options = small(rng)
    do = rng.standard_normal((2, 6, 4))

    def vjp(q, do):
        _, backprop = na.attention_vjp(*map(xp.asarray, (q, k, v)), score=score_of(bias, logits), **options)
        return backprop.vjp(xp.asarray(do))

    def penalty(q, do):
        grads, _ = vjp(q, do)
        return float((grads.dk**2).sum() + (grads.score[0] ** 2).sum())

    grads, backprop2 = vjp(q, do)
    second = backprop2(None, 2 * grads.dk, None, ddscore=[2 * grads.score[0], None])
    for name, step in (("gq", (1e-5, 0)), ("gdo", (0, 1e-5))):
        tangents = like(rng, q, do)
        ahead, behind = (penalty(*(x + sign * h * t for x, h, t in zip((q, do), step, tangents))) for sign in (1, -1))
        got = np.vdot(to_numpy(getattr(second, name)), tangents[name == "gdo"])
        assert got == pytest.approx((ahead - behind) / 2e-5, rel=1e-6)


def test_laplacian_by_finite_differences(rng):
    """Along each coordinate, by the values alone, and the tangent of lq, lk, lv and of arrays in the score."""
    arrays, of_score, options = small(rng)
    firsts = [rng.standard_normal((3, *x.shape)) for x in (*arrays, *of_score)]
    seconds, more = like(rng, *arrays, *of_score), {"jscore": firsts[3:], "score": score_of(*of_score)}
    call = *arrays, *firsts[:3], *seconds[:3]
    o, jo, lo = na.attention_laplacian(*call, lscore=seconds[3:], **more, **options)

    def at(h, along):
        q, k, v, *moved = (x + h * t for x, t in zip((*arrays, *of_score), along))
        return na.attention(q, k, v, score=score_of(*moved), **options)

    want = (at(1e-5, seconds) - at(-1e-5, seconds)) / 2e-5
    weights = np.array([-1, 16, -30, 16, -1]) / 12e-6
    for t, along in enumerate(zip(*firsts)):
        want += sum(w * at(h * 1e-3, along) for h, w in zip((-2, -1, 0, 1, 2), weights))
        to = na.attention_jvp(*arrays, *along[:3], tscore=along[3:], score=more["score"], **options)[1]
        np.testing.assert_allclose(jo[t], to, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lo, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(o, at(0, seconds), rtol=1e-12)


@pytest.mark.parametrize("given", ["q", "v", "qk", ""])
def test_a_laplacian_of_some(rng, given):
    """None is zero, and is left out; float32 and several tiles."""
    arrays, options = qkv(rng, np.float32, heads_k=2), {"causal": True, "score": na.Softcap(3.0)}
    firsts = [random(rng, (6, *x.shape), x.dtype) if name in given else None for name, x in zip("qkv", arrays)]
    o, jo, lo = na.attention_laplacian(*arrays, *firsts, None, arrays[1], None, **options)
    assert (o.dtype, jo.dtype, lo.dtype) == (np.float32,) * 3
    wanted = reference.attention_laplacian(*arrays, *firsts, None, arrays[1], None, **options)
    for got, want in zip((o, jo, lo), wanted):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * abs(want).max(initial=0))


# ---------------------------------------------------------------------------------------------------------- directions
@pytest.mark.parametrize("count", [0, 1, 6])
def test_several_tangents_are_as_one_by_one(rng, xp, count):
    arrays, of_score, options = small(rng)
    q, k, v, bias, logits = map(xp.asarray, (*arrays, *of_score))
    options["score"] = score_of(bias, logits)
    tq, tv, tbias, tdo, tdlse = (xp.asarray(rng.standard_normal((count, *x))) for x in
                                 (q.shape, v.shape, bias.shape, (2, 6, 4), (2, 6)))  # fmt: skip
    do, dlse = xp.asarray(rng.standard_normal((2, 6, 4))), xp.asarray(rng.standard_normal((2, 6)))

    def run(tq, tv, tbias, tdo, tdlse):
        _, to, saved, tsaved = na.attention_forward_jvp(q, k, v, tq, None, tv, tscore=[tbias, None], **options)
        _, tgrads = na.attention_backward_jvp(do, saved, tsaved, tdo=tdo, dlse=dlse, tdlse=tdlse)
        _, backprop2 = na.attention_backward_vjp(do, saved)
        second = backprop2(tq, None, tv)
        return to, tsaved.tlse, *tgrads, *tgrads.score, *second, second.dlse, *second.score

    together = run(tq, tv, tbias, tdo, tdlse)
    assert all(len(x) == count for x in together)
    for t in range(count):
        for x, y in zip(together, run(*(x[t] for x in (tq, tv, tbias, tdo, tdlse))), strict=True):
            np.testing.assert_allclose(to_numpy(x[t]), to_numpy(y), rtol=1e-12, atol=1e-14)


def test_no_tangents_are_zero(rng, xp):
    (q, k, v), _, options = small(rng)
    q, k, v = map(xp.asarray, (q, k, v))
    _, to, saved, tsaved = na.attention_forward_jvp(q, k, v, None, None, None, **options)
    _, tgrads = na.attention_backward_jvp(saved.o, saved, tsaved)
    for x, shape in zip((to, tsaved.tlse, *tgrads), ((2, 6, 4), (2, 6), q.shape, k.shape, v.shape)):
        assert x.shape == shape
        assert not x.any()


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=3))[1:-1])
def test_a_tangent_that_is_not_given_is_zero(rng, xp, given):
    arrays, _, options = small(rng)
    tangents = like(rng, *arrays)
    some = [xp.asarray(x) if there else None for x, there in zip(tangents, given)]
    wholes = [xp.asarray(x * there) for x, there in zip(tangents, given)]
    do = xp.asarray(rng.standard_normal((2, 6, 4)))
    results = []
    for directions in some, wholes:
        _, to, saved, tsaved = na.attention_forward_jvp(*map(xp.asarray, arrays), *directions, **options)
        _, tgrads = na.attention_backward_jvp(do, saved, tsaved)
        results.append([to, tsaved.tlse, *tgrads])
    for x, y in zip(*results):
        np.testing.assert_allclose(to_numpy(x), to_numpy(y), rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------------------------------------------- what is not seen
@pytest.mark.parametrize("nothing", [np.nan, np.inf])
def test_padding_never_leaks(rng, xp, nothing):
    """Into tangents; those of queries that see nothing are 0."""
    q, k, v = qkv(rng, heads_k=2)
    mask = na.Lengths(keys=200, queries=130) & na.Causal(-20)
    arrays, cut = [], []
    for x, end in zip((q, k, v, *like(rng, q, k, v), *like(rng, q, q)), (130, 200, 200) * 2 + (130, 130)):
        y = x.copy()
        y[..., end:, :] = nothing
        arrays.append(xp.asarray(y))
        cut.append(np.where(np.isfinite(y), y, 0))
    *arrays, do, tdo = arrays
    _, to, saved, tsaved = na.attention_forward_jvp(*arrays, mask=mask)
    _, tgrads = na.attention_backward_jvp(do, saved, tsaved, tdo=tdo)
    *cut, do, tdo = cut
    wanted = *reference.attention_jvp(*cut, mask=mask), *reference.attention_backward_jvp(do, *cut, tdo=tdo, mask=mask)
    for got, want in zip((to, tsaved.tlse, *tgrads), wanted, strict=True):
        np.testing.assert_allclose(to_numpy(got), want, rtol=1e-10, atol=1e-12)
    for x in to, tsaved.tlse, tgrads.dq:
        assert not to_numpy(x)[:, :, :20].any()


def test_scores_of_minus_infinity(rng, xp):
    """By a Bias, of whole rows too: no tangents."""
    q, k, v = qkv(rng, heads_k=2)
    bias = np.where(rng.random((2, M, N)) < 0.5, -np.inf, 0.0)
    bias[:, 3] = -np.inf
    results = check_tangents(q, k, v, rng, xp, score=na.Bias(bias, gradient=False), causal=True)
    assert all(np.isfinite(x).all() for x in results)
    assert not results[0][:, :, 3].any()


@pytest.mark.parametrize(("m", "n", "d", "e"), [(0, 5, 3, 4), (5, 0, 3, 4), (5, 6, 0, 4), (5, 6, 3, 0)])
def test_empty_arrays(rng, xp, m, n, d, e):
    q, k, v = (xp.asarray(rng.standard_normal((2, *x))) for x in ((m, d), (n, d), (n, e)))
    _, to, saved, tsaved = na.attention_forward_jvp(q, k, v, q, k, v)
    assert to.shape == (2, m, e)
    _, tgrads = na.attention_backward_jvp(to, saved, tsaved, tdo=to)
    assert [x.shape for x in tgrads] == [x.shape for x in (q, k, v)]
    assert all(np.isfinite(to_numpy(x)).all() for x in tgrads)
    _, jo, lo = na.attention_laplacian(q, k, v, q[None], None, None)
    assert (jo.shape, lo.shape) == ((1, 2, m, e), (2, m, e))


# ------------------------------------------------------------------------------------------------------------- layouts
def test_layouts_and_broadcasting(rng, xp):
    """Tangents lie as they like; 2-D arrays, and keys that a batch shares."""
    shapes = (5, 2, 3), (7, 6), (2, 7, 4), (3, 7), (2, 7, 4)
    q, k, v, tk, tv = (rng.standard_normal(shape) for shape in shapes)
    q, k, tangents = q.swapaxes(0, 1), k[:, ::2], (np.broadcast_to(np.float64(1), (2, 5, 3)), tk.T, tv[:, ::-1])
    wanted = reference.attention_jvp(q, k, v, *tangents)
    _, to, saved, tsaved = na.attention_forward_jvp(*map(xp.asarray, (q, k, v, *tangents)))
    for got, want in zip((to, tsaved.tlse), wanted):
        np.testing.assert_allclose(to_numpy(got), want, rtol=1e-12, atol=1e-13)
    do = rng.standard_normal((2, 5, 4))
    _, tgrads = na.attention_backward_jvp(xp.asarray(do), saved, tsaved)
    for got, want in zip(tgrads, reference.attention_backward_jvp(do, q, k, v, *tangents)):
        np.testing.assert_allclose(to_numpy(got), want, rtol=1e-12, atol=1e-13)


VIEWS = {
    "negative": lambda x: x[..., ::-1],
    "steps": lambda x: x.repeat(2, axis=-1)[..., ::2],
    "Fortran": lambda x: x.T.copy().T,
    "broadcast rows": lambda x: np.broadcast_to(x[..., :1, :], x.shape),
    "broadcast columns": lambda x: np.broadcast_to(x[..., :1], x.shape),
    "the same in all directions": lambda x: np.broadcast_to(x[:1], x.shape),
    "the same, negative": lambda x: np.broadcast_to(x[:1, ..., ::-1], x.shape),  # kernels that read in place copy it
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_several_tangents_lie_as_they_like(rng, xp, view):
    """They, do and dlse give what copies of them give; with groups of heads and in Segments, too."""
    q, k, v = (xp.asarray(rng.standard_normal(x)) for x in ((2, 4, 9, 3), (1, 2, 11, 3), (2, 11, 4)))
    shapes = q.shape, k.shape, v.shape, (5, 7), (2, 4, 9, 4), (2, 4, 9)
    tangents = [view(xp.asarray(rng.standard_normal((5, *x)))) for x in shapes]
    do, dlse = tangents[4][0], tangents[5][0]
    score, mask = na.RelativeBias(xp.asarray(rng.standard_normal((5, 7)))[0]), na.Segments([0, 4, 9], [0, 5, 11])
    options, results = {"score": [na.Softcap(2.0), score], "mask": mask}, []
    for copied in lambda x: x, lambda x: x.copy():
        *tqkv, table, tdo, tdlse = map(copied, tangents)
        _, to, saved, tsaved = na.attention_forward_jvp(q, k, v, *tqkv, tscore=[table[:, 0]], **options)
        rows = {"tdo": tdo, "dlse": copied(dlse), "tdlse": tdlse, "deterministic": True}
        _, tgrads = na.attention_backward_jvp(copied(do), saved, tsaved, **rows)
        found = na.attention_laplacian(q, k, v, *tqkv, *[x[1] for x in tqkv], **options)
        results.append([to, tsaved.tlse, *tgrads, *tgrads.score, *found])
    for x, y in zip(*results):
        np.testing.assert_allclose(to_numpy(x), to_numpy(y), rtol=1e-12, atol=1e-13)


def test_all_may_share_memory(rng, xp):
    x = xp.asarray(rng.standard_normal((3, 2, 6, 4)))
    results = []
    for copied in lambda x: x, lambda x: x.copy():
        q, k, v, do, *tangents = map(copied, (x[0], x[0], x[0], x[0], x, x[::-1], x))
        _, to, saved, tsaved = na.attention_forward_jvp(q, k, v, *tangents)
        _, tgrads = na.attention_backward_jvp(do, saved, tsaved, tdo=tangents[0], deterministic=True)
        results.append([to, *tgrads, *na.attention_laplacian(q, k, v, *tangents, q, k, v)])
    for x, y in zip(*results):
        np.testing.assert_allclose(to_numpy(x), to_numpy(y), rtol=1e-12, atol=1e-13)


def test_packed_sequences_are_as_separate(rng, xp):
    offsets = [0, 30, 30, 90, 150]
    q, k, v, tq, tk, tv, do = rng.standard_normal((7, 2, 150, 8))
    options = {"causal": True}

    def run(rows, mask):
        given = (xp.asarray(x[:, rows]) for x in (q, k, v, tq, tk, tv))
        _, to, saved, tsaved = na.attention_forward_jvp(*given, mask=mask, **options)
        _, tgrads = na.attention_backward_jvp(xp.asarray(do[:, rows]), saved, tsaved)
        return [to_numpy(x) for x in (to, *tgrads)]

    packed = run(slice(None), na.Segments(offsets))
    for first, end in itertools.pairwise(offsets):
        for x, y in zip(packed, run(slice(first, end), None)):
            np.testing.assert_allclose(x[:, first:end], y, rtol=1e-10, atol=1e-12)


def test_second_gradients_are_a_named_tuple(rng):
    q, k, v, do = rng.standard_normal((4, 6, 4))
    o, backprop = na.attention_vjp(q, k, v, score=na.Alibi(0.1))
    grads, backprop2 = backprop.vjp(do)
    second = backprop2(q, None, None)
    assert [getattr(second, name) is x for name, x in zip(second._fields, second)] == [True] * 4
    assert isinstance(second.score[0], np.ndarray)      # of no axes, as the slope
    for same in (copy.deepcopy(second), pickle.loads(pickle.dumps(second))):
        assert isinstance(same, na.SecondGradients)
        for x, y in zip((*same, same.dlse, *same.score), (*second, second.dlse, *second.score), strict=True):
            np.testing.assert_array_equal(x, y)
    named = "gq=1, gk=2, gv=3, gdo=4, dlse=5, score=(6,)"
    assert repr(na.SecondGradients(1, 2, 3, 4, 5, (6,))) == f"SecondGradients({named})"
