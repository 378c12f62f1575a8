"""Cross-entropy over pairs of points: of a vocabulary, and contrastive losses."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from ..base.checks import A, Array, integer_array, same_library, words_for
from ..base.values import clip
from .checks import TAKER, check_points, check_vector
from .kernels import Linear, as_kernel
from .logsumexp import LogsumexpBackprop
from .scores import SIGMOID, SOFTMAX, SYMMETRIC, ScoresCall

Loss = Literal["softmax", "symmetric", "sigmoid"]


def cross_entropy(
    x: A, y: A, targets: Array | None, kernel: Linear, *, w: A | None = None, loss: Loss = "softmax"
) -> A:  # fmt: skip
    """The losses of each point x_i, whose own point is y_j with j = targets_i, by scores of all pairs.

    Of S_ij = w_j + scale <x_i, y_j> they are

        softmax     log sum_j exp(S_ij) - S_ij                          a vocabulary's y; InfoNCE
        symmetric   the same + log sum_k exp(S_kj) - S_ij               CLIP, both directions
        sigmoid     sum_j log(1 + exp(S_ij)) - S_ij                     SigLIP, each pair for itself

    Parameters
    ----------
    x : array, (..., m, d)
    y : array, (..., n, d)
        As in `logsumexp`.
    targets : integer array, (..., m), or None
        A row with a negative target is ignored: its loss is 0. So is one of n or more in a CuPy array, which in a NumPy
        array is an error. None: x_i belongs to y_i.
    kernel : Linear or Cosine
        With a scale, of similarities the inverse temperature.
    w : array, (..., n), optional
        The biases of each y, as in `logsumexp`.
    loss : "softmax", "symmetric" or "sigmoid"
        "symmetric" is for targets that are None.

    Returns
    -------
    f : array, (..., m), float32, or float64 for float64

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `product`.

    Notes
    -----
    A block of S is in memory at a time, 256 MB at most on a GPU; matrix products are cuBLAS' or BLAS', of half
    precision with sums in float32, and results are the same each time. With gradients there are four products, one of
    them for f; five if it is symmetric.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import points
    >>> rng = np.random.default_rng(0)
    >>> x, classes = rng.standard_normal((5, 64)), rng.standard_normal((1000, 64))
    >>> points.cross_entropy(x, classes, np.array([3, 1, 4, -1, 5]), points.Linear()).shape
    (5,)
    >>> images, texts = rng.standard_normal((2, 8, 64))
    >>> clip = points.cross_entropy(images, texts, None, points.Cosine(100.0), loss="symmetric").mean() / 2
    >>> bias = np.full(8, -10.0)
    >>> siglip = points.cross_entropy(images, texts, None, points.Cosine(10.0), w=bias, loss="sigmoid").mean()
    """
    f: A = checked(x, y, targets, kernel, w, loss).f
    return f


def cross_entropy_vjp(
    x: A, y: A, targets: Array | None, kernel: Linear, *, w: A | None = None, loss: Loss = "softmax"
) -> tuple[A, LogsumexpBackprop]:  # fmt: skip
    """`cross_entropy` with its gradients as a closure.

    Parameters
    ----------
    x, y, targets, kernel, w, loss
        As in `cross_entropy`.

    Returns
    -------
    f : array, (..., m)
    backprop : LogsumexpBackprop
        As that of `logsumexp_vjp`: ``backprop(df)`` returns dx, dy, dw, with the gradient of the scale as `kernel`;
        df is ignored where rows are. ``backprop.hvp(df, tx, ty, tw)`` has Hessian-vector products, and
        ``backprop.jvp(tx, ty, tw)`` the tangent of f.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `product`.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import points
    >>> x, classes = np.random.default_rng(0).standard_normal((2, 10, 64))
    >>> f, backprop = points.cross_entropy_vjp(x, classes, np.arange(10), points.Linear(0.1), w=np.zeros(10))
    >>> grads = backprop(np.full(10, 1 / 10))       # of f.mean()
    >>> grads.dw.sum().round(6), grads.kernel.shape
    (np.float64(0.0), ())
    """
    call = checked(x, y, targets, kernel, w, loss)
    return call.f, LogsumexpBackprop(call)


def checked(x: Any, y: Any, targets: Any, kernel: Any, w: Any, loss: Any) -> ScoresCall:
    """The call, checked."""
    check_points(x, y, {} if w is None else {"w": w})
    (m, features), n = x.shape[-2:], y.shape[-2]
    if w is not None:
        check_vector("w", w, n, "y")
    if not isinstance(as_kernel(kernel, features), Linear):
        raise TypeError(f"kernel: got {kernel}, expected Linear or Cosine")
    if loss not in (SOFTMAX, SYMMETRIC, SIGMOID):
        raise ValueError(f"loss: got {words_for(loss)}, allowed {SOFTMAX!r}, {SYMMETRIC!r} and {SIGMOID!r}")
    if targets is None:
        if m != n:
            raise ValueError(f"targets: got None for {m} points of x and {n} of y, expected as many")
        return ScoresCall.of(x, y, w, kernel, np.arange(n, dtype=np.int32, like=x), loss)
    if loss == SYMMETRIC:
        raise ValueError(f"targets: got {words_for(targets)}, expected None if the loss is {SYMMETRIC!r}")
    targets = integer_array("targets", targets, "(..., m)")
    same_library(TAKER, x=x, targets=targets)
    check_vector("targets", targets, m, "x")
    if isinstance(targets, np.ndarray) and targets.size and targets.max() >= n:
        raise ValueError(f"targets: got {targets.max()}, allowed less than {n}, or negative for a row that is ignored")
    return ScoresCall.of(x, y, w, kernel, clip(targets, -1, n).astype(np.int32), loss)
