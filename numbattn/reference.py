"""Standard attention in float64, line for line from the paper: Algorithms 0 and 3. What every test compares with.

It computes all seqlen_q x seqlen_k scores at once. Takes NumPy or CuPy arrays, returns float64 arrays of the same kind
(NumPy's functions pass CuPy's arrays on to CuPy).
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .checks import Array
from .dropout import Dropout, dropout_mask
from .gradients import Gradients, sum_to
from .masks import Mask
from .problem import Inputs, Problem, describe
from .scores import Part, Scores, sink_of


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
        found = part._gradient(dS, lse, (D - dLse)[..., 0]) if part._wants_gradient else None
        dScores[:0] = [found] * len(part._weights)
        with np.errstate(invalid="ignore"):                     # a derivative at -inf may be NaN: no gradient is there
            dS = np.where(dS == 0, 0, dS * part._derivative(S))
    dQ = inputs.scale * dS @ K                                  # line 4: dQ = scale dS K
    dK = inputs.scale * np.swapaxes(dS, -2, -1) @ Q             # line 5: dK = scale dS^T Q
    return Gradients(sum_to(dQ, q.shape), sum_to(dK, k.shape), sum_to(dV, v.shape), tuple(dScores))


@np.errstate(under="ignore")
def weights(problem: Problem, inputs: Inputs, apply: Callable[[Part, Any], Any]) -> Any:
    """P, dropped, in the dtype of the problem; apply: (part of the score, S) -> what it makes of S."""
    _, _, _, P, Z, _, _ = _recompute(problem, inputs, apply)
    return (P * Z).astype(problem.dtype).reshape(problem.score_shape)


def _plainly(part: Part, S: Any) -> Any:
    return part._applied(S)


def _recompute(
    problem: Problem, inputs: Inputs, apply: Callable[[Part, Any], Any] = _plainly
) -> tuple[Any, ...]:  # fmt: skip
    """Q, K, V as float64 (batch, heads, sequence, features), P, what dropout multiplies it by, lse, and S before each
    part of the score."""
    k, v = (inputs.k, inputs.v) if inputs.cache is None else inputs.cache._dense()
    Q, K, V = (_heads(x, problem) for x in (inputs.q, k, v))
    visible: Any = np.asarray(inputs.mask.dense(problem.seqlen_q, problem.seqlen_k), like=Q)
    visible = np.broadcast_to(visible, problem.score_shape).reshape(*Q.shape[:-1], problem.seqlen_k)
    # queries that see nothing, and keys that no query sees, may be NaN: keep them out of the sums
    Q = np.where(visible.any(axis=-1)[..., None], Q, 0)
    K, V = (np.where(visible.any(axis=-2)[..., None], X, 0) for X in (K, V))
    S = inputs.scale * Q @ np.swapaxes(K, -2, -1)               # Alg. 0 line 1: S = scale Q K^T, then MASK(S)
    scores = []
    for part in inputs.score:                                   # of what is masked, nobody looks at the score
        scores.append(S)
        S = np.where(visible, apply(part, S), 0)
    S = np.where(visible, S, -math.inf)
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
