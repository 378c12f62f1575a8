"""Attention over disjoint keys, merged: the mean of partial results, weighted by their sums of exponentials."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any, Protocol

import numpy as np

from .base.backends import backend
from .base.checks import DTYPES, FLOATING, A, Array, dtype_of_sums, library, same_library, words_for
from .base.values import rounded, rowsum

# NumPy's functions pass CuPy's arrays on to CuPy


class MergeBackprop(Protocol[A]):
    """The closure that `merge_vjp` returns."""

    def __call__(self, do: Array, dlse: Array | None = None) -> list[tuple[A, A]]: ...


def merge(states: Iterable[tuple[A, A]]) -> tuple[A, A]:
    """Attention over all keys, from results over disjoint parts of them.

    Parameters
    ----------
    states : sequence of (o, lse)
        One for each part of the keys: o, (..., seqlen_q, head_dim), and lse, (..., seqlen_q), the natural logarithm of
        the sum of exponentials, as `attention_forward` returns them; all of one shape and dtype. A `Sink` belongs to
        one part only.

    Returns
    -------
    o : array, (..., seqlen_q, head_dim), of the dtype of the parts
    lse : array, (..., seqlen_q), float32, or float64 for float64
        Where all parts are empty, o is 0 and lse is -inf.

    Raises
    ------
    TypeError
        For anything but pairs of arrays, and for a wrong dtype.
    ValueError
        For no states, and for shapes that do not fit.

    Notes
    -----
    lse = log(sum_i exp(lse_i)) and o = sum_i exp(lse_i - lse) o_i, in float32, or in float64 for float64, in the order
    of the states.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 100, 64))
    >>> parts = [na.attention_forward(q, k[:, keys], v[:, keys]) for keys in (slice(0, 30), slice(30, 100))]
    >>> o, lse = na.merge([(o, saved.lse) for o, saved in parts])
    >>> np.allclose(o, na.attention(q, k, v))
    True
    """
    checked = _checked(states)
    o, lse, _ = _merged(checked)
    return rounded(o, checked[0][0].dtype), lse


def merge_vjp(states: Iterable[tuple[A, A]]) -> tuple[tuple[A, A], MergeBackprop[A]]:
    """`merge` with its gradients as a closure.

    Parameters
    ----------
    states : sequence of (o, lse)
        As in `merge`.

    Returns
    -------
    o, lse : tuple of arrays
        As in `merge`.
    backprop : function
        ``backprop(do, dlse=None)`` returns the gradients [(do_i, dlse_i), ...] of the states, 0 for empty ones. It
        refers to the states: editing them in place before it is called changes the gradients.

    Raises
    ------
    TypeError, ValueError
        As in `merge`, and for a do or dlse that does not fit.

    Notes
    -----
    With w_i = exp(lse_i - lse): do_i = w_i do, dlse_i = w_i (do . (o_i - o) + dlse), where . sums over head_dim.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> o, lse = np.random.default_rng(0).standard_normal((2, 100, 64)), np.zeros((2, 100))
    >>> (merged, merged_lse), backprop = na.merge_vjp(zip(o, lse))
    >>> (do_0, dlse_0), (do_1, dlse_1) = backprop(np.ones_like(merged))
    >>> do_0.shape, dlse_0.shape
    ((100, 64), (100,))
    """
    checked = _checked(states)
    o, lse, weights = _merged(checked)
    dtype = checked[0][0].dtype

    @np.errstate(under="ignore")
    def backprop(do: Array, dlse: Array | None = None) -> list[tuple[A, A]]:
        dO = _gradient("do", do, o)
        dL = 0 if dlse is None else _gradient("dlse", dlse, lse)
        found: list[Any] = []
        for (o_i, _), w in zip(checked, weights):
            along = rowsum(dO, o_i.astype(o.dtype, copy=False) - o) + dL
            found.append(((w[..., None] * dO).astype(dtype, copy=False), np.where(w == 0, 0, w * along)))
        return found

    return (rounded(o, dtype), lse), backprop


@np.errstate(under="ignore")
def merge_into(out: Any, o: Any, lse: Any, part: Any, part_lse: Any) -> None:
    """Add attention over other keys to o and lse, all in the dtype of sums: o in out, which may be o, or have another
    dtype; lse in place."""
    if library(o) == "cupy":
        backend("cupy").merge_into(out, o, lse, part, part_lse)
    else:
        out[...], lse[...], _ = _merged([(o, lse), (part, part_lse)])


@np.errstate(under="ignore")
def sum_into(out: Any, *terms: Any) -> None:
    """Add up arrays in the dtype of sums, in out, which may be one of them, or have another dtype."""
    if library(out) == "cupy":
        backend("cupy").sum_into(out, *terms)
    else:
        out[...] = reduce(np.add, terms)


@np.errstate(under="ignore", invalid="ignore", divide="ignore")
def _merged(states: list[tuple[Any, Any]]) -> tuple[Any, Any, list[Any]]:
    """o, in the dtype of lse, lse, and the weight exp(lse_i - lse) of each state."""
    highest = reduce(np.maximum, [lse for _, lse in states])
    m = np.where(highest == -np.inf, 0, highest)  # finite where all parts are empty, since (-inf) - (-inf) is NaN
    weights = [np.exp(lse - m) for _, lse in states]
    l = reduce(np.add, weights)
    lse = np.where(highest == np.inf, highest, m + np.log(l))
    weights = [w / np.where(l == 0, 1, l) for w in weights]
    return reduce(np.add, [w[..., None] * _seen(o, w) for (o, _), w in zip(states, weights)]), lse, weights


def _seen(o: Any, w: Any) -> Any:
    """o, widened, and 0 where its weight is 0, even if it is NaN."""
    return np.where(w[..., None] == 0, 0, o.astype(w.dtype, copy=False))


def _checked(states: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """The states as a list of pairs of equal shapes and dtypes."""
    try:
        pairs = [tuple(state) for state in states]
    except TypeError:
        raise TypeError(f"states: got {words_for(states)}, expected pairs (o, lse)") from None
    if not pairs:
        raise ValueError("states: got none, expected one or more pairs (o, lse)")
    for n, pair in enumerate(pairs):
        if len(pair) != 2:
            raise TypeError(f"states[{n}]: got {len(pair)} values, expected a pair (o, lse)")
    first, _ = pairs[0]
    for n, (o, lse) in enumerate(pairs):
        same_library(**{"o of states[0]": first, f"o of states[{n}]": o, f"lse of states[{n}]": lse})
        _check_alike(f"states[{n}]", o, lse, first)
    return [(o, lse) for o, lse in pairs]


def _check_alike(name: str, o: Any, lse: Any, first: Any) -> None:
    """Refuse a state that does not fit the first one's o."""
    if first.dtype not in DTYPES:
        raise TypeError(f"{name}: got o of {first.dtype}, allowed {FLOATING}")
    if first.ndim < 2:
        raise ValueError(f"{name}: got o of the shape {first.shape}, expected (..., seqlen_q, head_dim)")
    wanted = ("o", o, first.shape, first.dtype), ("lse", lse, first.shape[:-1], dtype_of_sums(first.dtype))
    for what, x, shape, dtype in wanted:
        if x.shape != shape:
            raise ValueError(f"{name}: got {what} of the shape {x.shape}, expected {shape}")
        if x.dtype != dtype:
            raise TypeError(f"{name}: got {what} of {x.dtype}, expected {dtype}")


def _gradient(name: str, x: Any, like: Any) -> Any:
    """A gradient of a result, in the dtype of sums."""
    if library(x) is None or x.dtype not in DTYPES:
        raise TypeError(f"{name}: got {words_for(x)}, expected an array of {FLOATING}")
    same_library(merged=like, **{name: x})
    if x.shape != like.shape:
        raise ValueError(f"{name}: got the shape {x.shape}, expected {like.shape}")
    return rounded(x, like.dtype)
