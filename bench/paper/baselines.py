"""What the paper's Figure 3 compares with, in NumPy or CuPy: Rabe and Staats' chunks, Linformer, linear attention.

Each returns o and a function from do to the gradients, dq, dk, dv first, like common.standard_vjp. xp is the arrays'
module.
"""

import math
from functools import cached_property

import numpy as np
from common import standard_vjp

HIDDEN = -1e4  # added to hidden scores: finite in float16, so that no row of a chunk is NaN
QUERY_CHUNK, KEY_CHUNK = 1024, 4096  # Rabe and Staats' sizes
ALL = slice(None)


class Extras:
    """Which scores count, and the dropout mask, by rows and columns: whole for the standard formula, or in chunks.

    A chunk's dropout mask is drawn from its seed each time, and never kept.
    """

    def __init__(self, xp, shape, dtype, *, causal=False, lengths=None, dropout=0.0):
        (*self.lead, self.seqlen_q, self.seqlen_k), self.xp, self.dtype = shape, xp, dtype
        self.causal, self.dropout = causal, dropout
        self.lengths = None if lengths is None else xp.asarray(lengths).reshape(-1, 1, 1, 1)

    def bias(self, rows=ALL, columns=ALL):
        """HIDDEN where a key is padding or in the future, else 0; None if no key can be."""
        xp, hidden = self.xp, None
        i, j = xp.arange(self.seqlen_q)[rows, None], xp.arange(self.seqlen_k)[columns]
        if self.causal:
            hidden = j > i
        if self.lengths is not None:
            padding = j >= self.lengths
            hidden = padding if hidden is None else hidden | padding
        return None if hidden is None else hidden * self.dtype.type(HIDDEN)

    @cached_property
    def whole_bias(self):
        """The whole bias for the standard formula, to which it is an input: made once."""
        return self.bias()

    def Z(self, rows=ALL, columns=ALL):
        """1 / (1 - dropout) where P is kept, 0 elsewhere; None without dropout."""
        if not self.dropout:
            return None
        (i, _, _), (j, _, _) = rows.indices(self.seqlen_q), columns.indices(self.seqlen_k)
        shape = *self.lead, len(range(self.seqlen_q)[rows]), len(range(self.seqlen_k)[columns])
        kept = generator(self.xp, i * self.seqlen_k + j).random(shape, dtype=np.float32) >= self.dropout
        return kept * self.dtype.type(1 / (1 - self.dropout))

    def keys(self):
        """1 for keys, 0 for padding, along the axis of tokens; None without padding."""
        if self.lengths is None:
            return None
        return (self.xp.arange(self.seqlen_k)[:, None] < self.lengths).astype(self.dtype)


def generator(xp, seed):
    """A Philox generator of the module; CuPy's class has another name."""
    philox = xp.random.Philox if xp is np else xp.random.Philox4x3210
    return xp.random.Generator(philox(seed))


def standard(xp, q, k, v, extras):
    return standard_vjp(q, k, v, bias=extras.whole_bias, Z=extras.Z())


