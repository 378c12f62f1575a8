"""Sums over pairs of points of torch's tensors, with first and second derivatives, as `attention` has them, `vmap` and
`torch.func` included; they break the graph of torch.compile."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...base.checks import Array, flag
from ...masks import Mask
from ...points import Cost, Kernel
from ...points.checks import checked_limits
from .. import points
from .arrays import check
from .passes import Forward, TorchCall


def product(
    x: torch.Tensor, y: torch.Tensor, b: torch.Tensor, kernel: Kernel, *, mask: Mask | Array | None = None
) -> torch.Tensor:
    """`numbattn.points.product` of tensors.

    Parameters
    ----------
    x, y, b, kernel, mask
        As in `numbattn.points.product`. Lengths in kernels may be tensors, which have derivatives, too.

    Returns
    -------
    s : torch.Tensor, (..., m, e), of the dtype of x

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `numbattn.points.product`.
    NotImplementedError
        For a derivative that does not exist: see `numbattn.interop.torch`.

    Examples
    --------
    >>> import torch
    >>> from numbattn import points
    >>> from numbattn.interop.torch import points as tensors
    >>> x, length = torch.randn(100, 3, requires_grad=True), torch.tensor([0.5, 1.0, 2.0], requires_grad=True)
    >>> s = tensors.product(x, x, torch.ones(100, 1), 2.0 * points.Matern(2.5, length))
    >>> s.square().sum().backward()
    >>> x.grad.shape, length.grad.shape
    (torch.Size([100, 3]), torch.Size([3]))
    """
    check(x=x, y=y, b=b)
    return points.product(_run, x, y, b, kernel, mask)


def logsumexp(
    x: torch.Tensor, y: torch.Tensor, w: torch.Tensor | None, kernel: Kernel, *, mask: Mask | Array | None = None
) -> torch.Tensor:
    """`numbattn.points.logsumexp` of tensors.

    Parameters
    ----------
    x, y, w, kernel, mask
        As in `numbattn.points.logsumexp`. A length in the kernel may be a tensor, which has derivatives, too.

    Returns
    -------
    f : torch.Tensor, (..., m), float32, or float64 for float64

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `numbattn.points.logsumexp`.
    NotImplementedError
        For a derivative that does not exist: see `numbattn.interop.torch`.

    Examples
    --------
    >>> import torch
    >>> from numbattn import points
    >>> from numbattn.interop.torch import points as tensors
    >>> x = torch.randn(100, 3)
    >>> tensors.logsumexp(x, x, None, points.Gaussian(0.5)).shape        # of a kernel density estimate
    torch.Size([100])
    """
    w = torch.zeros_like(y[..., 0]) if w is None and isinstance(y, torch.Tensor) else w
    check(x=x, y=y, w=w)
    return points.logsumexp(_run, x, y, w, kernel, mask)


def sinkhorn(
    x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, cost: Cost, *, tol: float = 1e-6,
    max_iterations: int = 1000, debias: bool = False, mask: Mask | Array | None = None,
) -> torch.Tensor:  # fmt: skip
    """The cost of `numbattn.points.sinkhorn` of tensors: a loss between clouds of points.

    Parameters
    ----------
    x, y, a, b, cost, tol, max_iterations, debias, mask
        As in `numbattn.points.sinkhorn`; all of one dtype. tol and max_iterations are also those of the solver for
        second derivatives.

    Returns
    -------
    cost : torch.Tensor, (...), float32, or float64 for float64

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `numbattn.points.sinkhorn`.
    NotImplementedError
        For a derivative that does not exist: see `numbattn.interop.torch`.

    Examples
    --------
    >>> import torch
    >>> from numbattn import points
    >>> from numbattn.interop.torch import points as tensors
    >>> x, y = torch.randn(100, 3, requires_grad=True), torch.randn(100, 3)
    >>> a = torch.full((100,), 0.01)
    >>> loss = tensors.sinkhorn(x, y, a, a, points.Cost(2, 0.1), tol=1e-3, debias=True)
    >>> loss.backward()
    >>> x.grad.shape
    torch.Size([100, 3])
    """
    check(x=x, y=y, a=a, b=b)
    batch = np.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    weights = torch.cat([w.expand(*batch, w.shape[-1]) for w in (a, b)], -1)[..., None]
    others = cost, *checked_limits(tol, max_iterations), flag("debias", debias)
    return _run(*points.taken_apart_of_points(points.Sinkhorn, mask, *others), x, y, weights)[..., 0, 0]


@torch._disable_dynamo
def _run(options: Any, arrays: Any, x: Any, y: Any, b: Any) -> Any:
    call, tensors = TorchCall.of(options, arrays, False)
    return Forward.run(call, x, y, b, *tensors)[0]
