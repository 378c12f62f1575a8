"""Logarithms of kernel sums, log sum_j exp(w_j) K(x_i, y_j): soft minima of costs, kernel density estimates."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..base.checks import A, Array
from ..base.values import rounded, sum_broadcast
from ..masks import Mask
from .checks import batch_of, check_points, check_result, check_vector
from .composition import Kernel
from .formula import quiet
from .gradients import LogsumexpGradients
from .kernels import as_exponential
from .pairs import Pairs, Term, of_points, ones
from .scores import ScoresCall, takes
from .tangents import Moving, checked, tangents_of


def logsumexp(x: A, y: A, w: A | None, kernel: Kernel, *, mask: Mask | Array | None = None) -> A:
    """Logarithm of a kernel sum, log sum_j exp(w_j) K(x_i, y_j), in memory linear in the number of points.

    For ``Cost(power, epsilon)`` it is ``log sum_j exp(w_j - |x_i - y_j|**power / (power epsilon))``. No exponential
    overflows.

    Parameters
    ----------
    x : array, (..., m, d)
    y : array, (..., n, d)
    w : array, (..., n), or None
        NumPy arrays or CuPy arrays, all of one dtype, with any strides; for points in half precision w may be float32.
        Batch axes broadcast. -inf is a point without weight; None is 0 for all.
    kernel : Cost, Gaussian, Periodic, Laplacian, Matern(0.5), Linear or Cosine
        Or a product of Gaussian and Periodic ones; each of all features or of some, as in `product`. Of Linear and
        Cosine the exponential is taken: log sum_j exp(w_j + scale <x_i, y_j>).
    mask : a mask of numbattn's, or a boolean array, optional
        Which points y_j each x_i sees.

    Returns
    -------
    f : array, (..., m), float32, or float64 for float64
        -inf where a point sees nothing.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `product`.

    Notes
    -----
    float16 and bfloat16 are computed in float32, as exactly as the same numbers in float32. On Hopper points of
    bfloat16 around the origin, closer to it than to each other, are faster than others, which are centred first; points
    of float32 of 17 to 64 features, if all are at most 1,000 lengths from their centre, are faster than others. With
    Linear and Cosine and no mask matrix products compute scores beyond 256 features, and of half precision on a GPU,
    where a block of them is in memory at a time, up to 256 MB; then gradients are rounded as P is in attention.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import points
    >>> x, y = np.random.default_rng(0).random((2, 1000, 3))
    >>> points.logsumexp(x, y, np.zeros(1000), points.Cost(power=2, epsilon=0.05)).shape
    (1000,)
    """
    f: A = LogsumexpCall.of(x, y, w, kernel, mask).f
    return f


def logsumexp_vjp(
    x: A, y: A, w: A | None, kernel: Kernel, *, mask: Mask | Array | None = None
) -> tuple[A, LogsumexpBackprop]:
    """`logsumexp` with its gradients as a closure.

    Parameters
    ----------
    x, y, w, kernel, mask
        As in `logsumexp`.

    Returns
    -------
    f : array, (..., m)
    backprop : LogsumexpBackprop
        ``backprop(df)`` returns dx, dy, dw, of the shapes and dtypes of x, y, w, None for a w that is None; a tuple
        with the attribute `kernel`, the gradient of epsilon or of the length. df is ignored where f is -inf.
        ``backprop.hvp(df, tx, ty, tw)`` has Hessian-vector products.

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
    call = LogsumexpCall.of(x, y, w, kernel, mask)
    return call.f, LogsumexpBackprop(call)


def logsumexp_jvp(
    x: A, y: A, w: A | None, kernel: Kernel, tx: Array | None, ty: Array | None, tw: Array | None, *,
    mask: Mask | Array | None = None,
) -> tuple[A, A]:  # fmt: skip
    """`logsumexp` and its tangent: forward-mode differentiation, a Jacobian-vector product.

    Parameters
    ----------
    x, y, w, kernel, mask
        As in `logsumexp`.
    tx, ty, tw : arrays or None
        The tangents of x, y and w, of the shape of each; other floating dtypes are converted. None is zero.
        Where w is -inf, tw is finite and changes nothing; where w is None, tw is.

    Returns
    -------
    f : array, (..., m)
    tf : array, (..., m)
        The tangent of f; 0 where f is -inf.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `product`.

    Notes
    -----
    Two passes over all pairs more than `logsumexp`, one where tw is None: see `LogsumexpBackprop.hvp`.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import points
    >>> x, y, tx = np.random.default_rng(0).random((3, 100, 3))
    >>> cost = points.Cost(power=2, epsilon=0.1)
    >>> f, tf = points.logsumexp_jvp(x, y, None, cost, tx, None, None)
    >>> h = 1e-6
    >>> ahead, behind = (points.logsumexp(x + step * tx, y, None, cost) for step in (h, -h))
    >>> np.allclose(tf, (ahead - behind) / (2 * h))
    True
    """
    call = LogsumexpCall.of(x, y, w, kernel, mask)
    return call.f, call.tangent(call.moving(tx, ty), call.tangent_of_w(tw))


