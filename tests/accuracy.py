"""The measure of all results: float64, and twice the error of the plain formula in the dtype under test; of random
problems, of which there are many, what rounding explains, see `rounding`."""

import math

import ml_dtypes
import numpy as np

import numbattn as na
from numbattn import reference
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
    return [x for part in score if part._wants_gradient for x in part._weights]


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
            of_score[:0] = [part._gradient(terms[0], lse, terms[1])]
        with np.errstate(invalid="ignore"):
            dS = np.where(dS == 0, 0, dS * part._derivative(S))
    arrays = differentiated(inputs.score)
    if of_dS is None:
        of_score = [dx.astype(x.dtype if dtype == problem.dtype else dtype) for dx, x in zip(of_score, arrays)]
    scale = np.asarray(inputs.scale, work)
    grads = scale * (dS @ K), scale * (dS.swapaxes(-2, -1) @ Q), rounded.swapaxes(-2, -1) @ dO
    grads = [reference.sum_to(dX, x.shape).astype(dtype) for dX, x in zip(grads, (q, k, v))]
    return (rounded @ V).reshape(problem.out_shape).astype(dtype), lse.reshape(problem.lse_shape), *grads, *of_score


def plain_tangents(q, k, v, tq, tk, tv, work=None, **options):
    """to and tlse by the plain formula, as `plain`: P and P tS are rounded. None is a zero tangent; no score."""
    problem, inputs = reference.describe(q, k, v, **options)
    dtype = problem.dtype if work is None else work
    work = problem.sum_dtype if work is None else work
    Q, K, V, P, Z, lse, _ = _scores(problem, inputs, work)
    tQ, tK, tV = (0 * X if x is None else reference._heads(x, problem).astype(work)
                  for X, x in ((Q, tq), (K, tk), (V, tv)))  # fmt: skip
    with np.errstate(invalid="ignore"):
        tS = np.asarray(inputs.scale, work) * (tQ @ K.swapaxes(-2, -1) + Q @ tK.swapaxes(-2, -1))
    tS, tV = np.where(P > 0, tS, 0), np.where(P.any(-2)[..., None], tV, 0)
    tlse = (P * tS).sum(-1, keepdims=True)
    rounded, times_tS = ((x * Z).astype(dtype).astype(work) for x in (P, P * tS))
    to = rounded @ tV + times_tS @ V - tlse * (rounded @ V)
    return to.reshape(problem.out_shape).astype(dtype), tlse.reshape(problem.lse_shape)


def plain_backward_tangents(do, q, k, v, tq, tk, tv, tdo=None, dlse=None, tdlse=None, work=None, **options):
    """tdq, tdk and tdv by the plain formula, as `plain`: Z P and Z tP are rounded. None is zero; no score."""
    problem, inputs = reference.describe(q, k, v, **options)
    dtype = problem.dtype if work is None else work
    work = problem.sum_dtype if work is None else work
    Q, K, V, P, Z, lse, _ = _scores(problem, inputs, work)
    seen_q, seen_k, scale = np.isfinite(lse)[..., None], P.any(-2)[..., None], np.asarray(inputs.scale, work)
    tQ, tK, tV = (np.where(seen, 0 * X if x is None else reference._heads(x, problem).astype(work), 0)
                  for X, x, seen in ((Q, tq, seen_q), (K, tk, seen_k), (V, tv, seen_k)))  # fmt: skip
    dO, tdO = (np.where(seen_q, x.astype(work).reshape(*lse.shape, problem.head_dim_v), 0)
               for x in (do, 0 * do if tdo is None else tdo))  # fmt: skip
    dL, tdL = (np.where(seen_q, 0 if x is None else x.astype(work).reshape(*lse.shape, 1), 0) for x in (dlse, tdlse))
    KT, VT, tKT, tVT = (X.swapaxes(-2, -1) for X in (K, V, tK, tV))
    tS = scale * (tQ @ KT + Q @ tKT)
    tP = P * (tS - (P * tS).sum(-1, keepdims=True))
    dP, tdP = Z * (dO @ VT), Z * (dO @ tVT + tdO @ VT)
    D, tD = (x.sum(-1, keepdims=True) - dl for x, dl in ((P * dP, dL), (tP * dP + P * tdP, tdL)))
    dS, tdS = P * (dP - D), tP * (dP - D) + P * (tdP - tD)
    PT, tPT = ((Z * x).astype(dtype).astype(work).swapaxes(-2, -1) for x in (P, tP))
    dST, tdST = (x.swapaxes(-2, -1) for x in (dS, tdS))
    grads = scale * (tdS @ K + dS @ tK), scale * (tdST @ Q + dST @ tQ), tPT @ dO + PT @ tdO
    return [reference.sum_to(dX, x.shape).astype(dtype) for dX, x in zip(grads, (q, k, v))]


def exact_backward_tangents(do, q, *arrays, **options):
    """The same in float64, or in what is better for float64."""
    if q.dtype == np.float64:
        return plain_backward_tangents(do, q, *arrays, work=np.longdouble, **options)
    return reference.attention_backward_jvp(do, q, *arrays, **options)


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


