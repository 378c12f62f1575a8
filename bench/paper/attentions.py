"""Attention of packed sequences, by numbattn and by the standard formula: from q, k, v of (heads, tokens, head_dim) and
offsets of sequences, NumPy's, to o and a function from do to dq, dk, dv."""

import numpy as np
from peers import cupy

import numbattn as na


def packed(xp, offsets, longest):
    """numbattn's."""
    mask = na.Segments(xp.asarray(offsets))
    return lambda q, k, v: na.attention_vjp(q, k, v, mask=mask)


def standard(xp, offsets, longest):
    """The paper's Algorithms 0 and 3, which keep S and P, in place where possible, of sequences padded to the longest.
    Padding is read from what follows the last sequence, whose gradients are zero."""
    lengths, at = np.diff(offsets)[:, None], np.arange(longest)
    real = at < lengths
    read = xp.asarray(np.where(real, offsets[:-1, None] + at, offsets[-1]))
    hidden = xp.asarray(np.where(real, 0, -np.inf)[:, None], np.float16)
    written, padded = (xp.asarray(x) for x in (np.arange(offsets[-1]), np.flatnonzero(real)))

    def pack(x, like):
        y = xp.zeros_like(like)
        y[:, written] = x.reshape(len(x), -1, x.shape[-1])[:, padded]
        return y

    def attention(*qkv):
        scale = qkv[0].shape[-1] ** -0.5
        q, k, v = (x[:, read] for x in qkv)  # (heads, sequences, longest, head_dim)
        q *= scale
        P = product(q, k.mT)
        P += hidden
        P -= P.max(axis=-1, keepdims=True)
        np.exp(P, out=P)
        P /= P.sum(axis=-1, keepdims=True)
        o = product(P, v)

        def backprop(do):
            dO = do[:, read]
            dS = product(dO, v.mT)
            dS -= (dO * o).sum(axis=-1, keepdims=True)  # rowsum(P * dP), as Algorithm 4 has it
            dS *= P
            dq, dk, dv = scale * product(dS, k), product(dS.mT, q), product(P.mT, dO)
            return tuple(pack(dx, x) for dx, x in zip((dq, dk, dv), qkv))

        return pack(o, qkv[0]), backprop

    return attention


ATTENTIONS = {"numbattn": packed, "standard": standard}


def product(a, b):
    """a @ b for stacks of matrices. CuPy 14.2 first converts float16 to float32, needlessly: cupy#10317."""
    if a.dtype != np.float16:
        return a @ b
    from cupy.cuda import cublas, runtime

    c = cupy.empty((*a.shape[:-1], b.shape[-1]), a.dtype)
    *_, m, n, k = *c.shape, a.shape[-1]
    (a, *of_a), (b, *of_b) = _operand(a), _operand(b)
    one, zero = np.array([[1], [0]], np.float32)
    half = runtime.CUDA_R_16F
    cublas.gemmStridedBatchedEx(  # of matrices stored column by column: c^T = b^T a^T
        cupy.cuda.device.get_cublas_handle(), of_b[0], of_a[0], n, m, k, one.ctypes.data,
        b.data.ptr, half, of_b[1], k * n, a.data.ptr, half, of_a[1], m * k, zero.ctypes.data,
        c.data.ptr, half, n, m * n, c.size // (m * n), cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT,
    )  # fmt: skip
    return c


def _operand(x):
    """x in memory as a stack of contiguous matrices, whether these are transposed, and the length of their rows."""
    if x.mT.flags.c_contiguous:
        return x, 1, x.shape[-2]
    return cupy.ascontiguousarray(x), 0, x.shape[-1]
