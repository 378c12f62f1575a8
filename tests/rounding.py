"""The measure of random problems, of which there are many: what rounding explains, element by element."""

import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np

import numbattn as na
from numbattn import reference
from numbattn.call.tangents import checked_tangents
from numbattn.functions.compiled.reads import in_python, in_python_along

BOUNDLESS = 1e100  # an error; not inf, of which products with 0 are NaN


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
    x = rounding_of_weights(problem, inputs)
    Q, K, V, P, Z, lse, u, eps, least = x.Q, x.K, x.V, x.P, x.Z, x.lse, x.u, x.eps, x.least
    seen, some, slopes, P_error, lse_error = P > 0, x.some, x.slopes, x.P_error, x.lse_error
    scale, VT = inputs.scale, V.swapaxes(-2, -1)
    PZ, PZ_error = P * Z, x.PZ_error
    subnormal = x.subnormal * seen.sum(-1, keepdims=True)   # of terms that are
    O_error = PZ_error @ abs(V) + u * abs(PZ @ V) + subnormal

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
    for part, (slope, bend), S, S_error in reversed(list(zip(inputs.score, slopes, x.scores, x.S_errors))):
        if isinstance(part, na.Score) and part._wants_gradient:
            errors = errors_of_reads(part, S, S_error, dS, dS_error + eps * abs(dS), eps)
            of_score[:0] = [x for x in part._gradients(errors) if x is not None]
        elif part._wants_gradient:
            terms = dS_error + eps * abs(dS), np.where(some, lse, -math.inf)[..., 0], of_sink[..., 0]
            of_score[:0] = [abs(part._gradient(*terms))]
        dS_error, dS = dS_error * (abs(slope) + bend) + abs(dS) * bend, dS * slope
    dS_error = scale * (dS_error + eps * abs(dS))
    grads = dS_error @ abs(K), dS_error.swapaxes(-2, -1) @ abs(Q), PZ_error.swapaxes(-2, -1) @ abs(dO)
    terms = (seen.sum(axis, keepdims=True).swapaxes(axis, -1) for axis in (-1, -2, -2))
    grads = [error + 2 * max(scale, 1) * least * count for error, count in zip(grads, terms)]   # products, then sums
    grads = [reference.sum_to(error, x.shape) for error, x in zip(grads, (q, k, v))]
    return O_error.reshape(problem.out_shape), lse_error.reshape(problem.lse_shape), *grads, *of_score


def errors_of_reads(part, S, S_error, dS, dS_error, eps):
    """The largest errors of the gradients of a function's arrays, one after the other. dS: after it, S: before it."""
    reads, found = in_python(part._identity, part._wanted, part.arrays), np.zeros(part._elements)
    S, S_error, dS, dS_error = (
        x.reshape(-1 if x.size else 0, *x.shape[-3:]) for x in np.broadcast_arrays(S, S_error, dS, dS_error)
    )
    for at in zip(*map(np.ndarray.tolist, np.nonzero(dS_error))):
        for (place, slope), (_, near) in zip(*[[*reads(float(s), *at)] for s in (S[at], S[at] + S_error[at])]):
            found[place] += abs(slope) * dS_error[at] + abs(dS[at]) * (abs(near - slope) + eps * abs(slope))
    return found


def errors_of_tangents_of_reads(tangent, of_S, of_tS, of_dS, of_tdS, eps):
    """The same of their tangents; of_S and so on: S, tS, dS, tdS, each with its error."""
    score, found = tangent._score, np.zeros(tangent._score._elements)
    reads = in_python_along(score._identity, score._wanted, score.arrays, tangent._tangents.astype(np.float64))
    given = np.broadcast_arrays(*of_S, *of_tS, *of_dS, *of_tdS)
    S, S_error, tS, tS_error, dS, dS_error, tdS, tdS_error = (
        x.reshape(-1 if x.size else 0, *x.shape[-3:]) for x in given
    )
    for at in zip(*map(np.ndarray.tolist, np.nonzero((dS_error != 0) | (tdS_error != 0)))):
        two = ((S[at] + side * S_error[at], tS[at] + side * tS_error[at]) for side in (0, 1))
        for (place, f, tf), (_, near, tnear) in zip(*[[*reads(*map(float, each), *at)] for each in two]):
            found[place] += abs(f) * tdS_error[at] + (abs(near - f) + eps * abs(f)) * abs(tdS[at])
            found[place] += abs(tf) * dS_error[at] + (abs(tnear - tf) + eps * abs(tf)) * abs(dS[at])
    return found


