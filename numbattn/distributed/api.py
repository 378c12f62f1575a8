"""The public functions: those of `numbattn`, for sequences that are split over the ranks of a ring."""

from __future__ import annotations

from typing import Any, Protocol

from ..base.gradients import Gradients
from ..dropout import Dropout
from ..masks import Mask
from ..scores import Scores
from .driver import Ring, checked
from .over_keys import over_keys
from .rank import backward, forward
from .share import RingOptions


class Backprop(Protocol):
    """The closure that `attention_vjp` returns."""

    def __call__(self, do: Any, dlse: Any = None, deterministic: bool = False) -> Gradients[Any]: ...


def attention(
    ring: Ring, q: Any, k: Any, v: Any, *, causal: bool = False, mask: Mask | Any = None, scale: float | None = None,
    dropout: Dropout | None = None, score: Scores = None, plan: str | None = None,
) -> Any:  # fmt: skip
    """`numbattn.attention` of sequences that are split over ranks, with the same options and results.

    Parameters
    ----------
    ring : Simulated, Devices, Nccl or Mpi
    q, k, v : arrays, or lists of arrays
        This rank's parts, as ``ring.split`` makes them, or, if all ranks are in one process, a list of the parts of
        each. All ranks have the same batch axes, dtype and options.
    causal, mask, scale, dropout, score
        As in `numbattn.attention`, for the whole sequences. Arrays with a row for each query (in Dense, Bits, Intervals
        and Bias) have all rows, or, in a process that is one rank, those of its own part.
    plan : "ring" or "heads", optional
        What travels: keys and values, to ranks whose queries see them; or sequences for heads, which takes a multiple
        of the number of ranks as heads of k and v. Default: the plan that sends less, if both give ranks equal work:
        see ``python -m numbattn plan --devices``.

    Returns
    -------
    o : array, or list of arrays
        As q.

    Raises
    ------
    TypeError, ValueError
        As in `numbattn.attention`, on all ranks. Also if ranks differ in shapes, dtype or options; the message shows
        the difference.
    Interrupted
        After a call of the ring that was interrupted on some rank: see `Ring.reset`.

    Notes
    -----
    In a ring each rank computes with the keys of all ranks, one after the other: Liu, Zaharia and Abbeel, "Ring
    Attention with Blockwise Transformers" (ICLR 2024). Parts are added up in float32, or in float64 for float64. Pieces
    that nobody on a rank sees are not sent there. By heads each rank computes with all queries and keys of its share of
    the heads: Jacobs et al., "DeepSpeed Ulysses" (2023). Dropout drops the same elements for any number of ranks.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> from numbattn import distributed as nad
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 100, 16))
    >>> ring = nad.Simulated(3)
    >>> o = nad.attention(ring, *map(ring.split, (q, k, v)), causal=True)
    >>> np.allclose(ring.join(o), na.attention(q, k, v, causal=True))
    True
    """
    o, _ = attention_forward(
        ring, q, k, v, causal=causal, mask=mask, scale=scale, dropout=dropout, score=score, plan=plan
    )
    return o


