"""Sums over pairs of points of JAX arrays, under all transformations that `attention` works under."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import numpy as jnp

from ...base.checks import Array, flag
from ...masks import Mask
from ...points import Cost, Kernel
from ...points.checks import checked_limits
from .. import points
from .operands import How, Operands, array_of, bind
from .passes import forward


def product(
    x: Any, y: Any, b: Any, kernel: Kernel, *, mask: Mask | Array | None = None
) -> Any:
    """`numbattn.points.product` of JAX arrays.

    Parameters
    ----------
    x, y, b, kernel, mask
        As in `numbattn.points.product`. Lengths in kernels may be JAX's, which have derivatives, too.

    Returns
    -------
    s : jax.Array, (..., m, e), of the dtype of x

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `numbattn.points.product`.
    NotImplementedError
        For a derivative that does not exist: see `numbattn.interop.jax`.

    Examples
    --------
    >>> import jax
    >>> from numbattn import points
    >>> from numbattn.interop.jax import points as arrays
    >>> x = jax.random.normal(jax.random.key(0), (100, 3))
    >>> loss = lambda x, length: (arrays.product(x, x, x, points.Matern(2.5, length)) ** 2).sum()
    >>> dx, dlength = jax.jit(jax.grad(loss, (0, 1)))(x, jax.numpy.ones(3))
    >>> dx.shape, dlength.shape
    ((100, 3), (3,))
    """
    return points.product(_run, array_of("x", x), array_of("y", y), array_of("b", b), kernel, mask)


def logsumexp(
    x: Any, y: Any, w: Any, kernel: Kernel, *, mask: Mask | Array | None = None
) -> Any:
    """`numbattn.points.logsumexp` of JAX arrays.

    Parameters
    ----------
    x, y, w, kernel, mask
        As in `numbattn.points.logsumexp`. A length in the kernel may be one of JAX, which has derivatives, too.

    Returns
    -------
    f : jax.Array, (..., m), float32, or float64 for float64

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `numbattn.points.logsumexp`.
    NotImplementedError
        For a derivative that does not exist: see `numbattn.interop.jax`.

    Examples
    --------
    >>> import jax
    >>> from numbattn import points
    >>> from numbattn.interop.jax import points as arrays
    >>> x = jax.random.normal(jax.random.key(0), (100, 3))
    >>> arrays.logsumexp(x, x, None, points.Gaussian(0.5)).shape         # of a kernel density estimate
    (100,)
    """
    x, y = array_of("x", x), array_of("y", y)
    w = jnp.zeros(y.shape[:-1], y.dtype) if w is None else array_of("w", w)
    return points.logsumexp(_run, x, y, w, kernel, mask)


def sinkhorn(
    x: Any, y: Any, a: Any, b: Any, cost: Cost, *, tol: float = 1e-6,
    max_iterations: int = 1000, debias: bool = False, mask: Mask | Array | None = None,
) -> Any:  # fmt: skip
    """The cost of `numbattn.points.sinkhorn` of JAX arrays: a loss between clouds of points.

    Parameters
    ----------
    x, y, a, b, cost, tol, max_iterations, debias, mask
        As in `numbattn.points.sinkhorn`; all of one dtype. tol and max_iterations are also those of the solver for
        second derivatives.

    Returns
    -------
    cost : jax.Array, (...), float32, or float64 for float64

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `numbattn.points.sinkhorn`.
    NotImplementedError
        For a derivative that does not exist: see `numbattn.interop.jax`.

    Examples
    --------
    >>> import jax
    >>> from numbattn import points
    >>> from numbattn.interop.jax import points as arrays
    >>> x, y = jax.random.normal(jax.random.key(0), (2, 100, 3))
    >>> a, cost = jax.numpy.full(100, 0.01), points.Cost(2, 0.1)
    >>> jax.grad(lambda x: arrays.sinkhorn(x, y, a, a, cost, tol=1e-3, debias=True))(x).shape
    (100, 3)
    """
    x, y, a, b = (array_of(name, z) for name, z in (("x", x), ("y", y), ("a", a), ("b", b)))
    batch = np.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    weights = jnp.concatenate([jnp.broadcast_to(w, (*batch, w.shape[-1])) for w in (a, b)], -1)[..., None]
    others = cost, *checked_limits(tol, max_iterations), flag("debias", debias)
    return _run(*points.taken_apart_of_points(points.Sinkhorn, mask, *others), x, y, weights)[..., 0, 0]


def _run(options: Any, arrays: Any, x: Any, y: Any, b: Any) -> Any:
    return bind(forward, Operands(x, y, b, tuple(arrays)), How(options, options.wanted, False, with_lse=False))[0]