def rounding_of_weights(problem, inputs):
    """The largest errors of S, of derivatives of scores, of lse and of P, and what they follow from: see `rounding`."""
    Q, K, V, P, Z, lse, scores = reference._recompute(problem, inputs)
    seen, some, lse = P > 0, np.isfinite(lse)[..., None], finite(lse)[..., None]
    scale, KT = inputs.scale, K.swapaxes(-2, -1)
    info, of_sums = ml_dtypes.finfo(problem.dtype), np.finfo(problem.sum_dtype)
    u, largest, least = float(info.eps), float(info.max), max(float(info.smallest_subnormal), float(of_sums.tiny))
    longest = max(problem.seqlen_q, problem.seqlen_k, problem.head_dim, problem.head_dim_v)
    eps = float(of_sums.eps) * (8 + math.sqrt(longest))     # of a sum: its errors are as good as random

    S, S_error, slopes, S_errors = scale * Q @ KT, eps * scale * abs(Q) @ abs(KT), [], []
    for part, before in zip(inputs.score, scores):
        S_errors.append(S_error)
        S, slope = finite(part._applied(before)), finite(part._derivative(before))
        near = (part._derivative(before + side * S_error) for side in (-1, 1))
        bend = sum(abs(finite(x) - slope) for x in near) + eps * abs(slope)     # the error of the slope
        bend = bend + eps * isinstance(part, na.Softcap)    # 1 - tanh(x)**2 has that of tanh
        bend = bend + float(of_sums.tiny) * part._is_nonlinear  # a slope below the normal numbers may be 0
        slopes.append((slope, bend))
        S_error = S_error * (abs(slope) + bend) + eps * (abs(finite(before)) + abs(S))
    lse_error = ((P * S_error).sum(-1, keepdims=True) + eps * (1 + abs(lse))) * some
    P_error = P * (S_error + lse_error + eps * (1 + abs(S)) + u) + least * seen
    PZ_error = (P_error + eps * P) * Z
    return SimpleNamespace(Q=Q, K=K, V=V, P=P, Z=Z, lse=lse, some=some, u=u, eps=eps, least=least, largest=largest,
                           subnormal=float(of_sums.smallest_subnormal),
                           slopes=slopes, scores=scores, S_errors=S_errors, S_error=S_error, lse_error=lse_error,
                           P_error=P_error, PZ_error=PZ_error)


