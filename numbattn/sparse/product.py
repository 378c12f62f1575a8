"""Products with block-sparse matrices, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..base.backends import SPARSE
from ..base.checks import DTYPES, A, Array, library, no_floats, other_dtype, same_library, words_for
from ..base.interrupts import imported
from .pattern import TAKER, Pattern


def product(x: A, w: A, pattern: Pattern) -> A:
    """x times a block-sparse matrix, ``x @ pattern.dense(w)``: only the pattern's blocks take time and memory.

    Parameters
    ----------
    x : array, (..., features in)
    w : array, (blocks, rows of a block, columns of a block)
        The pattern's blocks, row by row: ``pattern.values(dense)``. NumPy arrays or CuPy arrays, both of one dtype:
        float16, bfloat16 (of ml_dtypes), float32 or float64.
    pattern : Pattern

    Returns
    -------
    y : array, (..., features out), of the dtype of x

    Raises
    ------
    TypeError
        For anything but arrays and a Pattern, and for a wrong dtype.
    ValueError
        For shapes that do not fit. Both errors name the argument, what it got and what it takes.

    Notes
    -----
    Sums are accumulated in float32, or in float64 for float64, and rounded once. On a GPU arrays that are not
    contiguous are copied first.

    Examples
    --------
    >>> import numpy as np
    >>> import numbattn as na
    >>> from numbattn import sparse
    >>> pattern = sparse.Pattern(na.BlockSparse(np.array([[True, False], [True, True]]), (16, 16)))
    >>> w = np.ones((pattern.count, 16, 16))
    >>> sparse.product(np.ones((5, 32)), w, pattern)[0, [0, 31]]
    array([32., 16.])
    """
    check(x, w, pattern)
    return run("forward", _rows(x), w, pattern, (*x.shape[:-1], pattern.shape[1]))


def product_vjp(x: A, w: A, pattern: Pattern) -> tuple[A, Callable[[Array], tuple[A, A]]]:
    """`product` with its gradients as a closure.

    Parameters
    ----------
    x, w, pattern
        As in `product`.

    Returns
    -------
    y : array, (..., features out), of the dtype of x
    backprop : function
        ``backprop(dy)`` returns dx and dw, of the shapes and dtypes of x and w; dw is computed for the pattern's blocks
        only. It refers to x and w: editing them in place before it is called changes the gradients.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `product`.

    Examples
    --------
    >>> import numpy as np
    >>> import numbattn as na
    >>> from numbattn import sparse
    >>> pattern = sparse.Pattern(na.BlockSparse.local_global((64, 64), (16, 16)))
    >>> x, w = np.ones((5, 64)), np.ones((pattern.count, 16, 16))
    >>> y, backprop = sparse.product_vjp(x, w, pattern)
    >>> dx, dw = backprop(y)                            # of (y**2).sum() / 2
    >>> dx.shape, dw.shape
    ((5, 64), (14, 16, 16))
    """
    y = product(x, w, pattern)

    def backprop(dy: Any) -> Any:
        same_library(TAKER, y=y, dy=dy)
        if dy.shape != y.shape:
            raise ValueError(f"dy: got the shape {dy.shape}, expected {y.shape}, the shape of y")
        if dy.dtype not in DTYPES:
            raise no_floats("dy", dy.dtype)
        dY = _rows(dy.astype(y.dtype, copy=False))
        return run("backward_x", dY, w, pattern, x.shape), run("backward_w", _rows(x), dY, pattern, w.shape)

    return y, backprop


def check(x: Any, w: Any, pattern: Any) -> None:
    """Refuse what does not fit."""
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern: got {words_for(pattern)}, expected a sparse.Pattern")
    same_library(TAKER, x=x, w=w)
    if x.dtype not in DTYPES:
        raise no_floats("x", x.dtype)
    if w.dtype != x.dtype:
        raise other_dtype("w", w.dtype, x.dtype, "x")
    if x.ndim < 1 or x.shape[-1] != pattern.shape[0]:
        raise ValueError(f"x: got the shape {x.shape}, expected (..., {pattern.shape[0]})")
    if w.shape != (expected := (pattern.count, *pattern.block_size)):
        raise ValueError(f"w: got the shape {w.shape}, expected {expected}, the blocks that are there")


def run(name: str, one: Any, other: Any, pattern: Pattern, shape: tuple[int, ...]) -> Any:
    """A pass by the backend for the arrays' library; zeros if there are no rows or no blocks."""
    if not (one.size and other.size and math.prod(shape)):
        return np.zeros(shape, one.dtype, like=one)
    return getattr(imported(SPARSE[str(library(one))]), name)(one, other, pattern).reshape(shape)


def _rows(x: Any) -> Any:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
