"""The public functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Generic

from .base.checks import A, Array, flag
from .base.gradients import Gradients
from .base.keywords import knows_others
from .caches.kv_cache import KVCache
from .call import passes
from .call.problem import Saved, checked_gradients, describe, refuse_cache, without_v
from .dropout import Dropout
from .jets import SecondBackprop, attention_backward_vjp
from .masks import Mask
from .scores import Scores


@dataclass(frozen=True)
class Backprop(Generic[A]):
    """The closure that `attention_vjp` returns: the gradients, as from `attention_backward`, and `vjp` for theirs."""

    saved: Saved[A]

    def __call__(self, do: Array, dlse: Array | None = None, deterministic: bool = False) -> Gradients[A]:
        return attention_backward(do, self.saved, dlse=dlse, deterministic=deterministic)

    def vjp(
        self, do: Array, dlse: Array | None = None, deterministic: bool = False
    ) -> tuple[Gradients[A], SecondBackprop[A]]:
        """Gradients, and theirs as a closure: see `attention_backward_vjp`."""
        return attention_backward_vjp(do, self.saved, dlse=dlse, deterministic=deterministic)


@knows_others
def attention(
    q: A,
    k: A | KVCache,
    v: A | None = None,
    *,
    causal: bool = False,
    mask: Mask | Array | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    score: Scores = None,
    out: A | None = None,
) -> A:
    """Exact attention, softmax(scale Q K^T) V, in memory linear in the sequence length.

    Broadcasts like a generalized ufunc of the signature ``(m,d),(n,d),(n,e)->(m,e)``: the last two axes are (sequence,
    features), all others are batch axes and broadcast as in `numpy.matmul`. Axis -3 is the heads; k and v, of as
    many each, may have fewer than q, which then has a multiple of their number: query head h uses key head
    h // group_size.

    Parameters
    ----------
    q : array, (..., seqlen_q, head_dim)
    k : array, (..., seqlen_k, head_dim), or KVCache
    v : array, (..., seqlen_k, head_dim_v); left out with a cache
        NumPy arrays or CuPy arrays, all of one dtype: float16, bfloat16 (of ml_dtypes), float32 or float64. Any
        strides: (batch, sequence, heads, features) is passed as ``x.swapaxes(-2, -3)``. With a `KVCache`, which may be
        narrower than q, the queries, (batch, heads, seqlen_q, head_dim), are those of each sequence's last tokens, and
        seqlen_k is its capacity; in a ragged batch they are packed, (heads, total, head_dim), and `Segments` in the
        mask says whose they are.
    causal : bool, optional
        The same as ``mask=Causal()``; with a mask too, both hold.
    mask : a mask such as Causal, Window, Lengths or Segments, ``&`` and ``|`` of masks, or a boolean array, optional
        True = visible. A query that sees nothing gets o = 0. A boolean array broadcasts as in NumPy against
        (..., seqlen_q, seqlen_k).
    scale : float, optional
        Finite and > 0. Default: 1 / sqrt(head_dim).
    dropout : Dropout, optional
        Which elements of P to drop.
    score : Softcap, Alibi, Bias, RelativeBias, Score, Sink, or a list of them, optional
        What happens to S = scale Q K^T before the mask, in this order. What it makes of a masked element does not
        matter.
    out : array, (..., seqlen_q, head_dim_v), optional
        Where to put the result; for packed queries (heads, total, head_dim_v). It must not overlap itself, q, k, v or
        an array of the cache, the mask or the score.

    Returns
    -------
    o : array, (..., seqlen_q, head_dim_v), of the dtype of q

    Raises
    ------
    TypeError
        For arguments that are not arrays, or of the wrong kind or dtype.
    ValueError
        For shapes and numbers that do not fit. Both errors name the argument, what it got and what it takes.

    Notes
    -----
    Algorithms 1 and 2 of Dao, Fu, Ermon, Rudra and Re, "FlashAttention" (NeurIPS 2022), with base-2 exponentials. Sums
    are accumulated in float32, or in float64 for float64.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 8, 100, 64), dtype=np.float32)
    >>> na.attention(q, k, v, causal=True).shape
    (2, 8, 100, 64)
    """
    o, _ = _forward(False, q, k, v, causal, mask, scale, dropout, score, out)
    return o


@knows_others
def attention_forward(
    q: A,
    k: A | KVCache,
    v: A | None = None,
    *,
    causal: bool = False,
    mask: Mask | Array | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    score: Scores = None,
    out: A | None = None,
) -> tuple[A, Saved[A]]:
    """`attention`, and what `attention_backward` needs.

    Parameters
    ----------
    q, k, v, causal, mask, scale, dropout, score, out
        As in `attention`.

    Returns
    -------
    o : array, (..., seqlen_q, head_dim_v)
    saved : Saved
        For `attention_backward`, unless k is a cache. ``saved.lse``, (..., seqlen_q), is the natural logarithm of the
        sum of exponentials of the visible scores: float32, or float64 for float64; -inf where a query sees nothing.
        `saved` refers to q, k, v and o: editing them in place between the two calls changes the gradients.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `attention`.

    Notes
    -----
    With a v of no features, as ``v[..., :0]``, only lse is computed, at the cost of one of the two products.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 100, 64))
    >>> o, saved = na.attention_forward(q, k, v, mask=na.Window(16, 0))
    >>> saved.lse.shape
    (100,)
    """
    return _forward(True, q, k, v, causal, mask, scale, dropout, score, out)


def attention_backward(
    do: Array,
    saved: Saved[A],
    *,
    dlse: Array | None = None,
    deterministic: bool = False,
) -> Gradients[A]:
    """The exact gradients of `attention_forward`.

    Parameters
    ----------
    do : array, (..., seqlen_q, head_dim_v)
        The gradient of o. Another floating dtype is converted.
    saved : Saved
        What `attention_forward` or `Saved.of` returned. It refers to q, k, v and o: if they have been edited in place
        since then, gradients are wrong.
    dlse : array, (..., seqlen_q), optional
        The gradient of ``saved.lse``, converted likewise; ignored where lse is -inf.
    deterministic : bool, optional
        Ask for gradients that are equal bit for bit from call to call. They already are, except, on GPUs, dq in float16
        and bfloat16 from compute capability 8.0 on (9.0: with head_dims up to 128, and there those of slopes and of
        tables) and the gradients of a Score's arrays, which blocks add up in the order in which they happen to run, and
        except for those that cuBLAS multiplies (see the README's limits) if several streams use it. The deterministic
        path is slower there, for dq on 9.0 with masks that are bands by a few per cent, and takes 88 bytes of memory
        for each element of a Score's arrays.

    Returns
    -------
    dq, dk, dv : arrays
        Of the shapes and dtypes of q, k, v, summed over broadcast axes. The tuple has the attribute `score`: the
        gradients of the arrays in `score`, likewise, in their order; None for one that is not wanted.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `attention`.

    Notes
    -----
    Algorithm 4 of the paper: P is recomputed, tile by tile, from q, k and lse;
    dS = P (dP - rowsum(dO * O) + dlse). `saved` also has what rounding took from lse, except on a GPU in float16 and
    bfloat16, and after `Saved.of`: there scores of size s give the gradients a relative error of up to s rounding
    errors of float32 (of float64 for float64). The recomputed P is at most 1 all the same.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, k, v, do = np.random.default_rng(0).standard_normal((4, 100, 64))
    >>> o, saved = na.attention_forward(q, k, v)
    >>> dq, dk, dv = na.attention_backward(do, saved)
    >>> dq.shape
    (100, 64)
    """
    do, dlse = checked_gradients(saved, do, dlse)
    flag("deterministic", deterministic)
    return passes.backward(saved, do, dlse, deterministic)


@knows_others
def attention_vjp(
    q: A,
    k: A,
    v: A | None = None,
    *,
    causal: bool = False,
    mask: Mask | Array | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    score: Scores = None,
    out: A | None = None,
) -> tuple[A, Backprop[A]]:
    """`attention` with its gradients as a closure.

    Parameters
    ----------
    q, k, v, causal, mask, scale, dropout, score, out
        As in `attention`, but k is not a cache.

    Returns
    -------
    o : array, (..., seqlen_q, head_dim_v)
    backprop : function
        ``backprop(do, dlse=None, deterministic=False)`` returns dq, dk, dv: see `attention_backward`.
        ``backprop.vjp``, called the same way, returns these and a closure for their own gradients: see
        `attention_backward_vjp`. It refers to q, k, v and o: editing them in place before it is called, as in
        ``o += x``, changes the gradients; ``o = o + x`` does not.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `attention`.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, k, v, do = np.random.default_rng(0).standard_normal((4, 100, 64))
    >>> o, backprop = na.attention_vjp(q, k, v, causal=True)
    >>> dq, dk, dv = backprop(do)
    >>> dv.shape
    (100, 64)
    """
    refuse_cache(k)
    o, saved = _forward(True, q, k, v, causal, mask, scale, dropout, score, out)
    return o, Backprop(saved)


@knows_others
def attention_weights(
    q: A,
    k: A | KVCache,
    *,
    causal: bool = False,
    mask: Mask | Array | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    score: Scores = None,
) -> A:
    """P itself, softmax(scale Q K^T), to look at: an array of seqlen_q x seqlen_k for every head.

    It takes memory that grows with seqlen_q x seqlen_k; `attention` never stores it.

    Parameters
    ----------
    q, k, causal, mask, scale, dropout, score
        As in `attention`. Batch axes that q and k lack, which v may have there, come from the arrays of mask and
        score. With dropout the weights are those that multiply v: 0 where dropped, else scaled.

    Returns
    -------
    weights : array, (..., seqlen_q, seqlen_k), of the dtype of q
        For packed queries (heads, total, capacity). Without dropout rows sum to 1, or to 0 where a query sees nothing.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `attention`.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, k = np.zeros((2, 3, 8))
    >>> na.attention_weights(q, k, causal=True).round(2)
    array([[1.  , 0.  , 0.  ],
           [0.5 , 0.5 , 0.  ],
           [0.33, 0.33, 0.33]])
    """
    v = without_v(q, k, mask, score)
    problem, inputs = describe(q, k, v, causal, mask, scale, dropout, score)
    P = passes.weights(problem, inputs)
    return P if inputs.packing is None else inputs.packing.packed(P)


def _forward(
    save: bool, q: Any, k: Any, v: Any, causal: bool, mask: Any, scale: Any, dropout: Any, score: Any, out: Any
) -> tuple[Any, Any]:
    """o, and what is saved or None."""
    problem, inputs = describe(q, k, v, causal, mask, scale, dropout, score, out, may_wait=True)
    packing = inputs.packing
    o, saved = passes.forward(problem, inputs, out if packing is None else None, save)
    if packing is not None:
        o = packing.packed(o, out)
        saved = saved and Saved(problem, inputs, o, packing.packed(saved.lse, fill=-math.inf))
    return o, saved
