"""Kernel matrices as operators, for the solvers of SciPy and CuPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base.checks import Array, needed
from ..base.values import rounded
from ..masks import Mask
from .checks import check_points
from .composition import Kernel
from .formula import quiet
from .kernels import as_kernel
from .pairs import Pairs, Term, terms_of
from .systems import checked_ridge, weighed_sums

MODULES = {"numpy": "scipy.sparse.linalg", "cupy": "cupyx.scipy.sparse.linalg"}


def operator(x: Array, y: Array, kernel: Kernel, *, ridge: float = 0.0, mask: Mask | Array | None = None) -> Any:
    """Kernel matrix K(x_i, y_j) as a linear operator, which only computes products.

    Parameters
    ----------
    x : array, (m, d)
    y : array, (n, d)
        NumPy arrays, or CuPy arrays, all of one dtype. y may be x.
    kernel : Gaussian, Periodic, Laplacian, Matern, Cauchy, RationalQuadratic, Radial, Linear, Cosine, Polynomial, Cost
        Or a sum of multiples of these, or a product, of all features or of some: all that `product` takes.
    ridge : float, optional
        A number >= 0 to add to the diagonal, as in kernel ridge regression and Gaussian processes. Only if y is x.
    mask : a mask of numbattn's, or a boolean array, optional
        Which points y_j each x_i sees; other elements are 0.

    Returns
    -------
    scipy.sparse.linalg.LinearOperator, (m, n)
        SciPy's, or cupyx.scipy's for CuPy arrays, for ``cg``, ``minres``, ``eigsh`` and others. float32, or float64 for
        float64. ``A @ v`` takes vectors and matrices, and is one pass over all pairs, as is ``A.T @ v``.

    Raises
    ------
    TypeError
        For arguments that are not arrays or kernels, or of the wrong kind or dtype.
    ValueError
        For shapes and numbers that do not fit. Both errors name the argument, what it got and what it takes.
    ImportError
        Without SciPy.

    Examples
    --------
    >>> import numpy as np
    >>> from scipy.sparse.linalg import cg
    >>> from numbattn import points
    >>> x = np.random.default_rng(0).random((500, 2))
    >>> A = points.operator(x, x, points.Gaussian(0.1), ridge=1e-2)
    >>> weights, info = cg(A, np.sin(6 * x[:, 0]), rtol=1e-5)
    >>> info
    0
    """
    xp = check_points(x, y)
    for name, array in (("x", x), ("y", y)):
        if array.ndim != 2:
            raise ValueError(f"{name}: got the shape {array.shape}, expected (points, features): an operator is one "
                             "matrix")
    kernel, ridge = as_kernel(kernel, x.shape[-1]), checked_ridge(ridge)
    if any(kernel._batches.values()):
        raise ValueError(f"kernel: got {kernel}, expected lengths and factors without batch axes: an operator is one "
                         "matrix")
    if ridge and y is not x:
        raise ValueError(f"ridge: got {ridge} with a y that is not x, whose matrix has no diagonal to add it to")
    pairs = Pairs.of(x, y, (), mask)
    terms = terms_of(pairs, kernel)

    def times(v: Any) -> Any:
        return _times(terms, ridge, v)

    def transposed_times(v: Any) -> Any:
        return _times([(factor, term.exchanged) for factor, term in terms], ridge, v)

    return needed(MODULES[xp], "points.operator", "scipy").LinearOperator(
        pairs.sizes, matvec=times, rmatvec=transposed_times, matmat=times, rmatmat=transposed_times, dtype=pairs.dtype
    )


@quiet
def _times(terms: list[tuple[Any, Term]], ridge: float, v: Any) -> Any:
    """The kernel matrix times a vector (n,) or a matrix (n, e), in the dtype of sums."""
    if np.iscomplexobj(v):
        return _times(terms, ridge, v.real) + 1j * _times(terms, ridge, v.imag)
    _, term = terms[0]
    b = rounded(v, term.pairs.dtype)
    columns = b[:, None] if b.ndim == 1 else b
    found = weighed_sums(terms, columns)
    return (found + ridge * columns if ridge else found).reshape(len(found), *b.shape[1:])
