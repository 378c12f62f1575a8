"""Arrays turned by their positions, with gradients and tangents."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from ..base.backends import backend
from ..base.checks import (
    DTYPES,
    A,
    Integers,
    check_apart,
    check_axes,
    check_writable,
    dtype_of_sums,
    library,
    lies_within_rows,
    no_floats,
    other_dtype,
    overlap,
    same_library,
    words_for,
)  # fmt: skip
from ..base.values import moved
from .value import Rotary

TAKER = "numbattn.rotary"
TAKEN = tuple(map(np.dtype, ("int32", "int64", "float32", "float64")))  # dtypes of positions in kernels
LEAD = 2  # axes before the heads in kernels


class RotaryBackprop(Protocol[A]):
    """The closure that `rotary_vjp` returns."""

    def __call__(self, dy: A, *, out: A | None = None) -> A: ...


def rotary(x: A, positions: Integers, rotary: Rotary, *, out: A | None = None) -> A:
    """Turn queries, or keys, by their positions.

    Parameters
    ----------
    x : array, (..., seqlen, features)
        NumPy or CuPy, of float16, bfloat16, float32 or float64, of any strides.
    positions : array of integers or floats
        (seqlen,), for all of x; or with as many axes as x before the features, (..., seqlen), each of full size or 1:
        (batch, 1, seqlen) for the x of several heads. With one more axis, (..., seqlen, axes), tokens have positions
        along several axes, in images and volumes: each turns an equal part of the features. They have no gradient.
    rotary : Rotary
    out : array, optional
        Where to put the result: of the shape and dtype of x, or x itself.

    Returns
    -------
    y : array, (..., seqlen, features), of the dtype of x

    Raises
    ------
    TypeError, ValueError
        For what does not fit. Both errors name the argument, what it got and what it takes.

    See Also
    --------
    rotary_vjp, rotary_jvp : with derivatives.
    KVCache.append : which turns keys as it writes them.

    Notes
    -----
    Features f and f + w / 2 (interleaved: 2 f and 2 f + 1), a and b, become a cos(t) - b sin(t) and b cos(t) +
    a sin(t), where t = position * base**(-2 f / w). Angles are computed in float64, so that positions of millions cost
    no digits; all else in float32, or in float64 for float64.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, k = np.random.default_rng(0).standard_normal((2, 8, 100, 64))
    >>> turn = na.Rotary()
    >>> near, far = (na.rotary(q, np.arange(100) + n, turn) @ na.rotary(k, np.arange(100) + n, turn).swapaxes(1, 2)
    ...              for n in (0, 9))
    >>> np.allclose(near, far)                                    # only distances count
    True
    """
    _check(rotary, x=x)
    return _turned(x, positions, rotary, out)


def rotary_vjp(
    x: A, positions: Integers, rotary: Rotary, *, out: A | None = None
) -> tuple[A, RotaryBackprop[A]]:  # fmt: skip
    """`rotary` with its gradient as a closure.

    Parameters
    ----------
    x, positions, rotary, out
        As in `rotary`.

    Returns
    -------
    y : array, (..., seqlen, features)
    backprop : function
        ``backprop(dy, out=None)`` returns dx: dy turned back. It needs no x, and keeps positions alone.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `rotary`.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q = np.random.default_rng(0).standard_normal((8, 100, 64))
    >>> y, backprop = na.rotary_vjp(q, np.arange(100), na.Rotary())
    >>> np.allclose(backprop(y), q)                               # without scaling lengths stay as they are
    True
    """
    _check(rotary, x=x)
    y = _turned(x, positions, rotary, out)
    shape, dtype = x.shape, x.dtype

    def backprop(dy: A, *, out: A | None = None) -> A:
        _check(rotary, dy=dy)
        _check_alike("dy", dy, shape, dtype, "x")
        return _turned(dy, positions, rotary, out, back=True)

    return y, backprop


def rotary_jvp(x: A, tx: A, positions: Integers, rotary: Rotary, *, out: A | None = None) -> tuple[A, A]:
    """`rotary` and its tangent.

    Parameters
    ----------
    x, positions, rotary, out
        As in `rotary`.
    tx : array, of the shape and dtype of x
        The tangent of x; for several at once with one more axis in front.

    Returns
    -------
    y : array, (..., seqlen, features)
    ty : array, of the shape of tx
        It is linear in x: tx turned likewise.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `rotary`.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, tq = np.random.default_rng(0).standard_normal((2, 8, 100, 64))
    >>> y, ty = na.rotary_jvp(q, tq, np.arange(100), na.Rotary())
    >>> np.allclose(ty, na.rotary(q + tq, np.arange(100), na.Rotary()) - y)
    True
    """
    _check(rotary, x=x, tx=tx)
    several = tx.ndim == x.ndim + 1
    _check_alike("tx", tx, tx.shape[:1] * several + x.shape, x.dtype, "x")
    along = _positions(x, positions)
    rotary._width(x.shape[-1], along.shape[-1])
    ty = turned(tx, along[None] if several else along, rotary, np.empty_like(tx))     # first: out may be tx
    return _turned(x, positions, rotary, out), ty


def turned(x: Any, positions: Any, rotary: Rotary, out: Any, back: bool = False) -> Any:
    """x turned, or turned back, in `out`, of any floating dtype. positions: with as many axes as x, each of full size
    or 1, the last one those along which tokens have positions."""
    width, y = rotary._width(x.shape[-1], positions.shape[-1]), out
    if not x.size:
        return out
    if x.ndim == 2 or positions.shape[-3] > 1:  # heads are those that share angles
        x, y, positions = (a[..., None, :, :] for a in (x, y, positions))
    lead = x.shape[:-3]
    if len(lead) <= LEAD:
        front = (None,) * (LEAD - len(lead))
        backend(str(library(x))).turn(y[front], x[front], positions[front], rotary, width, back)
    else:
        positions = np.broadcast_to(positions, (*lead, *positions.shape[-3:]))
        x, new, positions = (_collapsed(a, len(lead)) for a in (x, np.empty_like(y), positions))
        turned(x, positions, rotary, new, back)
        bits_of(y)[...] = bits_of(new).reshape(y.shape)
    return out


def turned_tokens(x: Any, positions: Any, rotary: Rotary) -> Any:
    """NumPy's tokens (tokens, heads, features), in the dtype of sums."""
    out = np.empty(x.shape, dtype_of_sums(x.dtype))
    return turned(x.swapaxes(0, 1), positions[None, :, None], rotary, out.swapaxes(0, 1)).swapaxes(0, 1)


