"""Kernel products: sum_j K(x_i, y_j) b_j."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..checks import A, Array
from ..masks import Mask
from ..values import rounded, sum_broadcast
from .checks import batch_of, check_columns, check_points, check_result
from .gradients import ProductGradients
from .kernels import Kernel, Sum, as_kernel
from .pairs import Pairs, Term, of_points, quiet


def product(x: A, y: A, b: A, kernel: Kernel, *, mask: Mask | Array | None = None) -> A:
    """Kernel matrix times b, sum_j K(x_i, y_j) b_j, in memory linear in the number of points.

    Parameters
    ----------
    x : array, (..., m, d)
    y : array, (..., n, d)
    b : array, (..., n, e)
        NumPy arrays or CuPy arrays, all of one dtype: float16, bfloat16 (of ml_dtypes), float32 or float64, with any
        strides. Axes before the last two broadcast as in `numpy.matmul`. y may be x.
    kernel : Gaussian, Laplacian, Matern, Cauchy, RationalQuadratic, Radial, Linear, Cosine, Polynomial, Cost
        Or a sum of multiples of these, ``0.5 * Gaussian(0.1) + Matern(1.5, 0.3)``, one pass each.
    mask : a mask of numbattn's, or a boolean array, optional
        Which points y_j are seen by x_i: `Segments` of batches of point clouds of unequal size, `BlockSparse`, `Window`
        of sorted points. A point that sees nothing gets 0.

    Returns
    -------
    s : array, (..., m, e), of the dtype of x

    Raises
    ------
    TypeError
        For what is not an array or not a kernel, or of a wrong kind or dtype.
    ValueError
        For shapes and numbers that do not fit. Both name the argument, what it got and what it takes.

    Notes
    -----
    Points are moved to a common centre and divided by the kernel's length; sums are accumulated in float32, or in
    float64 for float64. Up to 8 features a squared distance is a sum of squared differences, right to a few roundings;
    beyond it is |x|^2 + |y|^2 - 2 <x, y>, whose error is that of a rounding of |x|^2, from the centre and in lengths.
    float16 and bfloat16 are computed in float32, and rounded once.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import points
    >>> x, y = np.random.default_rng(0).random((2, 1000, 3))
    >>> points.product(x, y, np.ones((1000, 1)), points.Gaussian(0.1)).shape
    (1000, 1)
    """
    return _Product.of(x, y, b, kernel, mask).value()


def product_vjp(
    x: A, y: A, b: A, kernel: Kernel, *, mask: Mask | Array | None = None
) -> tuple[A, Callable[[Array], ProductGradients]]:
    """`product` with its gradients as a closure.

    Parameters
    ----------
    x, y, b, kernel, mask
        As in `product`.

    Returns
    -------
    s : array, (..., m, e), of the dtype of x
    backprop : function
        ``backprop(ds)`` returns dx, dy, db, of the shapes and dtypes of x, y, b, over broadcast axes they are summed; a
        tuple with the attribute `kernel`, the gradient of its length: an array of its shape, None of a kernel without,
        and of a sum of kernels a tuple of these. It refers to x, y and b: editing them in place before it is called
        changes the gradients. The derivative of a kernel at r = 0 is taken to be 0 where it is not finite.

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
    given = _Product.of(x, y, b, kernel, mask)
    return given.value(), given.backprop


class _Product(NamedTuple):
    """A call that is checked."""

    x: Any
    y: Any
    b: Any
    kernel: Kernel
    pairs: Pairs
    terms: list[tuple[float, Term]]
    B: Any  # b with all batch axes, in the dtype of sums

    @classmethod
    def of(cls, x: Any, y: Any, b: Any, kernel: Any, mask: Any) -> _Product:
        check_points(x, y, b=b)
        check_columns("b", b, y.shape[-2], "y")
        kernel = as_kernel(kernel, x.shape[-1])
        batch = batch_of(x=x.shape[:-2], y=y.shape[:-2], b=b.shape[:-2])
        pairs = Pairs.of(x, y, batch, mask)
        terms = [(factor, Term(pairs, term)) for factor, term in kernel._terms]
        return cls(x, y, b, kernel, pairs, terms, pairs.broadcast(rounded(b, pairs.dtype)))

    @quiet
    def value(self) -> Any:
        return rounded(sum(factor * term.sums(self.B) for factor, term in self.terms), self.x.dtype)

    @quiet
    def backprop(self, ds: Any) -> ProductGradients:
        shape = *self.pairs.batch, self.x.shape[-2], self.b.shape[-1]
        check_result("ds", ds, "s", shape, self.x)
        dS, found = rounded(ds, self.pairs.dtype), []
        for factor, term in self.terms:
            db = factor * term.exchanged.sums(dS)
            dx = factor * term.gradient(self.B, dS)
            dy = factor * term.exchanged.gradient(dS, self.B)
            found.append((*of_points(term, dx, dy), sum_broadcast(db, self.b.shape)))
        dx, dy, parameters, db = zip(*found)
        dtypes, kernel = self.x.dtype, tuple(parameters) if isinstance(self.kernel, Sum) else parameters[0]
        return ProductGradients(*(rounded(sum(x), dtypes) for x in (dx, dy, db)), kernel=kernel)
