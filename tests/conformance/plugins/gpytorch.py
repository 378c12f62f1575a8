"""A plugin of pytest for GPyTorch's tests of its kernels RBF and Matern, whose matrices are made by numbattn: products
with the columns of a unit matrix, differentiated by lengthscales and points.

Left to GPyTorch are diagonals, and matrices of each feature for itself.
"""

import torch
from gpytorch.kernels import MaternKernel, RBFKernel

from numbattn import points
from numbattn.interop import torch as tensors


def by_numbattn(theirs, make):
    def forward(self, x, y, diag=False, last_dim_is_batch=False, **params):
        if diag or last_dim_is_batch:
            return theirs(self, x, y, diag=diag, last_dim_is_batch=last_dim_is_batch, **params)
        one = torch.eye(y.shape[-2], dtype=x.dtype, device=x.device)
        return tensors.points.product(x, y, one, make(self, self.lengthscale[..., 0, :]))

    return forward


RBFKernel.forward = by_numbattn(RBFKernel.forward, lambda kernel, length: points.Gaussian(length))
MaternKernel.forward = by_numbattn(MaternKernel.forward, lambda kernel, length: points.Matern(kernel.nu, length))