def bits_of(x: Any) -> Any:
    """As integers: CuPy does not copy all dtypes."""
    return x.view(f"u{x.itemsize}")


def _collapsed(x: Any, axes: int) -> Any:
    """The first axes as one, if need be of a copy."""
    return bits_of(x).reshape(math.prod(x.shape[:axes]), *x.shape[axes:]).view(x.dtype)


def _turned(x: Any, positions: Any, rotary: Rotary, out: Any, back: bool = False) -> Any:
    """x turned in `out`, or in a new array, after the checks of these."""
    along = _positions(x, positions)
    rotary._width(x.shape[-1], along.shape[-1])
    if out is None:
        out = np.empty_like(x)
    else:
        _check_out(out, x, along)
    if library(x) == "cupy":
        backend("cupy").check_device({"x": x, "positions": along, "out": out})
    return turned(x, along, rotary, out, back)


# -------------------------------------------------------------------------------------------------------------- checks
def check_rotary(rotary: Any) -> None:
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary: got {words_for(rotary)}, expected a numbattn.Rotary")


def _check(rotary: Any, **arrays: Any) -> None:
    check_rotary(rotary)
    same_library(TAKER, **arrays)
    for name, x in arrays.items():
        if x.dtype not in DTYPES:
            raise no_floats(name, x.dtype)
        if x.ndim < 2:
            raise ValueError(f"{name}: got the shape {x.shape}, expected (..., seqlen, features)")
        check_axes(name, x)


def _check_alike(name: str, x: Any, shape: tuple[int, ...], dtype: Any, of: str) -> None:
    if x.shape != shape:
        raise ValueError(f"{name}: got the shape {x.shape}, expected {shape}, the shape of {of}")
    if x.dtype != dtype:
        raise other_dtype(name, x.dtype, dtype, of)


def _check_out(out: Any, x: Any, positions: Any) -> None:
    """Refuse what cannot take the result."""
    same_library(TAKER, x=x, out=out)
    _check_alike("out", out, x.shape, x.dtype, "x")
    check_writable("out", out)
    check_apart("out", out)
    if (overlap(out, x) and not lies_within_rows(out, x)) or overlap(out, positions):
        raise ValueError("out: overlaps x or positions, expected x itself, or memory of its own")


def _positions(x: Any, positions: Any) -> Any:
    """Positions with as many axes as x, in x's library, of a dtype that kernels take."""
    if isinstance(positions, list | tuple | range):
        try:
            positions = np.asarray(positions)
        except ValueError as error:                             # lists of unequal lengths
            raise ValueError(f"positions: got a {words_for(positions)} of no shape: {error}") from None
    same_library(TAKER, positions=positions)
    if positions.dtype.kind not in "iu" and positions.dtype not in DTYPES:
        raise TypeError(f"positions: got {words_for(positions)}, expected an array of integers or floats")
    lead, seqlen = x.shape[:-2], x.shape[-2]
    if positions.ndim == x.ndim:
        found = positions
    elif positions.ndim == x.ndim - 1:
        found = positions[..., None]
    elif positions.ndim == 1:
        found = positions[(*[None] * len(lead), slice(None), None)]
    else:
        found = positions[None]  # of a shape that does not fit
    fits = found.ndim == x.ndim and found.shape[-2] == seqlen and found.shape[-1] > 0
    if not fits or any(n not in (1, size) for n, size in zip(found.shape, lead)):
        axes = ", ".join(f"{n} or 1" for n in lead)
        raise ValueError(f"positions: got the shape {positions.shape}, expected ({seqlen},), or for each axis of x "
                         f"({axes}{', ' * bool(lead)}{seqlen}), and after these the axes of positions, if any")
    if found.dtype not in TAKEN:
        found = found.astype(np.int64 if found.dtype.kind in "iu" else np.float32)
    return moved(found, x)