class LogsumexpBackprop:
    """The closure that `logsumexp_vjp` returns: ``backprop(df)`` returns dx, dy, dw."""

    def __init__(self, call: LogsumexpCall | ScoresCall) -> None:
        self._call = call

    def __call__(self, df: Array) -> LogsumexpGradients:
        return self._call.backprop(df)

    def hvp(
        self, df: Array, tx: Array | None, ty: Array | None, tw: Array | None, *, tdf: Array | None = None
    ) -> LogsumexpGradients:
        """The tangents of the gradients: forward over reverse, Hessian-vector products.

        Parameters
        ----------
        df : array, (..., m)
            As in ``backprop(df)``.
        tx, ty, tw : arrays or None
            As in `logsumexp_jvp`.
        tdf : array, (..., m), optional
            The tangent of df. Default: zero. Then this is the Hessian of <df, f> times the tangents.

        Returns
        -------
        tgrads : LogsumexpGradients
            The tangents of dx, dy and dw, of the shapes and dtypes of x, y, w; ``tgrads.kernel`` is None.

        Raises
        ------
        TypeError, ValueError
            For what does not fit: see `product`.

        Notes
        -----
        Of P_ij = exp(w_j - f_i) K_ij it sums what `ProductBackprop.hvp` sums of K_ij, and P_ij (tw_j - tf_i) besides:
        five passes over all pairs, seven on a GPU, and up to four more with w and tw.

        Examples
        --------
        >>> import numpy as np
        >>> from numbattn import points
        >>> x, y, tx = np.random.default_rng(0).random((3, 100, 3))
        >>> cost, df = points.Cost(power=2, epsilon=0.1), np.ones(100)
        >>> f, backprop = points.logsumexp_vjp(x, y, None, cost)
        >>> tdx, tdy, _ = backprop.hvp(df, tx, None, None)
        >>> h = 1e-6
        >>> ahead, behind = (points.logsumexp_vjp(x + step * tx, y, None, cost)[1](df) for step in (h, -h))
        >>> np.allclose(tdy, (ahead.dy - behind.dy) / (2 * h))
        True
        """
        call = self._call
        return call.tangent_of_gradients(df, tdf, call.moving(tx, ty), call.tangent_of_w(tw))


class LogsumexpCall(NamedTuple):
    """A call that is checked, and its result."""

    x: Any
    y: Any
    w: Any
    pairs: Pairs
    term: Term
    W: Any  # w with all batch axes, in the dtype of sums
    f: Any
    low: Any  # what rounding took from f

    @classmethod
    def of(cls, x: Any, y: Any, w: Any, kernel: Any, mask: Any) -> LogsumexpCall | ScoresCall:
        check_points(x, y, {} if w is None else {"w": w})
        batches = {"x": x.shape[:-2], "y": y.shape[:-2]}
        if w is not None:
            check_vector("w", w, y.shape[-2], "y")
            batches["w"] = w.shape[:-1]
        kernel = as_exponential(kernel, x.shape[-1])
        if takes(x, y, w, kernel, mask):
            return ScoresCall.of(x, y, w, kernel)
        pairs = Pairs.of(x, y, batch_of(**batches, **kernel._batches), mask)
        term = Term(pairs, kernel, kernel._exponential)
        W = None if w is None else pairs.broadcast(rounded(w, pairs.dtype), axes=1)
        return cls(x, y, w, pairs, term, W, *term.logsumexp_and_low(W))

    @property
    def seen(self) -> Any:
        return ~np.isneginf(self.f)

    @property
    def rows(self) -> Any:
        """P_ij = exp(rows_i + w_j) K_ij"""
        return np.where(self.seen, -self.f, -np.inf)

    def of_f(self, name: str, df: Any) -> Any:
        """A gradient of f, checked and in the dtype of sums, as a column."""
        check_result(name, df, "f", self.f.shape, self.f)
        return np.where(self.seen, rounded(df, self.pairs.dtype) * np.exp(-self.low), 0)[..., None]

    def moving(self, tx: Any, ty: Any) -> Any:
        return Moving(self.term, *tangents_of(self.pairs, tx, ty))

    def tangent_of_w(self, tw: Any) -> Any:
        """Checked, with all batch axes, as a column."""
        tw = checked(self.pairs, "tw", tw, self.w, "w")
        return None if tw is None else self.pairs.broadcast(tw, axes=1)[..., None]

    @quiet
    def tangent(self, moving: Moving, tw: Any) -> Any:
        return moving.sums(ones(self.pairs), tw, self.rows, self.W)[..., 0] * np.exp(-self.low)

    @quiet
    def backprop(self, df: Any) -> LogsumexpGradients:
        dF, one, rows, W = self.of_f("df", df), ones(self.pairs), self.rows, self.W
        dx = self.term.gradient(one, dF, rows, W)
        dy = self.term.exchanged.gradient(dF, one, W, rows)
        dx, dy, parameter = of_points(self.term, dx, dy)
        dw = None if self.w is None else self.of_w(self.term.exchanged.sums(dF, W, rows))
        return LogsumexpGradients(rounded(dx, self.x.dtype), rounded(dy, self.y.dtype), dw, kernel=parameter)

    def of_w(self, dw: Any) -> Any:
        """A gradient of w, which was a column."""
        return rounded(sum_broadcast(dw[..., 0], self.w.shape), self.w.dtype)

    @quiet
    def tangent_of_gradients(self, df: Any, tdf: Any, moving: Moving, tw: Any) -> LogsumexpGradients:
        dF, one, rows, W = self.of_f("df", df), ones(self.pairs), self.rows, self.W
        tdF = -dF * self.tangent(moving, tw)[..., None]  # tP_ij has the terms P_ij (tw_j - tf_i)
        tdF = tdF if tdf is None else tdF + self.of_f("tdf", tdf)
        tdx = moving.gradient(one, dF, tw, tdF, rows, W)
        tdy = moving.exchanged.gradient(dF, one, tdF, tw, W, rows)
        tdw = None
        if self.w is not None:
            tdw = moving.exchanged.sums(dF, tdF, W, rows)
            tdw = self.of_w(tdw if tw is None else tdw + tw * self.term.exchanged.sums(dF, W, rows))
        return LogsumexpGradients(rounded(tdx, self.x.dtype), rounded(tdy, self.y.dtype), tdw)
