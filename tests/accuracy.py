"""The measure of all results: float64, and twice the error of the plain formula in the dtype under test."""

import ml_dtypes
import numpy as np

import numbattn as na
from numbattn import reference
from numbattn.call.tangents import checked_tangents, parts_of
from numbattn.masks import as_mask
from numbattn.scores import as_parts, sink_of


def random(rng, shape, dtype):
    return rng.standard_normal(shape).astype(dtype)


def to_numpy(x):
    return x if isinstance(x, np.ndarray) else x.get()


def assert_equal(got, want):
    """Bit for bit; for arrays of NumPy and of CuPy."""
    np.testing.assert_array_equal(to_numpy(got), to_numpy(want))


def differentiated(score):
    """The arrays of a score that have a gradient."""
    return [x for part in score for x, wanted in zip(part._weights, part._wanted) if wanted]


def present(gradients):
    return [x for x in gradients if x is not None]


def plain(do, q, k, v, dlse=None, work=None, of_dS=None, **options):
    """o, lse, dq, dk, dv and the gradients of the score's arrays by the plain formula.

    S and P are in float32 (float64 for float64), P and the results rounded. With work = longdouble nothing is rounded.
    of_dS: applied before the score's arrays get their sums of it, which are not rounded then.
    """
    problem, inputs = reference.describe(q, k, v, **options)
    dtype = problem.dtype if work is None else work
    work = problem.sum_dtype if work is None else work
    Q, K, V, P, Z, lse, scores = _scores(problem, inputs, work)
    seen = np.isfinite(lse)[..., None]
    dO = do.astype(work).reshape(*lse.shape, problem.head_dim_v)
    dL = 0 if dlse is None else np.where(seen, dlse.astype(work).reshape(*lse.shape, 1), 0)
    rounded = (P * Z).astype(dtype).astype(work)
    dP = (dO @ V.swapaxes(-2, -1)) * Z
    delta = (P * dP).sum(-1, keepdims=True) - dL
    dS = P * (dP - delta)
    of_score = []
    for part, S in reversed(list(zip(inputs.score, scores))):
        if part._wants_gradient:
            terms = (dS, delta[..., 0]) if of_dS is None else (of_dS(dS), of_dS(delta)[..., 0])
            of_score[:0] = present(part._gradients(part._gradient(terms[0], lse, terms[1], S)))
        with np.errstate(invalid="ignore"):
            dS = np.where(dS == 0, 0, dS * part._derivative(S))
    arrays = differentiated(inputs.score)
    if of_dS is None:
        of_score = [dx.astype(x.dtype if dtype == problem.dtype else dtype) for dx, x in zip(of_score, arrays)]
    scale = np.asarray(inputs.scale, work)
    grads = scale * (dS @ K), scale * (dS.swapaxes(-2, -1) @ Q), rounded.swapaxes(-2, -1) @ dO
    grads = [reference.sum_to(dX, x.shape).astype(dtype) for dX, x in zip(grads, (q, k, v))]
    return (rounded @ V).reshape(problem.out_shape).astype(dtype), lse.reshape(problem.lse_shape), *grads, *of_score


def _scores(problem, inputs, work):
    Q, K, V = (reference._heads(x, problem).astype(work) for x in (inputs.q, inputs.k, inputs.v))
    shape = (*problem.batch, problem.seqlen_q, problem.seqlen_k)
    visible = np.broadcast_to(inputs.mask.dense(*shape[-2:]), shape).reshape(*Q.shape[:-1], problem.seqlen_k)
    Q = np.where(visible.any(-1)[..., None], Q, 0)
    K, V = (np.where(visible.any(-2)[..., None], X, 0) for X in (K, V))
    S, scores = (Q @ K.swapaxes(-2, -1)) * np.asarray(inputs.scale, work), []
    for part in inputs.score:
        scores.append(S)
        S = np.where(visible, part._applied(S), 0)
    S = np.where(visible, S, -np.inf)
    seen = ~np.isneginf(S).all(-1, keepdims=True)
    m = np.where(seen, S.max(-1, keepdims=True, initial=-np.inf), 0)
    sink = sink_of(inputs.score)
    logits = -np.inf if sink is None else sink._logits(m[..., 0])[..., None]
    m = np.maximum(m, logits)
    E = np.exp(S - m)
    l = np.where(seen, E.sum(-1, keepdims=True) + np.exp(logits - m), 1)
    Z = 1
    if inputs.dropout is not None:
        Z = (na.dropout_mask(inputs.dropout, shape).reshape(S.shape) * inputs.dropout.scale).astype(work)
    return Q, K, V, E / l, Z, np.where(seen, m + np.log(l), -np.inf)[..., 0], scores


