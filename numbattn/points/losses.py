"""Cross-entropy over pairs of points: of a vocabulary, and contrastive losses."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base.checks import A, Array, flag, integer_array, same_library
from ..base.values import broadcasts, clip
from .checks import TAKER, check_points
from .kernels import Linear, as_kernel
from .logsumexp import LogsumexpBackprop
from .scores import ScoresCall


def cross_entropy(
    x: A, y: A, targets: Array | None, kernel: Linear, *, w: A | None = None, sigmoid: bool = False
) -> A:  # fmt: skip
    """Losses of points x_i that belong to points y_j, j = targets_i, by the scores S_ij = w_j + scale <x_i, y_j>.

    They are log sum_k exp(S_ik) - S_ij; with sigmoid=True sum_k log(1 + exp(S_ik)) - S_ij, where each pair counts for
    itself. So there are losses of a vocabulary y, and, with targets=None, contrastive ones: InfoNCE, SigLIP with
    sigmoid=True, and CLIP's, the same of y and x besides.

    Parameters
    ----------
    x : array, (..., m, d)
    y : array, (n, d)
        As in `logsumexp`; y and w have no batch axes.
    targets : integer array, (..., m), or None
        A row with a negative target is ignored: its loss is 0; so is one of n or more in a CuPy array, which in NumPy's
        is an error. None: x_i belongs to y_i.
    kernel : Linear or Cosine
        Of similarities the scale is the inverse temperature.
    w : array, (n,), optional
        A bias of each y, as in `logsumexp`. -inf is a point without weight; x_i that belong to it have a loss of inf.
    sigmoid : bool

    Returns
    -------
    f : array, (..., m), float32, or float64 for float64

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `product`.

    Notes
    -----
    Scores are in memory a block at a time, on a GPU of up to 256 MB. Products are cuBLAS' or BLAS', of half precision
    on a GPU with sums in float32; gradients of S are rounded for them as P is in attention. Results are the same each
    time.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import points
    >>> rng = np.random.default_rng(0)
    >>> x, classes = rng.standard_normal((5, 64)), rng.standard_normal((1000, 64))
    >>> points.cross_entropy(x, classes, np.array([3, 1, 4, -1, 5]), points.Linear()).shape
    (5,)
    >>> images, texts = rng.standard_normal((2, 8, 64))
    >>> both = (images, texts), (texts, images)
    >>> clip = sum(points.cross_entropy(*pair, None, points.Cosine(100.0)).mean() for pair in both) / 2
    >>> w = np.full(8, -10.0)
    >>> siglip = points.cross_entropy(images, texts, None, points.Cosine(10.0), w=w, sigmoid=True).mean()
    """
    f: A = checked_call(x, y, targets, kernel, w, sigmoid).f
    return f


def cross_entropy_vjp(
    x: A, y: A, targets: Array | None, kernel: Linear, *, w: A | None = None, sigmoid: bool = False
) -> tuple[A, LogsumexpBackprop]:  # fmt: skip
    """`cross_entropy` with its gradients as a closure.

    Parameters
    ----------
    x, y, targets, kernel, w, sigmoid
        As in `cross_entropy`.

    Returns
    -------
    f : array, (..., m)
    backprop : LogsumexpBackprop
        As that of `logsumexp_vjp`, with Hessian-vector products: ``backprop(df)`` returns dx, dy, dw, and as `kernel`
        the gradient of the scale. df is ignored where rows are, and where f is inf.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `product`.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import points
    >>> x, classes = np.random.default_rng(0).standard_normal((2, 10, 64))
    >>> f, backprop = points.cross_entropy_vjp(x, classes, np.arange(10), points.Linear(0.1))
    >>> dx, dy, _ = backprop(np.full(10, 1 / 10))       # of f.mean()
    """
    call = checked_call(x, y, targets, kernel, w, sigmoid)
    return call.f, LogsumexpBackprop(call)


def checked_call(x: Any, y: Any, targets: Any, kernel: Any, w: Any, sigmoid: Any) -> ScoresCall:
    check_points(x, y, {} if w is None else {"w": w})
    *batch, m, features = x.shape
    n, sigmoid = len(y), flag("sigmoid", sigmoid)
    if y.ndim > 2:
        raise ValueError(f"y: got the shape {y.shape}, expected (points, features)")
    if w is not None and w.shape != (n,):
        raise ValueError(f"w: got the shape {w.shape}, expected ({n},), a number for each point of y")
    if not isinstance(as_kernel(kernel, features), Linear):
        raise TypeError(f"kernel: got {kernel}, expected Linear or Cosine")
    if targets is None:
        if m != n:
            raise ValueError(f"targets: got None for {m} points of x and {n} of y, expected as many")
        targets = np.arange(n, dtype=np.int32, like=x)
    targets = integer_array("targets", targets, "(..., m)")
    same_library(TAKER, x=x, targets=targets)
    if not broadcasts(targets.shape, (*batch, m)):
        raise ValueError(f"targets: got the shape {targets.shape}, expected {(*batch, m)}, one for each point of x")
    if isinstance(targets, np.ndarray) and targets.size and targets.max() >= n:
        raise ValueError(f"targets: got {targets.max()}, allowed less than {n}; rows of negative ones are ignored")
    targets = np.broadcast_to(clip(targets, -1, n).astype(np.int32), (*batch, m))
    return ScoresCall.of(x, y, w, kernel, targets, sigmoid)
