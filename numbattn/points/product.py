"""Kernel products: sum_j K(x_i, y_j) b_j."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..base.checks import A, Array
from ..base.values import rounded, sum_broadcast
from ..masks import Mask
from .checks import batch_of, check_columns, check_points, check_result
from .composition import Kernel, Sum
from .formula import quiet
from .gradients import ProductGradients
from .kernels import as_kernel
from .pairs import Pairs, Term, of_points, terms_of
from .tangents import Moving, checked, tangents_of


def product(x: A, y: A, b: A, kernel: Kernel, *, mask: Mask | Array | None = None) -> A:
    """Kernel matrix times b, sum_j K(x_i, y_j) b_j, in memory linear in the number of points.

    Parameters
    ----------
    x : array, (..., m, d)
    y : array, (..., n, d)
    b : array, (..., n, e)
        NumPy arrays or CuPy arrays, all of one dtype: float16, bfloat16 (of ml_dtypes), float32 or float64, with any
        strides. Axes before the last two broadcast as in `numpy.matmul`. y may be x.
    kernel : Gaussian, Periodic, Laplacian, Matern, Cauchy, RationalQuadratic, Radial, Linear, Cosine, Polynomial, Cost
        Or a sum of multiples of these, ``0.5 * Gaussian(0.1) + Matern(1.5, 0.3)``, one pass each; each of all features
        or, as ``Matern(1.5).on([0, 2])``, of some. Products of them, on any features, are kernels, too:
        ``Gaussian(10.0) * Periodic(1.0).on([0])``; see `Kernel`.
    mask : a mask of numbattn's, or a boolean array, optional
        Which points y_j each x_i sees: `Segments` for batches of point clouds of unequal size, `BlockSparse`, `Window`
        for sorted points. A point that sees nothing gets 0.

    Returns
    -------
    s : array, (..., m, e), of the dtype of x

    Raises
    ------
    TypeError
        For arguments that are not arrays or kernels, or of the wrong kind or dtype.
    ValueError
        For shapes and numbers that do not fit. Both errors name the argument, what it got and what it takes.

    Notes
    -----
    Sums are accumulated in float32, or in float64 for float64. Up to 8 features a squared distance is a sum of squared
    differences, with an error of a few roundings. Beyond it is ``|x|^2 + |y|^2 - 2 <x, y>``, of points moved to a
    common centre, unless that is less than 1/64 of ``|x|^2 + |y|^2``: then it is a sum of squared differences, too, so
    that the relative error is at most that of a product of two points times 64, and points that coincide have the
    distance 0. float16 and bfloat16 are computed in float32, and rounded once. On a GPU some calls have larger errors
    where points are far from the median of all: see the README's limits.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import points
    >>> x, y = np.random.default_rng(0).random((2, 1000, 3))
    >>> points.product(x, y, np.ones((1000, 1)), points.Gaussian(0.1)).shape
    (1000, 1)
    """
    return ProductCall.of(x, y, b, kernel, mask).value()


def product_vjp(
    x: A, y: A, b: A, kernel: Kernel, *, mask: Mask | Array | None = None
) -> tuple[A, ProductBackprop]:
    """`product` with its gradients as a closure.

    Parameters
    ----------
    x, y, b, kernel, mask
        As in `product`.

    Returns
    -------
    s : array, (..., m, e), of the dtype of x
    backprop : ProductBackprop
        ``backprop(ds)`` returns dx, dy, db, of the shapes and dtypes of x, y, b, summed over broadcast axes; a tuple
        with the attribute `kernel`, the gradient of the kernel's length or scale: an array of its shape, a tuple for a
        sum of kernels or one with a factor. These have the attribute `factor`, too, a tuple with the gradient of each
        factor. It refers to x, y and b: editing them in place before it is called changes the gradients. The derivative
        of a kernel at r = 0 is taken to be 0 where it is not finite.
        ``backprop.hvp(ds, tx, ty, tb)`` has Hessian-vector products.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `product`.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import points
    >>> x, y, b = np.random.default_rng(0).random((3, 1000, 3))
    >>> s, backprop = points.product_vjp(x, y, b, points.Matern(1.5, length=[0.1, 0.2, 0.3]))
    >>> grads = backprop(s)             # of (s**2).sum() / 2
    >>> dx, dy, db = grads
    >>> dx.shape, grads.kernel.shape
    ((1000, 3), (3,))
    """
    call = ProductCall.of(x, y, b, kernel, mask)
    for _, term in call.terms:
        term.kind.check(call.pairs.dtype, 1)
    return call.value(), ProductBackprop(call)


def product_jvp(
    x: A, y: A, b: A, kernel: Kernel, tx: Array | None, ty: Array | None, tb: Array | None, *,
    mask: Mask | Array | None = None,
) -> tuple[A, A]:  # fmt: skip
    """`product` and its tangent: forward-mode differentiation, a Jacobian-vector product.

    Parameters
    ----------
    x, y, b, kernel, mask
        As in `product`.
    tx, ty, tb : arrays or None
        The tangents of x, y and b, of the shape of each; other floating dtypes are converted. None is zero.

    Returns
    -------
    s : array, (..., m, e), of the dtype of x
    ts : array, (..., m, e), likewise
        The tangent of s.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `product`.

    Notes
    -----
    Two passes over all pairs more than `product` for each term of a kernel, one where tb is None: see
    `ProductBackprop.hvp`.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import points
    >>> x, y, b, tx = np.random.default_rng(0).random((4, 100, 3))
    >>> s, ts = points.product_jvp(x, y, b, points.Gaussian(0.5), tx, None, None)
    >>> h = 1e-6
    >>> ahead, behind = (points.product(x + step * tx, y, b, points.Gaussian(0.5)) for step in (h, -h))
    >>> np.allclose(ts, (ahead - behind) / (2 * h))
    True
    """
    call = ProductCall.of(x, y, b, kernel, mask)
    return call.value(), call.tangent(call.moving(tx, ty, tb))


class ProductBackprop:
    """The closure that `product_vjp` returns: ``backprop(ds)`` returns dx, dy, db."""

    def __init__(self, call: ProductCall) -> None:
        self._call = call

    def __call__(self, ds: Array) -> ProductGradients:
        return self._call.backprop(ds)

    def hvp(
        self, ds: Array, tx: Array | None, ty: Array | None, tb: Array | None, *, tds: Array | None = None
    ) -> ProductGradients:
        """The tangents of the gradients: forward over reverse, Hessian-vector products.

        Parameters
        ----------
        ds : array, (..., m, e)
            As in ``backprop(ds)``.
        tx, ty, tb : arrays or None
            The tangents of x, y and b, of the shape of each; other floating dtypes are converted. None is zero.
        tds : array, (..., m, e), optional
            The tangent of ds. Default: zero. Then this is the Hessian of <ds, s> times the tangents.

        Returns
        -------
        tgrads : ProductGradients
            The tangents of dx, dy and db, of the shapes and dtypes of x, y, b; ``tgrads.kernel`` is None.

        Raises
        ------
        TypeError, ValueError
            For what does not fit: see `product`.

        Notes
        -----
        With W_ij = <ds_i, b_j>, and r^2 moving by tt_ij = 2 <x_i - y_j, tx_i - ty_j>,

            tdx_i = sum_j (K''_ij tt_ij W_ij + K'_ij tW_ij) 2 (x_i - y_j) + K'_ij W_ij 2 (tx_i - ty_j),

        where K' and K'' are derivatives by r^2. There are three passes over all pairs for each term of a kernel, and
        three more with tb and tds. On a GPU tt_ij is a product of features of x_i and y_j, d + 1 for each of tx and ty
        that is given, which are multiplied by the columns of b, 256 products at a time; so there are five passes, more
        with many columns, and tt_ij has an error of a rounding of ``|x|``, from the centre and in lengths. Derivatives
        of a kernel at r = 0 are taken to be 0 where they are not finite. As Hessians are symmetric, these are also
        gradients of gradients: those of a function of dx, dy and db with respect to x, y and b, if its gradients by the
        former are tx, ty and tb.

        Examples
        --------
        >>> import numpy as np
        >>> from numbattn import points
        >>> x, y, b, tx = np.random.default_rng(0).random((4, 100, 3))
        >>> kernel = points.Gaussian(0.5)
        >>> s, backprop = points.product_vjp(x, y, b, kernel)
        >>> _, ts = points.product_jvp(x, y, b, kernel, tx, None, None)
        >>> tdx, tdy, tdb = backprop.hvp(s, tx, None, None, tds=ts)     # the Hessian of (s**2).sum() / 2, times tx
        >>> h = 1e-6
        >>> ends = [points.product_vjp(x + step * tx, y, b, kernel) for step in (h, -h)]
        >>> ahead, behind = (backprop(s) for s, backprop in ends)
        >>> np.allclose(tdy, (ahead.dy - behind.dy) / (2 * h))
        True
        """
        return self._call.tangent_of_gradients(ds, tds, self._call.moving(tx, ty, tb))


class _Moving(NamedTuple):
    """The tangents of a call's arrays."""

    terms: list[tuple[Any, Moving]]
    tb: Any  # likewise B


class ProductCall(NamedTuple):
    """A call that is checked."""

    x: Any
    y: Any
    b: Any
    kernel: Kernel
    pairs: Pairs
    terms: list[tuple[Any, Term]]
    B: Any  # b with all batch axes, in the dtype of sums

    @classmethod
    def of(cls, x: Any, y: Any, b: Any, kernel: Any, mask: Any) -> ProductCall:
        check_points(x, y, b=b)
        check_columns("b", b, y.shape[-2], "y")
        kernel = as_kernel(kernel, x.shape[-1])
        batch = batch_of(x=x.shape[:-2], y=y.shape[:-2], b=b.shape[:-2], **kernel._batches)
        pairs = Pairs.of(x, y, batch, mask)
        return cls(x, y, b, kernel, pairs, terms_of(pairs, kernel), pairs.broadcast(rounded(b, pairs.dtype)))

    @quiet
    def value(self) -> Any:
        return rounded(sum(factor * term.sums(self.B) for factor, term in self.terms), self.x.dtype)

    def moving(self, tx: Any, ty: Any, tb: Any) -> _Moving:
        pairs, (tx, ty), tb = self.pairs, tangents_of(self.pairs, tx, ty), checked(self.pairs, "tb", tb, self.b, "b")
        terms = [(factor, Moving(term, tx, ty)) for factor, term in self.terms]
        return _Moving(terms, None if tb is None else pairs.broadcast(tb))

    @quiet
    def tangent(self, moving: _Moving) -> Any:
        terms, tb = moving
        return rounded(sum(factor * term.sums(self.B, tb) for factor, term in terms), self.x.dtype)

    def of_s(self, name: str, ds: Any) -> Any:
        """A gradient of s, checked and in the dtype of sums."""
        check_result(name, ds, "s", (*self.pairs.batch, self.x.shape[-2], self.b.shape[-1]), self.x)
        return rounded(ds, self.pairs.dtype)

    @quiet
    def backprop(self, ds: Any) -> ProductGradients:
        dS, found = self.of_s("ds", ds), []
        for factor, term in self.terms:
            db, own = term.exchanged.sums(dS), factor * dS
            of_factor = (db * self.pairs.only_seen(1, self.B)).sum(axis=(-2, -1), dtype=np.float64)  # <ds, s> = <db, b>
            dx, dy = term.gradient(self.B, own), term.exchanged.gradient(own, self.B)
            found.append((*of_points(term, dx, dy), of_factor, sum_broadcast(factor * db, self.b.shape)))
        dx, dy, parameters, factors, db = zip(*found)
        gradients = (rounded(sum(x), self.x.dtype) for x in (dx, dy, db))
        if not isinstance(self.kernel, Sum):
            return ProductGradients(*gradients, kernel=parameters[0])
        return ProductGradients(*gradients, kernel=parameters, factor=tuple([
            sum_broadcast(of_factor, np.shape(factor)).astype(getattr(factor, "dtype", np.float64), copy=False)
            for of_factor, (factor, _) in zip(factors, self.kernel._terms)
        ]))  # fmt: skip

    @quiet
    def tangent_of_gradients(self, ds: Any, tds: Any, moving: _Moving) -> ProductGradients:
        dS, tdS, found = self.of_s("ds", ds), None if tds is None else self.of_s("tds", tds), []
        for factor, term in moving.terms:
            own, town = factor * dS, None if tdS is None else factor * tdS
            tdx = term.gradient(self.B, own, moving.tb, town)
            tdy = term.exchanged.gradient(own, self.B, town, moving.tb)
            found.append((tdx, tdy, sum_broadcast(term.exchanged.sums(own, town), self.b.shape)))
        return ProductGradients(*(rounded(sum(x), self.x.dtype) for x in zip(*found)))