def attention_forward(
    ring: Ring, q: Any, k: Any, v: Any, *, causal: bool = False, mask: Mask | Any = None, scale: float | None = None,
    dropout: Dropout | None = None, score: Scores = None, plan: str | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """`attention`, and what `attention_backward` needs.

    Parameters
    ----------
    ring, q, k, v, causal, mask, scale, dropout, score, plan
        As in `attention`.

    Returns
    -------
    o : array, or list of arrays
    saved : Saved, or list of Saved
        For `attention_backward`, one for each rank. ``saved.lse``, (..., seqlen_q of the rank), is as from
        `numbattn.attention_forward`.

    Raises
    ------
    TypeError, ValueError
        As in `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import distributed as nad
    >>> ring = nad.Simulated(2)
    >>> q, k, v = (ring.split(x) for x in np.random.default_rng(0).standard_normal((3, 8, 100, 16)))
    >>> o, saved = nad.attention_forward(ring, q, k, v)
    >>> [own.lse.shape for own in saved]
    [(8, 36), (8, 64)]
    """
    options = RingOptions(causal, mask, scale, dropout, score, plan)
    o, saved = checked(ring)._run(forward, {"q": q, "k": k, "v": v}, options)
    return o, saved


def attention_backward(ring: Ring, do: Any, saved: Any, *, dlse: Any = None, deterministic: bool = False) -> Any:
    """The exact gradients of `attention_forward`.

    Parameters
    ----------
    ring : Simulated, Devices, Nccl or Mpi
    do : array, or list of arrays
        The gradient of o, likewise.
    saved : Saved, or list of Saved
        What `attention_forward` returned. If q, k or v have been edited in place since then, gradients are wrong.
    dlse : array, or list of arrays, optional
        The gradient of ``saved.lse``.
    deterministic : bool, optional
        As in `numbattn.attention_backward`.

    Returns
    -------
    dq, dk, dv : arrays, or lists of arrays
        For each rank's own parts. The attribute `score` is as in `numbattn.attention_backward`: gradients of arrays
        that all ranks hold are summed over ranks; those of one rank's rows are its own.

    Raises
    ------
    TypeError, ValueError
        As in `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import distributed as nad
    >>> ring = nad.Simulated(2)
    >>> q, k, v, do = (ring.split(x) for x in np.random.default_rng(0).standard_normal((4, 8, 100, 16)))
    >>> o, saved = nad.attention_forward(ring, q, k, v)
    >>> dq, dk, dv = nad.attention_backward(ring, do, saved)
    >>> [x.shape for x in dq]
    [(8, 36, 16), (8, 64, 16)]
    """
    dq, dk, dv, score = checked(ring)._run(backward, {"do": do, "dlse": dlse, "saved": saved}, deterministic)
    return Gradients(dq, dk, dv, ring._of_score(score, saved))


def attention_vjp(
    ring: Ring, q: Any, k: Any, v: Any, *, causal: bool = False, mask: Mask | Any = None, scale: float | None = None,
    dropout: Dropout | None = None, score: Scores = None, plan: str | None = None,
) -> tuple[Any, Backprop]:  # fmt: skip
    """`attention` with its gradients as a closure.

    Parameters
    ----------
    ring, q, k, v, causal, mask, scale, dropout, score, plan
        As in `attention`.

    Returns
    -------
    o : array, or list of arrays
    backprop : function
        ``backprop(do, dlse=None, deterministic=False)`` returns dq, dk, dv: see `attention_backward`. All ranks call
        it.

    Raises
    ------
    TypeError, ValueError
        As in `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import distributed as nad
    >>> ring = nad.Simulated(2)
    >>> q, k, v, do = (ring.split(x) for x in np.random.default_rng(0).standard_normal((4, 8, 100, 16)))
    >>> o, backprop = nad.attention_vjp(ring, q, k, v, causal=True)
    >>> dq, dk, dv = backprop(do)
    """
    o, saved = attention_forward(
        ring, q, k, v, causal=causal, mask=mask, scale=scale, dropout=dropout, score=score, plan=plan
    )

    def backprop(do: Any, dlse: Any = None, deterministic: bool = False) -> Gradients[Any]:
        return attention_backward(ring, do, saved, dlse=dlse, deterministic=deterministic)

    return o, backprop


def attention_over_keys(
    ring: Ring, q: Any, k: Any, v: Any = None, *, causal: bool = False, mask: Mask | Any = None,
    scale: float | None = None, score: Scores = None,
) -> Any:  # fmt: skip
    """`numbattn.attention` of queries that all ranks have and keys that are split over ranks: for decoding.

    Keys stay where they are. Each rank computes with its own, and results travel: o and lse, in float32 or float64.

    Parameters
    ----------
    ring : Simulated, Devices, Nccl or Mpi
    q : array, (..., seqlen_q, head_dim), or list of arrays
        All queries, the same on every rank; if all ranks are in one process, a list with a copy for each rank.
    k, v : arrays, or lists of arrays; or k : KVCache, or list of KVCache
        Parts of keys and values, as ``ring.split`` makes them. Or each rank's cache, without v: a rank's tokens of a
        sequence follow those of earlier ranks, any number on each, so that new ones are appended on the last rank. If
        neither mask nor score counts keys, it does not matter which token is on which rank.
    causal, mask, scale
        As in `numbattn.attention`, for the whole sequences: without an offset their last tokens are the queries. With
        caches a mask may consist of Causal, Window, Lengths, First, Prefix and Tail.
    score
        Likewise; with caches of Softcap, Alibi, RelativeBias and Sink, which counts once.

    Returns
    -------
    o : array, or list of arrays
        (..., seqlen_q, head_dim_v), of the dtype of q, equal bit for bit on all ranks.

    Raises
    ------
    TypeError, ValueError
        As in `attention`.

    Notes
    -----
    There are no gradients and no dropout. With caches ranks also exchange their lengths if a mask or a score counts
    keys; on GPUs these are not read on the host.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> from numbattn import distributed as nad
    >>> k, v = np.random.default_rng(0).standard_normal((2, 1, 8, 100, 16))
    >>> q, ring = k[:, :, -1:], nad.Simulated(2)
    >>> caches = [na.KVCache.zeros(1, 8, 100, 16, like=q) for _ in range(2)]
    >>> caches[0].append(k[:, :, :70], v[:, :, :70])
    >>> caches[1].append(k[:, :, 70:], v[:, :, 70:])
    >>> o, same = nad.attention_over_keys(ring, [q, q], caches, mask=na.Window(50, 0))
    >>> np.allclose(o, na.attention(q, k, v, mask=na.Window(50, 0)))
    True
    """
    (o,) = checked(ring)._run(over_keys, {"q": q, "k": k, "v": v}, RingOptions(causal, mask, scale, None, score))
    return o