def exact(do, q, k, v, dlse=None, **options):
    """As `plain`, in float64, or in what is better for float64."""
    if q.dtype == np.float64:
        return plain(do, q, k, v, dlse, work=np.longdouble, **options)
    grads = reference.attention_backward(do, q, k, v, dlse=dlse, **options)
    of_score = [x for x in grads.score if x is not None]
    return *reference.attention_forward(q, k, v, **options), *grads, *of_score


def assert_accurate(name, got, want, other, dtype, bits=4, largest=None):
    """Relative RMS and largest error at most twice the plain formula's, give or take some last bits of the largest."""
    largest = np.abs(want).max(initial=0, where=np.isfinite(want)) if largest is None else largest
    assert got.shape == want.shape, name
    got, want, other = (np.asarray(x, np.longdouble) for x in (got, want, other))
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite], err_msg=name)
    got, want, other = got[finite], want[finite], other[finite]
    if not want.size:
        return
    assert np.isfinite(got).all(), f"{name}: not finite"
    rounding = bits * float(ml_dtypes.finfo(dtype).eps) * largest
    for what, size in (("RMS", lambda e: np.sqrt(np.mean(e**2))), ("largest", lambda e: np.abs(e).max())):
        ours, theirs = size(got - want), size(other - want)
        assert ours <= 2 * theirs + rounding, f"{name}: {what} error {ours:.3g}, plain formula {theirs:.3g}"


def check(q, k, v, rng, xp=np, bits=4, deterministic=False, **options):
    """Forward and gradients of one call on arrays of xp, with a gradient of lse, against NumPy's float64.

    Returns o, lse and the gradients as NumPy arrays.
    """
    q, k, v = map(xp.asarray, (q, k, v))
    o, saved = na.attention_forward(q, k, v, **options)
    assert o.dtype == q.dtype
    assert saved.lse.dtype == saved.problem.sum_dtype
    do, dlse = random(rng, o.shape, q.dtype), random(rng, saved.lse.shape, saved.lse.dtype)
    grads = na.attention_backward(xp.asarray(do), saved, dlse=xp.asarray(dlse), deterministic=deterministic)
    for grad, x in zip(grads, (q, k, v)):
        assert grad.dtype == x.dtype
    assert len(grads.score) == sum(len(part._weights) for part in saved.inputs.score)
    arrays, of_score = differentiated(saved.inputs.score), [x for x in grads.score if x is not None]
    for grad, x in zip(of_score, arrays, strict=True):
        assert (grad.dtype, grad.shape) == (x.dtype, x.shape)
    results = o, saved.lse, *grads, *of_score
    assert all(isinstance(x, xp.ndarray) for x in results)
    o, lse, *grads = map(to_numpy, results)
    options["mask"] = as_mask(options.get("mask"))._like(do)
    assert_all_accurate((o, lse, *grads), do, *map(to_numpy, (q, k, v)), dlse, bits, **options)
    return o, lse, grads


