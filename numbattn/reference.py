"""Standard attention in float64, line for line from the paper: Algorithms 0 and 3, and tangents of both. Every test
compares with it.

It computes all seqlen_q x seqlen_k scores at once. Takes NumPy or CuPy arrays, returns float64 arrays of the same kind
(NumPy's functions pass CuPy's arrays on to CuPy).
"""

import math
from typing import Any, NamedTuple

import numpy as np

from .base.checks import Array
from .base.gradients import Gradients, sum_to
from .call.problem import Inputs, Problem, describe, without_v
from .call.tangents import Tangents, checked_tangents, parts_of
from .dropout import Dropout, dropout_mask
from .masks import Mask
from .scores import Scores, sink_of

__all__ = [
    "attention_backward",
    "attention_backward_jvp",
    "attention_forward",
    "attention_jvp",
    "attention_laplacian",
    "attention_statistics",
]


@np.errstate(under="ignore")
def attention_forward(
    q: Any, k: Any, v: Any = None, *, causal: bool = False, mask: Mask | Array | None = None,
    scale: float | None = None, dropout: Dropout | None = None, score: Scores = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Algorithm 0, with scale, score, mask and dropout as in appendix B.3; takes what `numbattn.attention` takes.

    Returns
    -------
    o : array of float64, (..., seqlen_q, head_dim_v)
    lse : array of float64, (..., seqlen_q)
    """
    problem, inputs = describe(q, k, v, causal, mask, scale, dropout, score)
    _, _, V, P, Z, lse, _ = _recompute(problem, inputs)
    O = (P * Z) @ V                                             # Alg. 0 line 3: O = P V, with P dropped
    return O.reshape(problem.out_shape), lse.reshape(problem.lse_shape)


@np.errstate(under="ignore")
def attention_backward(
    do: Any, q: Any, k: Any, v: Any, *, causal: bool = False, mask: Mask | Array | None = None,
    scale: float | None = None, dropout: Dropout | None = None, score: Scores = None, dlse: Any = None,
) -> Gradients[Any]:  # fmt: skip
    """Algorithm 3, with dropout and with the gradient `dlse` of lse.

    Returns
    -------
    dq, dk, dv : arrays of float64, of the shapes of q, k, v
        With the attribute `score`, the gradients of the arrays in score.
    """
    problem, inputs = describe(q, k, v, causal, mask, scale, dropout, score)
    Q, K, V, P, Z, lse, scores = _recompute(problem, inputs)
    seen = np.isfinite(lse)[..., None]
    dO = np.where(seen, do.astype(np.float64).reshape(*lse.shape, problem.head_dim_v), 0)
    dLse: Any = 0 if dlse is None else np.where(seen, dlse.astype(np.float64).reshape(*lse.shape, 1), 0)
    dV = np.swapaxes(P * Z, -2, -1) @ dO                        # Alg. 3 line 1: dV = P^T dO, with P dropped
    dP = (dO @ np.swapaxes(V, -2, -1)) * Z                      # line 2: dP = dO V^T, dropped as P was
    D = (P * dP).sum(axis=-1, keepdims=True)
    dS = P * (dP - D + dLse)                                    # line 3: dS = P (dP - rowsum(P dP)); d lse / dS = P
    dScores: list[Any] = []
    for part, S in reversed(list(zip(inputs.score, scores))):   # dS after each part of the score, from the last one on
        found = part._gradient(dS, lse, (D - dLse)[..., 0], S) if part._wants_gradient else None
        dScores[:0] = part._gradients(found)
        with np.errstate(invalid="ignore"):                     # a derivative at -inf may be NaN: no gradient is there
            dS = np.where(dS == 0, 0, dS * part._derivative(S))
    dQ = inputs.scale * dS @ K                                  # line 4: dQ = scale dS K
    dK = inputs.scale * np.swapaxes(dS, -2, -1) @ Q             # line 5: dK = scale dS^T Q
    return Gradients(sum_to(dQ, q.shape), sum_to(dK, k.shape), sum_to(dV, v.shape), tuple(dScores))


@np.errstate(under="ignore")
def attention_statistics(
    q: Any, k: Any, *, causal: bool = False, mask: Mask | Array | None = None, scale: float | None = None,
    score: Scores = None, weights: Any = None,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """What S says of itself; takes what `numbattn.attention_statistics` takes.

    Returns
    -------
    column_sums : array of float64, (..., seqlen_k)
    row_max, entropy, lse : arrays of float64, (..., seqlen_q)
    """
    problem, inputs = describe(q, k, without_v(q, k, mask, score), causal, mask, scale, None, score)
    *_, P, _, lse, scores = _recompute(problem, inputs)
    S, seen, sink = scores[-1], np.isfinite(lse), sink_of(inputs.score)
    row_max = S.max(axis=-1) if S.size else np.where(seen, 0, -math.inf)
    entropy = -np.where(P > 0, P * (np.where(P > 0, S, 0) - np.where(seen, lse, 0)[..., None]), 0).sum(axis=-1)
    if sink is not None:                                        # its share of P is a term, too
        x = np.where(seen, sink._logits(lse) - np.where(seen, lse, 0), 0)
        entropy = entropy - np.where(x > -math.inf, np.exp(x) * np.where(x > -math.inf, x, 0), 0)
    if weights is not None:
        P = P * np.where(seen, weights.astype(np.float64).reshape(lse.shape), 0)[..., None]
    rows = (x.reshape(problem.lse_shape) for x in (np.where(seen, row_max, -math.inf), entropy, lse))
    return P.sum(axis=-2).reshape(*problem.batch, problem.seqlen_k), *rows


def _recompute(problem: Problem, inputs: Inputs) -> tuple[Any, ...]:
    """Q, K, V as float64 (batch, heads, sequence, features), P, what dropout multiplies it by, lse, and S before each
    part of the score and after all."""
    k, v = (inputs.k, inputs.v) if inputs.cache is None else inputs.cache._dense()
    Q, K, V = (_heads(x, problem) for x in (inputs.q, k, v))
    visible: Any = np.asarray(inputs.mask.dense(problem.seqlen_q, problem.seqlen_k), like=Q)
    visible = np.broadcast_to(visible, problem.score_shape).reshape(*Q.shape[:-1], problem.seqlen_k)
    # queries that see nothing, and keys that no query sees, may be NaN: keep them out of the sums
    Q = np.where(visible.any(axis=-1)[..., None], Q, 0)
    K, V = (np.where(visible.any(axis=-2)[..., None], X, 0) for X in (K, V))
    S = inputs.scale * Q @ np.swapaxes(K, -2, -1)               # Alg. 0 line 1: S = scale Q K^T, then MASK(S)
    scores = []
    for part in inputs.score:                                   # the score of what is masked is not read
        scores.append(S)
        S = np.where(visible, part._applied(S), 0)
    S = np.where(visible, S, -math.inf)
    scores.append(S)
    seen = ~np.isneginf(S).all(axis=-1, keepdims=True)
    m = np.where(seen, S, 0)
    m = m.max(axis=-1, keepdims=True) if m.size else m.sum(axis=-1, keepdims=True)
    sink = sink_of(inputs.score)
    logits: Any = -math.inf if sink is None else sink._logits(m[..., 0])[..., None]
    m = np.maximum(m, logits)
    E = np.exp(S - m)
    l = np.where(seen, E.sum(axis=-1, keepdims=True) + np.exp(logits - m), 1)
    P = E / l                                                   # line 2: P = softmax(S)
    lse = np.where(seen, m + np.log(l), -math.inf)[..., 0]
    Z: Any = 1.0
    if inputs.dropout is not None:
        kept = dropout_mask(inputs.dropout, problem.score_shape).reshape(S.shape)
        Z = np.asarray(kept, like=Q) * inputs.dropout.scale
    return Q, K, V, P, Z, lse, scores


def _heads(x: Any, problem: Problem) -> Any:
    """x in float64 with all batch axes, query head h with its key head h // group_size."""
    x = x.astype(np.float64).reshape((1,) * (3 - x.ndim) + x.shape)
    x = np.repeat(x, problem.heads // max(x.shape[-3], 1), axis=-3)
    return np.broadcast_to(x, (*problem.batch[:-1], *x.shape[-3:]))


# ------------------------------------------------------------------------------------------------------------ tangents
# Along a direction each array X is X + h tX, and what is made of it changes, to first order, by h times its tangent.
# That of a product X Y is tX Y + X tY. So with E = exp(S), l = rowsum(E), P = E / l, lse = log(l), O = (Z P) V, and a
# score S = f(S0, A) of arrays A:
#     tS0 = scale (tQ K^T + Q tK^T),    tS = f' tS0 + (df / dA) tA,    tE = E tS
#     tlse = tl / l = rowsum(P tS),    tP = P (tS - tlse),    tO = (Z tP) V + (Z P) tV
# and of dP = Z (dO V^T), D = rowsum(dO O) - dlse, dS = P (dP - D), dS0 = f' dS, dQ = scale dS0 K and all others:
#     tdP = Z (dO tV^T + tdO V^T),    tD = rowsum(tdO O + dO tO) - tdlse,    tdS = tP (dP - D) + P (tdP - tD)
#     tdS0 = f' tdS + (f'' tS0 + (df' / dA) tA) dS,    tdQ = scale (tdS0 K + dS0 tK), and so on.
# dQ, dK, dV are the gradient of L = <dO, O> + <dlse, lse>; their tangent, with tdO = tdlse = 0, is a product with the
# Hessian of L, which is symmetric. So the gradient of <ddQ, dQ> + <ddK, dK> + <ddV, dV> is the tangent of dQ, dK, dV in
# the direction ddQ, ddK, ddV; by dO and dlse it is tO and tlse, since the sum is <dO, tO> + <dlse, tlse>.
# To second order S is S + h tS + h^2 S2 / 2, and O l = N, differentiated twice, gives, with P2 = P (S2 + tS^2),
#     S2 = f' (2 scale tQ tK^T) + f'' tS0^2,    O2 = (Z P2) V + 2 (Z P tS) tV - 2 tlse tO - rowsum(P2) O
def attention_jvp(
    q: Any, k: Any, v: Any, tq: Any, tk: Any, tv: Any, *, tscore: Any = (), **options: Any
) -> tuple[Any, Any]:
    """The tangents of o and lse; takes what `numbattn.attention_jvp` takes.

    Returns
    -------
    to : array of float64, (..., seqlen_q, head_dim_v), of several tangents with their axis in front
    tlse : array of float64, (..., seqlen_q), likewise
    """
    problem, inputs = describe(q, k, v, **options)
    tangents, several = checked_tangents(inputs, tq, tk, tv, tscore)
    found = [_along(problem, inputs, tangents, number) for number in range(tangents.count)]
    to = _joined([x.tO for x in found], problem.out_shape, several, q)
    return to, _joined([x.tlse for x in found], problem.lse_shape, several, q)


def attention_backward_jvp(
    do: Any, q: Any, k: Any, v: Any, tq: Any, tk: Any, tv: Any, *, tdo: Any = None, dlse: Any = None,
    tdlse: Any = None, tscore: Any = (), **options: Any,
) -> Gradients[Any]:  # fmt: skip
    """The tangents of what `attention_backward` returns; takes what `numbattn.attention_backward_jvp` takes.

    Returns
    -------
    tdq, tdk, tdv : arrays of float64, of the shapes of q, k, v, of several tangents with their axis in front
        With the attribute `score`, the tangents of the gradients of the arrays in score.
    """
    problem, inputs = describe(q, k, v, **options)
    tangents, several = checked_tangents(inputs, tq, tk, tv, tscore)
    tdo, tdlse = (x if x is None or several else x[None] for x in (tdo, tdlse))
    found = []
    for number in range(tangents.count):
        along = _along(problem, inputs, tangents, number, backward=True)
        rows = [None if x is None else x[number] for x in (tdo, tdlse)]
        found.append(_backward_along(problem, inputs, along, do, dlse, *rows))
    weights = [pair for part in inputs.score for pair in zip(part._weights, part._wanted)]
    tdq, tdk, tdv = (_joined([x[i] for x in found], x.shape, several, q) for i, x in enumerate((q, k, v)))
    of_score = [_joined([grads.score[i] for grads in found], x.shape, several, q) if is_wanted else None
                for i, (x, is_wanted) in enumerate(weights)]  # fmt: skip
    return Gradients(tdq, tdk, tdv, tuple(of_score))


@np.errstate(under="ignore")
def attention_laplacian(
    q: Any, k: Any, v: Any, jq: Any, jk: Any, jv: Any, lq: Any = None, lk: Any = None, lv: Any = None, *,
    jscore: Any = (), lscore: Any = (), particle: Any = None, **options: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """o, its tangents and its Laplacian; takes what `numbattn.attention_laplacian` takes.

    Returns
    -------
    o, jo, lo : arrays of float64, (..., seqlen_q, head_dim_v), jo with the axis of tangents in front
    """
    problem, inputs = describe(q, k, v, **options)
    if particle is not None:
        jq, jk, jv = of_particles(jq, jk, jv, particle)
    tangents, _ = checked_tangents(inputs, jq, jk, jv, jscore, prefix="j", several=True)
    laplacians, _ = checked_tangents(inputs, lq, lk, lv, lscore, prefix="l", several=False)
    lo, jo = _along(problem, inputs, laplacians, 0).tO, []
    part: Any
    for number in range(tangents.count):
        x = _along(problem, inputs, tangents, number)
        S2 = 2 * inputs.scale * x.tQ @ _T(x.tK)
        with np.errstate(invalid="ignore"):
            for part, S, tS in zip(inputs.score, x.scores, x.tscores):
                S2 = np.where(x.P > 0, part._derivative(S) * S2 + part._curvature(S) * tS**2, 0)
        P2 = x.P * (S2 + x.tS**2)
        O2 = (x.Z * P2) @ x.V + 2 * (x.Z * x.P * x.tS) @ x.tV
        total = P2.sum(axis=-1, keepdims=True)
        for part, tpart in zip(inputs.score, x.tparts):
            if tpart is not None and not part._has_step:
                logits = np.where(x.seen, (part._logits(x.lse) - x.lse)[..., None], -math.inf)
                total = total + np.exp(logits) * tpart._logits(x.lse)[..., None] ** 2
        O2 = O2 - 2 * x.tlse * x.tO - total * x.O
        jo.append(x.tO)
        lo = lo + O2
    o, _ = attention_forward(q, k, v, **options)
    return o, _joined(jo, problem.out_shape, True, q), lo.reshape(problem.out_shape)


def of_particles(jq: Any, jk: Any, jv: Any, particle: Any) -> list[Any]:
    """The derivatives of all rows by the coordinates of each particle, which moves its own."""
    of_q, of_k = (np.asarray(x) for x in (particle if isinstance(particle, tuple) else (particle, particle)))
    every = range(1 + max(of_q.max(initial=-1), of_k.max(initial=-1)))
    return [None if x is None else
            np.concatenate([x[:0], *(np.where(np.asarray(own == p, like=x)[:, None], x, 0) for p in every)])
            for x, own in zip((jq, jk, jv), (of_q, of_k, of_k))]  # fmt: skip


class _Along(NamedTuple):
    """All that the forward pass computes along a direction, in float64, (batch, heads, rows, columns)."""

    Q: Any
    K: Any
    V: Any
    P: Any
    Z: Any
    O: Any
    scores: Any  # S before each part of the score
    lse: Any  # without a last axis
    seen: Any  # whether a query sees anything
    tQ: Any
    tK: Any
    tV: Any
    tparts: Any  # parts with the tangents of their arrays
    tscores: Any  # tS before each part of the score
    tS: Any
    tlse: Any
    tO: Any


@np.errstate(under="ignore")
def _along(problem: Problem, inputs: Inputs, tangents: Tangents, number: int, backward: bool = False) -> _Along:
    """The tangents of the forward pass in a direction; backward: for those of the backward pass, see `parts_of`."""
    Q, K, V, P, Z, lse, scores = _recompute(problem, inputs)
    seen, seen_keys, O = np.isfinite(lse)[..., None], P.any(axis=-2)[..., None], (P * Z) @ V
    tQ = 0 * Q if tangents.q is None else np.where(seen, _heads(tangents.q[number], problem), 0)
    tK = 0 * K if tangents.k is None else np.where(seen_keys, _heads(tangents.k[number], problem), 0)
    tV = 0 * V if tangents.v is None else np.where(seen_keys, _heads(tangents.v[number], problem), 0)
    tS: Any = inputs.scale * (tQ @ _T(K) + Q @ _T(tK))
    tscores: list[Any] = []
    part: Any
    tparts = parts_of(inputs, tangents, number, backward)
    for part, tpart, S in zip(inputs.score, tparts, scores):
        tscores.append(tS)
        with np.errstate(invalid="ignore"):                     # a derivative at -inf may be NaN: P is 0 there
            of_arrays = 0 if tpart is None else tpart._of_value(S)
            tS = np.where(P > 0, part._derivative(S) * tS + of_arrays, 0)
    tlse = (P * tS).sum(axis=-1, keepdims=True)                 # tlse = rowsum(P tS), a sink's tangent included
    for part, tpart in zip(inputs.score, tparts):
        if tpart is not None and not part._has_step:
            logits = np.where(seen, (part._logits(lse) - lse)[..., None], -math.inf)
            tlse = tlse + np.exp(logits) * tpart._logits(lse)[..., None]
    tO = (P * Z) @ tV + (P * Z * tS) @ V - tlse * O             # tO = (Z P) tV + (Z P tS) V - tlse O
    return _Along(Q, K, V, P, Z, O, scores, lse, seen, tQ, tK, tV, tparts, tscores, tS, tlse, tO)


@np.errstate(under="ignore")
def _backward_along(
    problem: Problem, inputs: Inputs, x: _Along, do: Any, dlse: Any, tdo: Any, tdlse: Any
) -> Gradients[Any]:
    """The tangents of the backward pass in a direction."""
    Q, K, V, P, Z, tQ, tK, tV, tS = x.Q, x.K, x.V, x.P, x.Z, x.tQ, x.tK, x.tV, x.tS
    dO, tdO = (_rows(rows, x, problem.head_dim_v) for rows in (do, tdo))
    dLse, tdLse = (_rows(rows, x, 1) for rows in (dlse, tdlse))
    tP = P * (tS - x.tlse)
    dP, tdP = Z * (dO @ _T(V)), Z * (dO @ _T(tV) + tdO @ _T(V))
    D = (dO * x.O).sum(axis=-1, keepdims=True) - dLse
    tD = (tdO * x.O + dO * x.tO).sum(axis=-1, keepdims=True) - tdLse
    dS, tdS = P * (dP - D), tP * (dP - D) + P * (tdP - tD)
    tdV = _T(Z * tP) @ dO + _T(Z * P) @ tdO
    of_score: list[Any] = []
    for part, tpart, S, before in reversed(list(zip(inputs.score, x.tparts, x.scores, x.tscores))):
        found = None
        if part._wants_gradient and not part._has_step:         # of -rowsum(P D), P that of the sink
            tlogits = 0 if tpart is None else tpart._logits(x.lse)[..., None]
            found = part._gradient(None, x.lse, ((tlogits - x.tlse) * D + tD)[..., 0])
        elif part._wants_gradient:
            found = part._gradient_along(dS, tdS, S, before, tpart)
        of_score[:0] = part._gradients(found)
        with np.errstate(invalid="ignore"):
            of_arrays = 0 if tpart is None else tpart._of_derivative(S)
            slope, bend = part._derivative(S), part._curvature(S) * before + of_arrays
            tdS, dS = (np.where(P > 0, y, 0) for y in (slope * tdS + bend * dS, slope * dS))
    tdQ = inputs.scale * (tdS @ K + dS @ tK)
    tdK = inputs.scale * (_T(tdS) @ Q + _T(dS) @ tQ)
    grads = sum_to(tdQ, inputs.q.shape), sum_to(tdK, inputs.k.shape), sum_to(tdV, inputs.v.shape)
    return Gradients(*grads, tuple(of_score))


def _T(x: Any) -> Any:
    return np.swapaxes(x, -2, -1)


def _rows(rows: Any, x: _Along, columns: int) -> Any:
    """do or dlse, or a tangent of them, 0 where nothing is seen."""
    shape = *x.lse.shape, columns
    if rows is None:
        return np.zeros_like(x.Q, shape=shape)
    return np.where(x.seen, rows.astype(np.float64).reshape(shape), 0)


def _joined(found: list[Any], shape: tuple[int, ...], several: bool, like: Any) -> Any:
    """Results of the directions, of this shape, with an axis in front if there are several."""
    joined = np.zeros_like(like, dtype=np.float64, shape=(len(found), *shape))
    for number, x in enumerate(found):
        joined[number] = x.reshape(shape)
    return joined if several else joined[0]