def rabe_staats(xp, q, k, v, extras, query_chunk=QUERY_CHUNK, key_chunk=KEY_CHUNK):
    """Memory-efficient attention as the paper's B.5 describes it: chunks of keys are summarised as outputs and sums
    of their own, which are combined at the end; backward recomputes the summaries (checkpoints), and P once more."""
    scale, wide = 1 / math.sqrt(q.shape[-1]), np.promote_types(q.dtype, np.float32)
    queries, keys = chunks(q.shape[-2], query_chunk), chunks(k.shape[-2], key_chunk)

    def exponentials(rows, columns):
        S = scale * q[..., rows, :] @ k[..., columns, :].mT
        bias = extras.bias(rows, columns)
        if bias is not None:
            S = S + bias
        m = S.max(axis=-1, keepdims=True)
        return np.exp(S - m), m

    def summary(rows, columns):
        E, m = exponentials(rows, columns)
        return dropped(E, extras.Z(rows, columns)) @ v[..., columns, :], E.sum(axis=-1, keepdims=True, dtype=wide), m

    def combined(rows):
        """o, its denominator, and the weight of each chunk."""
        parts, sums, maxima = zip(*(summary(rows, columns) for columns in keys))
        m = xp.max(xp.stack(maxima), axis=0)
        weights = [np.exp((x - m).astype(wide)) for x in maxima]
        total = sum(w * x for w, x in zip(weights, sums))
        return sum(w * x for w, x in zip(weights, parts)) / total, total, weights

    def backprop(do):
        dq, dk, dv = (xp.zeros(x.shape, wide) for x in (q, k, v))
        for rows in queries:
            o, total, weights = combined(rows)
            dA = do[..., rows, :] / total  # o = A / total, both sums over the chunks
            dtotal = -(dA * o).sum(axis=-1, keepdims=True)
            for columns, w in zip(keys, weights):
                E, _ = exponentials(rows, columns)
                Z, dO = extras.Z(rows, columns), (w * dA).astype(q.dtype)
                dE = dropped(dO @ v[..., columns, :].mT, Z) + (w * dtotal).astype(q.dtype)
                dS = E * dE
                dq[..., rows, :] += scale * dS @ k[..., columns, :]
                dk[..., columns, :] += scale * dS.mT @ q[..., rows, :]
                dv[..., columns, :] += dropped(E, Z).mT @ dO
        return tuple(x.astype(q.dtype) for x in (dq, dk, dv))

    o = xp.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    for rows in queries:
        o[..., rows, :], _, _ = combined(rows)
    return o, backprop


def linformer(xp, q, k, v, extras, projections):
    """softmax(scale Q (E K)^T) (F V), E and F = projections of seqlen_k keys onto a few; returns dE and dF, too."""
    if extras.causal:
        raise ValueError("Linformer mixes keys before it knows of queries: it is not causal")
    E, F = projections
    kept = extras.keys()
    if kept is not None:
        k, v = k * kept, v * kept
    small = Extras(xp, (*q.shape[:-1], len(E)), q.dtype, dropout=extras.dropout)
    o, backprop_small = standard_vjp(q, E @ k, F @ v, Z=small.Z())

    def backprop(do):
        dq, dk_small, dv_small = backprop_small(do)
        dE, dF = (xp.tensordot(dx, x, ((0, 1, 3), (0, 1, 3))) for dx, x in ((dk_small, k), (dv_small, v)))
        return dq, dropped(E.T @ dk_small, kept), dropped(F.T @ dv_small, kept), dE, dF

    return o, backprop


def linear(xp, q, k, v, extras):
    """Linear attention: phi(Q) (phi(K)^T V) over phi(Q) (phi(K)^T 1), phi = elu + 1."""
    if extras.causal:
        raise ValueError("linear attention that is causal is a recurrence, not a formula of arrays")
    if extras.dropout:
        raise ValueError("linear attention has no matrix P to drop from")
    Q, dQ_dq = phi(xp, q)
    K, dK_dk = phi(xp, k)
    kept, share = extras.keys(), 1 / math.sqrt(k.shape[-2])  # which cancels, and keeps sums within float16
    factor = share if kept is None else share * kept
    K = K * factor
    A, z = K.mT @ v, K.sum(axis=-2, keepdims=True)
    total = Q @ z.mT
    o = Q @ A / total

    def backprop(do):
        dO = do / total
        dtotal = -(dO * o).sum(axis=-1, keepdims=True)
        dA, dz = Q.mT @ dO, dtotal.mT @ Q
        return (dO @ A.mT + dtotal * z) * dQ_dq, (v @ dA.mT + dz) * factor * dK_dk, K @ dA

    return o, backprop


def phi(xp, x):
    """elu(x) + 1 and its derivative."""
    slope = np.exp(xp.minimum(x, 0))
    return xp.maximum(x, 0) + slope, slope


def dropped(P, Z):
    return P if Z is None else P * Z


def chunks(length, size):
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