def rounding_of_tangents(do, q, k, v, tq, tk, tv, tdo=None, dlse=None, tdlse=None, tscore=(), **options):
    """As `rounding`, of to, tlse and the tangents of dq, dk, dv and of the gradients of the score's arrays, in one
    direction."""
    problem, inputs = reference.describe(q, k, v, **options)
    tangents, _ = checked_tangents(inputs, tq, tk, tv, tscore)
    x = rounding_of_weights(problem, inputs)
    f = rounding_along(problem, inputs, tangents, x)
    y, P, Z, u, eps, scale, least = f.along, x.P, x.Z, x.u, x.eps, inputs.scale, x.least * (x.P > 0)
    tS, tS_error, tlse_error, O_error, tO_error = y.tS, f.tS_error, f.tlse_error, f.O_error, f.tO_error
    (dO, tdO), (dL, tdL) = ([reference._rows(rows, y, n) for rows in pair] for pair, n in
                            (((do, tdo), problem.head_dim_v), ((dlse, tdlse), 1)))  # fmt: skip
    dP, tdP = Z * (dO @ t(x.V)), Z * (dO @ t(y.tV) + tdO @ t(x.V))
    dP_error = eps * Z * (abs(dO) @ abs(t(x.V)))
    tdP_error = eps * Z * (abs(dO) @ abs(t(y.tV)) + abs(tdO) @ abs(t(x.V)))
    D, tD = rowsum(dO * y.O) - dL, rowsum(tdO * y.O + dO * y.tO) - tdL
    D_error = rowsum(abs(dO) * (O_error + eps * abs(y.O))) + eps * abs(dL)
    tD_error = rowsum(abs(dO) * (tO_error + eps * abs(y.tO)) + abs(tdO) * (O_error + eps * abs(y.O))) + eps * abs(tdL)
    tP, A, B, A_error, B_error = P * (tS - y.tlse), dP - D, tdP - tD, dP_error + D_error, tdP_error + tD_error
    tP_error = x.P_error * abs(tS - y.tlse) + P * (tS_error + tlse_error + eps * (abs(tS) + abs(y.tlse)))
    tP_error = tP_error + u * abs(tP) + least + beyond(tP, x)
    dS, dS_error = P * A, x.P_error * abs(A) + P * A_error + u * abs(P * A) + least
    tdS, tdS_error = tP * A + P * B, tP_error * abs(A) + abs(tP) * A_error + x.P_error * abs(B) + P * B_error
    tdS_error = tdS_error + (u + 2 * eps) * (abs(tP * A) + abs(P * B)) + least
    tdV_error = t(Z * (tP_error + eps * abs(tP))) @ abs(dO) + t(x.PZ_error) @ abs(tdO)
    of_score = []
    for number, link in reversed([*enumerate(f.chain)]):
        part, of_array, slope, slope_error, before, before_error, bend, bend_error = link
        if isinstance(part, na.Score) and part._wants_gradient:
            of_S = x.scores[number], x.S_errors[number]
            sizes = (dS, dS_error + eps * abs(dS)), (tdS, tdS_error + eps * abs(tdS))
            errors = errors_of_tangents_of_reads(of_array, of_S, (before, before_error), *sizes, eps)
            of_score[:0] = [error for error in part._gradients(errors) if error is not None]
        elif part._wants_gradient and part._has_step:
            of_score[:0] = [abs(part._gradient(tdS_error + eps * abs(tdS), None, None))]
        elif part._wants_gradient:
            factor = (0 if of_array is None else of_array._logits(x.lse[..., 0])[..., None]) - y.tlse
            error = abs(factor) * D_error + tlse_error * abs(D) + tD_error
            error = error + (x.lse_error + eps * (2 + abs(x.lse))) * (abs(factor * D) + abs(tD))
            of_score[:0] = [abs(part._gradient(None, np.where(x.some, x.lse, -math.inf)[..., 0], error[..., 0]))]
        tdS_error = abs(slope) * tdS_error + slope_error * abs(tdS) + abs(bend) * dS_error + bend_error * abs(dS)
        dS_error = abs(slope) * dS_error + slope_error * abs(dS)
        tdS, dS = slope * tdS + bend * dS, slope * dS
    tdS_error, dS_error = tdS_error + eps * abs(tdS) + beyond(tdS, x), dS_error + eps * abs(dS)
    tdS_error, dS_error = scale * tdS_error, scale * dS_error
    grads = (tdS_error @ abs(x.K) + dS_error @ abs(y.tK), t(tdS_error) @ abs(x.Q) + t(dS_error) @ abs(y.tQ), tdV_error)
    grads = [reference.sum_to(error + 4 * x.least, like.shape) for error, like in zip(grads, (q, k, v))]
    results = tO_error.reshape(problem.out_shape), tlse_error.reshape(problem.lse_shape), *grads, *of_score
    return [2 * error for error in results]


def rounding_of_laplacian(q, k, v, directions, laplacians, options):
    """As `rounding`, of the Laplacian of o; directions: tq, tk, tv and tscore of each, laplacians: lq, lk and lv."""
    problem, inputs = reference.describe(q, k, v, **options)
    x = rounding_of_weights(problem, inputs)
    error = rounding_along(problem, inputs, checked_tangents(inputs, *laplacians)[0], x).tO_error
    for tangents in directions:
        f = rounding_along(problem, inputs, checked_tangents(inputs, *tangents)[0], x)
        y, scale, eps, u, tS, seen = f.along, inputs.scale, x.eps, x.u, f.along.tS, x.P > 0
        S2, S2_error = 2 * scale * y.tQ @ t(y.tK), 2 * eps * scale * (abs(y.tQ) @ abs(t(y.tK)))
        for _, _, slope, slope_error, before, before_error, bend, bend_error in f.chain:
            S2_error = abs(slope) * S2_error + slope_error * abs(S2) + bend_error * abs(before)
            S2_error = S2_error + abs(bend) * before_error + eps * (abs(slope * S2) + abs(bend * before))
            S2 = slope * S2 + bend * before
        bent, sizes = S2 + tS**2, abs(S2) + tS**2
        P2_error = x.P_error * abs(bent) + x.P * (S2_error + 2 * abs(tS) * f.tS_error + (eps + u) * sizes)
        P2_error = P2_error + x.least * seen + beyond(sizes, x) * seen
        l2, l2_error = rowsum(x.P * bent), rowsum(P2_error + eps * x.P * sizes)
        for part, of_array in zip(inputs.score, y.tparts):
            if of_array is not None and not part._has_step:
                squares = of_array._logits(x.lse[..., 0])[..., None] ** 2
                l2 = l2 + part._share(np.where(x.some, x.lse, -math.inf)[..., 0])[..., None] * squares
                l2_error = l2_error + (x.lse_error + 8 * eps) * squares
        error = error + (x.Z * P2_error) @ abs(x.V) + 2 * f.W_error @ abs(y.tV)
        error = error + 2 * (f.tlse_error * abs(y.tO) + abs(y.tlse) * f.tO_error)
        error = error + l2_error * abs(y.O) + abs(l2) * f.O_error
        terms = x.Z * x.P * sizes @ abs(x.V) + 2 * (x.Z * x.P * abs(tS)) @ abs(y.tV)
        error = error + eps * (terms + abs(y.tlse * y.tO) + abs(l2 * y.O)) + x.least * x.some
    return 2 * error.reshape(problem.out_shape)