def assert_all_accurate(results, do, q, k, v, dlse, bits=4, **options):
    """o, lse, dq, dk, dv and the gradients of the score's arrays, all of NumPy."""
    o, lse, *_ = results
    call, arrays = (do, q, k, v, dlse), differentiated(as_parts(options.get("score")))
    wanted, others = exact(*call, **options), plain(*call, **options)
    names = "o", "lse", "dq", "dk", "dv", *(f"gradient {i} of score" for i in range(len(arrays)))
    coarser = [max(x.dtype, lse.dtype, key=lambda dtype: ml_dtypes.finfo(dtype).eps) for x in arrays]
    dtypes = o.dtype, lse.dtype, *[o.dtype] * 3, *coarser
    # sums, over a batch or for an array in a score, may cancel: what counts is how large their terms are
    lead, terms = np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v))), [None] * 5
    if any(x.shape[:-3] != lead for x in (q, k, v)):
        whole = [np.broadcast_to(x, (*lead, *x.shape[-3:])) for x in (q, k, v)]
        terms[2:] = [abs(x).max(initial=0) for x in plain(do, *whole, dlse, **options)[2:5]]
    terms += [abs(x).max(initial=0) for x in plain(*call, of_dS=abs, **options)[5:]] if arrays else []
    for name, dtype, largest, *pair in zip(names, dtypes, terms, results, wanted, others, strict=True):
        assert_accurate(name, *pair, dtype, bits, largest)


# ------------------------------------------------------------------------------------------------------------ tangents
def plain_forward_tangents(q, k, v, tq, tk, tv, **options):
    """to and tlse by the plain formula: P and P tS are rounded."""
    do = np.zeros(reference.describe(q, k, v)[0].out_shape, q.dtype)
    return plain_tangents(do, q, k, v, tq, tk, tv, **options)[:2]


def plain_backward_tangents(*arrays, **options):
    """tdq, tdk and tdv by the plain formula."""
    return plain_tangents(*arrays, **options)[2:5]


def exact_backward_tangents(do, q, *arrays, **options):
    """The same in float64, or in what is better for float64."""
    if q.dtype == np.float64:
        return plain_backward_tangents(do, q, *arrays, work=np.longdouble, **options)
    return reference.attention_backward_jvp(do, q, *arrays, **options)


def plain_tangents(
    do, q, k, v, tq, tk, tv, tdo=None, dlse=None, tdlse=None, tscore=(), work=None, of_dS=np.asarray, **options
):  # fmt: skip
    """to, tlse and the tangents of dq, dk, dv and of the gradients of the score's arrays, by the plain formula, in one
    direction: P, P tS, tP and the results are rounded. work, of_dS: as in `plain`."""
    problem, inputs = reference.describe(q, k, v, **options)
    tangents, _ = checked_tangents(inputs, tq, tk, tv, tscore)
    dtype, work = (problem.dtype, problem.sum_dtype) if work is None else (work, work)
    Q, K, V, P, Z, lse, scores = _scores(problem, inputs, work)
    seen = np.isfinite(lse)[..., None]

    def rounded(x):
        return x.astype(dtype).astype(work)

    def wide(x, like, keep=True):
        return np.zeros_like(like) if x is None else np.where(keep, reference._heads(x[0], problem).astype(work), 0)

    def rows(x, columns):
        return work(0) if x is None else np.where(seen, x.astype(work).reshape(*lse.shape, columns), 0)

    work, keys = np.dtype(work).type, P.any(-2)[..., None]
    tQ, tK, tV = wide(tangents.q, Q, seen), wide(tangents.k, K, keys), wide(tangents.v, V, keys)
    scale, parts = work(inputs.scale), parts_of(inputs, tangents, 0)
    tS, slopes, tlse = scale * (tQ @ K.swapaxes(-2, -1) + Q @ tK.swapaxes(-2, -1)), [], 0
    with np.errstate(invalid="ignore"):
        for part, tpart, S in zip(inputs.score, parts, scores):
            slopes.append((part._derivative(S), part._curvature(S) * tS))
            tS = np.where(P > 0, part._derivative(S) * tS if tpart is None else tpart._applied(tS), 0)
    for part, tpart in zip(inputs.score, parts):
        if tpart is not None and not part._has_step:
            of_sink = np.where(seen, part._logits(lse)[..., None] - lse[..., None], -np.inf)
            tlse = np.exp(of_sink) * tpart._logits(lse)[..., None]
    tlse = (P * tS).sum(-1, keepdims=True) + tlse
    O, tP = rounded(P * Z) @ V, P * (tS - tlse)
    tO = rounded(P * Z) @ tV + rounded(P * Z * tS) @ V - tlse * O

    dO, tdO, dL, tdL = (rows(*x) for x in ((do, O.shape[-1]), (tdo, O.shape[-1]), (dlse, 1), (tdlse, 1)))
    dP, tdP = Z * (dO @ V.swapaxes(-2, -1)), Z * (dO @ tV.swapaxes(-2, -1) + (tdO + 0 * O) @ V.swapaxes(-2, -1))
    D, tD = (dO * O).sum(-1, keepdims=True) - dL, (tdO * O + dO * tO).sum(-1, keepdims=True) - tdL
    dS, tdS, of_score = P * (dP - D), tP * (dP - D) + P * (tdP - tD), []
    tdV = rounded(Z * tP).swapaxes(-2, -1) @ dO + rounded(P * Z).swapaxes(-2, -1) @ (tdO + 0 * O)
    for part, tpart, (slope, bend) in reversed(list(zip(inputs.score, parts, slopes))):
        if part._wants_gradient:
            logits = 0 if tpart is None or part._has_step else tpart._logits(lse)[..., None]
            of_score[:0] = [part._gradient(of_dS(tdS), lse, of_dS((logits - tlse) * D + tD)[..., 0])]
        with np.errstate(invalid="ignore"):
            tdS, dS = (np.where(P > 0, x, 0) for x in (slope * tdS + bend * dS, slope * dS))
    tdQ = scale * (tdS @ K + dS @ tK)
    tdK = scale * (tdS.swapaxes(-2, -1) @ Q + dS.swapaxes(-2, -1) @ tQ)
    grads = [reference.sum_to(dX, x.shape).astype(dtype) for dX, x in zip((tdQ, tdK, tdV), (q, k, v))]
    arrays = differentiated(inputs.score)
    of_score = [dx.astype(x.dtype if dtype == problem.dtype else dtype) for dx, x in zip(of_score, arrays)]
    return tO.reshape(problem.out_shape).astype(dtype), tlse.reshape(problem.lse_shape), *grads, *of_score