# ----------------------------------------------------------------------------------------------------- random problems
def wrong_elements(got, want, error):
    """Where a result is not what rounding, of all terms by `rounding` and of itself, makes of the exact one."""
    info, got, size = ml_dtypes.finfo(got.dtype), got.astype(np.float64), abs(finite(want))
    error = error + (float(info.eps) * size + float(info.smallest_subnormal)) * (error > 0)
    right = np.where(np.isfinite(want), abs(got - finite(want)) <= error, got == want)
    return ~right & (size <= float(info.max))


def rounding(do, q, k, v, dlse=None, **options):
    """The largest errors of o, lse, dq, dk, dv and the gradients of the score's arrays, element by element, that come
    of rounding what they are summed from. They follow to first order from the sizes of all terms, and are 0 where those
    are: where nothing is seen. Takes arrays of NumPy and of CuPy, as the reference does.
    """
    problem, inputs = reference.describe(q, k, v, **options)
    Q, K, V, P, Z, lse, scores = reference._recompute(problem, inputs)
    seen, some, lse = P > 0, np.isfinite(lse)[..., None], finite(lse)[..., None]
    scale, (KT, VT) = inputs.scale, (X.swapaxes(-2, -1) for X in (K, V))
    info, of_sums = ml_dtypes.finfo(problem.dtype), np.finfo(problem.sum_dtype)
    u, least = float(info.eps), max(float(info.smallest_subnormal), float(of_sums.tiny))
    longest = max(problem.seqlen_q, problem.seqlen_k, problem.head_dim, problem.head_dim_v)
    eps = float(of_sums.eps) * (8 + math.sqrt(longest))     # of a sum: its errors are as good as random

    S, S_error, slopes = scale * Q @ KT, eps * scale * abs(Q) @ abs(KT), []
    for part, before in zip(inputs.score, scores):
        S, slope = finite(part._applied(before)), finite(part._derivative(before))
        near = (part._derivative(before + side * S_error) for side in (-1, 1))
        bend = sum(abs(finite(x) - slope) for x in near) + eps * abs(slope)     # the error of the slope
        bend = bend + eps * isinstance(part, na.Softcap)    # 1 - tanh(x)**2 has that of tanh
        slopes.append((slope, bend))
        S_error = S_error * (abs(slope) + bend) + eps * (abs(finite(before)) + abs(S))
    lse_error = ((P * S_error).sum(-1, keepdims=True) + eps * (1 + abs(lse))) * some
    P_error = P * (S_error + lse_error + eps * (1 + abs(S)) + u) + least * seen
    PZ, PZ_error = P * Z, (P_error + eps * P) * Z
    O_error = PZ_error @ abs(V) + u * abs(PZ @ V)

    dO = np.where(some, do.astype(np.float64).reshape(*lse.shape[:-1], problem.head_dim_v), 0)
    dL = 0 if dlse is None else np.where(some, dlse.astype(np.float64).reshape(lse.shape), 0)
    dP, dP_size = (dO @ VT) * Z, (abs(dO) @ abs(VT)) * Z
    delta = (P * dP).sum(-1, keepdims=True) - dL
    rounded = (O_error + least) * some  # what delta is made of, be it subnormal
    delta_error = (abs(dO) * rounded).sum(-1, keepdims=True) + eps * ((P * dP_size).sum(-1, keepdims=True) + abs(dL))
    dS = P * (dP - delta)
    coarser = 1 if inputs.dropout is None else max(inputs.dropout.scale / 2, 1)    # kernels round dS divided by it
    flushed = P * least * problem.head_dim_v    # CPUs take a sum below the normal numbers for 0, term by term
    dS_error = P_error * abs(dP - delta) + P * (eps * dP_size + delta_error) + u * abs(dS) + least * coarser * seen
    dS_error = dS_error + flushed
    of_score, of_sink = [], delta_error + (lse_error + eps * (1 + abs(lse))) * abs(delta)
    for part, (slope, bend) in reversed(list(zip(inputs.score, slopes))):
        if part._wants_gradient:
            terms = dS_error + eps * abs(dS), np.where(some, lse, -math.inf)[..., 0], of_sink[..., 0]
            of_score[:0] = [abs(part._gradient(*terms))]
        dS_error, dS = dS_error * (abs(slope) + bend) + abs(dS) * bend, dS * slope
    dS_error = scale * (dS_error + eps * abs(dS))
    grads = dS_error @ abs(K), dS_error.swapaxes(-2, -1) @ abs(Q), PZ_error.swapaxes(-2, -1) @ abs(dO)
    terms = (seen.sum(axis, keepdims=True).swapaxes(axis, -1) for axis in (-1, -2, -2))
    grads = [error + 2 * max(scale, 1) * least * count for error, count in zip(grads, terms)]   # products, then sums
    grads = [reference.sum_to(error, x.shape) for error, x in zip(grads, (q, k, v))]
    return O_error.reshape(problem.out_shape), lse_error.reshape(problem.lse_shape), *grads, *of_score


def finite(x):
    """Without what is not: scores of -inf, NaN where nobody looks."""
    return np.where(np.isfinite(x), x, 0) if hasattr(x, "shape") else x
