"""Checks of the arguments of calls on points, before anything runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..base.checks import (
    DTYPES,
    MOST_AXES,
    dtype_of_sums,
    integer,
    no_floats,
    number,
    other_dtype,
    same_library,
)

TAKER = "numbattn.points"


def check_points(x: Any, y: Any, vectors: dict[str, Any] | None = None, y_name: str = "y", **others: Any) -> str:
    """The library of arrays of one dtype; x (..., m, d), y (..., n, d). Vectors may also have the dtype of sums."""
    vectors = vectors or {}
    given = {"x": x, y_name: y, **others, **vectors}
    xp = same_library(TAKER, **given)
    for name, array in given.items():
        if array.dtype not in DTYPES:
            raise no_floats(name, array.dtype)
        if array.dtype != x.dtype and (name not in vectors or array.dtype != dtype_of_sums(x.dtype)):
            sums = f", or {dtype_of_sums(x.dtype)}" if name in vectors and x.dtype.itemsize == 2 else ""
            raise other_dtype(name, array.dtype, x.dtype, f"x{sums}")
        if array.ndim > MOST_AXES:
            raise ValueError(f"{name}: got {array.ndim} axes, at most {MOST_AXES}")
    for name, array in (("x", x), (y_name, y)):
        if array.ndim < 2:
            way = f"; pass {name}[:, None] for points of one feature" if array.ndim else ""
            raise ValueError(f"{name}: got the shape {array.shape}, expected (..., points, features){way}")
    if y.shape[-1] != x.shape[-1]:
        raise ValueError(f"{y_name}: got {y.shape[-1]} features, expected {x.shape[-1]}, as many as x")
    return xp


def check_columns(name: str, b: Any, rows: int, of: str) -> None:
    """Check b (..., rows, e): a row for each point of the array named `of`."""
    if b.ndim == 1:
        raise ValueError(f"{name}: got the shape {b.shape}, expected (..., {rows}, columns); pass {name}[:, None]")
    if b.ndim < 1 or b.shape[-2] != rows:
        raise ValueError(f"{name}: got the shape {b.shape}, expected (..., {rows}, columns), a row for each point of "
                         f"{of}")


def check_vector(name: str, w: Any, rows: int, of: str) -> None:
    """Check w (..., rows): a number for each point of the array named `of`."""
    if w.ndim < 1 or w.shape[-1] != rows:
        raise ValueError(f"{name}: got the shape {w.shape}, expected (..., {rows}), a number for each point of {of}")


def check_weights(name: str, weights: Any) -> None:
    """Check the elements of a NumPy array of weights. Nobody looks at CuPy's, here and below."""
    if isinstance(weights, np.ndarray) and not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise ValueError(f"{name}: got weights from {weights.min()} to {weights.max()}, allowed finite and >= 0")


def check_finite(name: str, x: Any) -> None:
    """Check that the points of a NumPy array are finite."""
    if isinstance(x, np.ndarray) and not np.isfinite(x).all():
        raise ValueError(f"{name}: got points with inf or NaN, allowed are finite ones")


def batch_of(**batches: tuple[int, ...]) -> tuple[int, ...]:
    """Batch axes, broadcast."""
    try:
        return np.broadcast_shapes(*batches.values())
    except ValueError:
        found = ", ".join(f"{name} {shape}" for name, shape in batches.items())
        raise ValueError(f"batch axes of {found} do not broadcast") from None


def check_result(name: str, x: Any, of: str, shape: tuple[int, ...], like: Any) -> None:
    """Check a gradient of a result; another floating dtype is converted later."""
    same_library(TAKER, **{of: like, name: x})
    if x.shape != shape:
        raise ValueError(f"{name}: got the shape {x.shape}, expected {shape}, the shape of {of}")
    if x.dtype not in DTYPES:
        raise no_floats(name, x.dtype)


def checked_limits(tol: Any, max_iterations: Any) -> tuple[float, int]:
    """tol and max_iterations of iterations."""
    tol, max_iterations = number("tol", tol), integer("max_iterations", max_iterations, low=1)
    if not 0 <= tol < math.inf:
        raise ValueError(f"tol: got {tol}, allowed finite and >= 0")
    return tol, max_iterations