def check_tangents(q, k, v, rng, xp=np, bits=8, tscore=(), dlse=True, deterministic=True, **options):
    """The tangents of one call and of its gradients in one direction, all tangents given, against float64, or
    long doubles for float64.

    Returns to, tlse and the tangents of the gradients as NumPy arrays.
    """
    tq, tk, tv = (random(rng, x.shape, x.dtype) for x in (q, k, v))
    o, to, saved, tsaved = na.attention_forward_jvp(*map(xp.asarray, (q, k, v, tq, tk, tv)), tscore=tscore, **options)
    do, tdo = random(rng, o.shape, q.dtype), random(rng, o.shape, q.dtype)
    rows = {x: random(rng, tsaved.tlse.shape, tsaved.tlse.dtype) for x in ("dlse", "tdlse") if dlse}
    on_device = {name: xp.asarray(x) for name, x in {"tdo": tdo, **rows}.items()}
    grads, tgrads = na.attention_backward_jvp(xp.asarray(do), saved, tsaved, deterministic=deterministic, **on_device)
    if deterministic:
        first = na.attention_backward(xp.asarray(do), saved, dlse=on_device.get("dlse"), deterministic=True)
        for grad, x in zip(grads, first):
            assert_equal(grad, x)
    results = to, tsaved.tlse, *tgrads, *(x for x in tgrads.score if x is not None)
    assert all(isinstance(x, xp.ndarray) for x in results)
    results = [*map(to_numpy, results)]
    options["mask"] = as_mask(options.get("mask"))._like(do)
    call = do, q, k, v, tq, tk, tv, tdo
    work = np.longdouble if q.dtype == np.float64 else np.float64
    wanted = plain_tangents(*call, **rows, tscore=tscore, work=work, **options)
    others = plain_tangents(*call, **rows, tscore=tscore, **options)
    names = "to", "tlse", "tdq", "tdk", "tdv", *(f"gradient {i} of score" for i in range(len(results) - 5))
    terms = plain_tangents(*call, **rows, tscore=tscore, of_dS=abs, **options)[5:] if wanted[5:] else ()  # may cancel
    largest = *[None] * 5, *(abs(x).max(initial=0) for x in terms)
    for name, got, want, other, size in zip(names, results, wanted, others, largest, strict=True):
        assert got.dtype == other.dtype
        assert_accurate(name, got, want, other, got.dtype, bits, size)
    return results