def rounding_along(problem, inputs, tangents, x):
    """The largest errors of tS, tlse, Z P tS, o and to in the first direction of Tangents, and what they follow from;
    x: from `rounding_of_weights`."""
    y = reference._along(problem, inputs, tangents, 0, backward=True)
    P, Z, u, eps, scale, least = x.P, x.Z, x.u, x.eps, inputs.scale, x.least * (x.P > 0)
    tS, tS_error, chain = y.tS, eps * scale * (abs(y.tQ) @ abs(t(x.K)) + abs(x.Q) @ abs(t(y.tK))), []
    about = zip(inputs.score, y.tparts, y.scores, y.tscores, x.slopes, x.S_errors)
    for part, of_array, S, before, (slope, slope_error), S_error in about:
        bend, ahead, behind = (finite(part._curvature(S + side * S_error)) for side in (0, 1, -1))
        bend_error = abs(ahead - bend) + abs(behind - bend) + 4 * eps * (abs(bend) + part._is_nonlinear)
        bend_error = abs(bend) * tS_error + bend_error * abs(before)
        moves = isinstance(part, na.Score) and of_array is not None
        if moves:
            bend_error = bend_error + change_of(of_array._of_derivative, S, S_error, eps)
        of_slope = 0 if of_array is None else of_array._of_derivative(S)
        tslope = finite(part._curvature(S) * before + of_slope)
        chain.append((part, of_array, slope, slope_error, before, tS_error, tslope, bend_error))
        tS_error = abs(slope) * tS_error + slope_error * abs(before)
        if moves:
            tS_error = tS_error + change_of(of_array._of_value, S, S_error, eps)
        elif of_array is not None:
            tS_error = tS_error + eps * (2 * abs(before) + abs(finite(of_array._applied(before))))
    tlse_error = (x.P_error * abs(tS) + P * (tS_error + eps * abs(tS))).sum(-1, keepdims=True) + eps * abs(y.tlse)
    for part, of_array in zip(inputs.score, y.tparts):
        if of_array is not None and not part._has_step:     # its P is at most 1
            own = abs(of_array._logits(x.lse[..., 0])[..., None])
            tlse_error = tlse_error + (x.lse_error + eps * (1 + abs(x.lse))) * own
    tlse_error = tlse_error * x.some
    W_error = (x.P_error * abs(tS) + P * (tS_error + (eps + u) * abs(tS)) + least + beyond(tS, x) * (P > 0)) * Z
    O_error = x.PZ_error @ abs(x.V) + u * abs(y.O) + x.least
    tO_error = x.PZ_error @ abs(y.tV) + W_error @ abs(x.V) + tlse_error * abs(y.O) + abs(y.tlse) * O_error
    tO_error = tO_error + u * (abs(y.tO) + abs(y.tlse * y.O)) + x.least * x.some
    return SimpleNamespace(along=y, tS_error=tS_error, tlse_error=tlse_error, W_error=W_error, O_error=O_error,
                           tO_error=tO_error, chain=chain)


def change_of(function, S, S_error, eps):
    """The error of a function of S."""
    found, ahead, behind = (finite(function(S + side * S_error)) for side in (0, 1, -1))
    return abs(ahead - found) + abs(behind - found) + 4 * eps * abs(found)


def beyond(terms, x):
    """An error without bounds where what kernels round to the dtype of q may not be finite; of P times terms it is at
    most 2 relative to the maximum so far."""
    return BOUNDLESS * (abs(terms) > x.largest / 2)


def t(x):
    return x.swapaxes(-2, -1)


def rowsum(x):
    return x.sum(-1, keepdims=True)


def finite(x):
    """Without what is not: scores of -inf, NaN where nobody looks."""
    return np.where(np.isfinite(x), x, 0) if hasattr(x, "shape") else x
