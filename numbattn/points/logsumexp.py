"""Logarithms of kernel sums, log sum_j exp(w_j) K(x_i, y_j): soft minima of costs, kernel density estimates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..checks import A, Array
from ..masks import Mask
from ..values import rounded, sum_broadcast
from .checks import batch_of, check_points, check_result, check_vector
from .gradients import LogsumexpGradients
from .kernels import Kernel, as_exponential
from .pairs import Pairs, Term, of_points, ones, quiet


def logsumexp(x: A, y: A, w: A | None, kernel: Kernel, *, mask: Mask | Array | None = None) -> A:
    """Logarithm of a kernel sum, log sum_j exp(w_j) K(x_i, y_j), in memory linear in the number of points.

    For ``Cost(power, epsilon)`` it is log sum_j exp(w_j - |x_i - y_j|**power / (power epsilon)). Nothing overflows.

    Parameters
    ----------
    x : array, (..., m, d)
    y : array, (..., n, d)
    w : array, (..., n), or None
        NumPy arrays or CuPy arrays, all of one dtype, with any strides; w of points in half precision may be float32.
        Batch axes broadcast. -inf: a point without weight. None: all are 0.
    kernel : Cost, Gaussian, Laplacian or Matern(0.5)
    mask : a mask of numbattn's, or a boolean array, optional
        Which points y_j are seen by x_i.

    Returns
    -------
    f : array, (..., m), float32, or float64 for float64
        -inf where a point sees nothing.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `product`.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import points
    >>> x, y = np.random.default_rng(0).random((2, 1000, 3))
    >>> points.logsumexp(x, y, np.zeros(1000), points.Cost(power=2, epsilon=0.05)).shape
    (1000,)
    """
    pairs, term, W = _prepared(x, y, w, kernel, mask)
    return term.logsumexp(W)


def logsumexp_vjp(
    x: A, y: A, w: A | None, kernel: Kernel, *, mask: Mask | Array | None = None
) -> tuple[A, Callable[[Array], LogsumexpGradients]]:
    """`logsumexp` with its gradients as a closure.

    Parameters
    ----------
    x, y, w, kernel, mask
        As in `logsumexp`.

    Returns
    -------
    f : array, (..., m)
    backprop : function
        ``backprop(df)`` returns dx, dy, dw, of the shapes and dtypes of x, y, w, None for a w that is None; a tuple
        with the attribute `kernel`, the gradient of epsilon or of the length. df is ignored where f is -inf.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `product`.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import points
    >>> x, y = np.random.default_rng(0).random((2, 1000, 3))
    >>> f, backprop = points.logsumexp_vjp(x, y, np.zeros(1000), points.Cost(power=1, epsilon=0.1))
    >>> dx, dy, dw = backprop(np.ones(1000))
    >>> dw.sum().round(6)               # each point shares its df out
    np.float64(1000.0)
    """
    pairs, term, W = _prepared(x, y, w, kernel, mask)
    f = term.logsumexp(W)

    @quiet
    def backprop(df: Any) -> LogsumexpGradients:
        check_result("df", df, "f", f.shape, f)
        seen = ~np.isneginf(f)
        dF = np.where(seen, rounded(df, pairs.dtype), 0)[..., None]
        one, rows = ones(pairs), np.where(seen, -f, -np.inf)  # P_ij = exp(rows_i + w_j) K_ij
        dx = term.gradient(one, dF, rows, W)
        dy = term.exchanged.gradient(dF, one, W, rows)
        dx, dy, parameter = of_points(term, dx, dy)
        dw = None
        if w is not None:
            dw = rounded(sum_broadcast(term.exchanged.sums(dF, W, rows)[..., 0], w.shape), w.dtype)
        return LogsumexpGradients(rounded(dx, x.dtype), rounded(dy, y.dtype), dw, kernel=parameter)

    return f, backprop


def _prepared(x: Any, y: Any, w: Any, kernel: Any, mask: Any) -> tuple[Pairs, Term, Any]:
    """Pairs, the term, and w with all batch axes."""
    check_points(x, y, {} if w is None else {"w": w})
    batches = {"x": x.shape[:-2], "y": y.shape[:-2]}
    if w is not None:
        check_vector("w", w, y.shape[-2], "y")
        batches["w"] = w.shape[:-1]
    kernel = as_exponential(kernel, x.shape[-1])
    pairs = Pairs.of(x, y, batch_of(**batches), mask)
    return pairs, Term(pairs, kernel), None if w is None else pairs.broadcast(rounded(w, pairs.dtype), axes=1)
