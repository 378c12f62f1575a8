"""A kernel of GPyTorch whose matrix is nowhere in memory: its products and their gradients are numbattn's.

A Gaussian process is fitted by conjugate gradients, which need products alone. It takes pip install gpytorch.
"""

import gpytorch
import torch
from linear_operator.operators import KernelLinearOperator, LinearOperator

from numbattn import points
from numbattn.interop import torch as tensors


class Products(LinearOperator):
    """The matrix of Matern's kernel. Its lengthscale has the shape (..., 1, features), or (..., 1, 1)."""

    def _matmul(self, b):
        x, y, lengthscale = self._args
        return tensors.points.product(x, y, b, points.Matern(2.5, lengthscale[..., 0, :]))

    def _size(self):
        batch = torch.broadcast_shapes(*[z.shape[:-2] for z in self._args])
        return torch.Size((*batch, *[z.shape[-2] for z in self._args[:2]]))

    def _transpose_nonbatch(self):
        x, y, lengthscale = self._args
        return Products(y, x, lengthscale)


def matrix(x, y, lengthscale):
    return Products(x, y, lengthscale)


class Matern(gpytorch.kernels.Kernel):
    has_lengthscale = True

    def forward(self, x, y, diag=False, **_):
        found = KernelLinearOperator(x, y, covar_func=matrix, lengthscale=self.lengthscale)
        return found.diagonal(dim1=-1, dim2=-2) if diag else found


class Process(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean = gpytorch.means.ZeroMean()
        self.kernel = gpytorch.kernels.ScaleKernel(Matern(ard_num_dims=x.shape[-1]))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


def field(x):
    return torch.sin(8 * x[:, 0]) * torch.cos(3 * x[:, 1])


def main(count=1000, steps=20):
    torch.manual_seed(0)
    x = torch.rand(count, 2)
    y = field(x) + 0.1 * torch.randn(count)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    process = Process(x, y, likelihood)
    likelihood_of_all = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, process)
    optimiser = torch.optim.Adam(process.parameters(), lr=0.2)
    with gpytorch.settings.max_cholesky_size(0):  # never by a dense matrix
        for _ in range(steps):
            optimiser.zero_grad()
            loss = -likelihood_of_all(process(x), y)
            loss.backward()
            optimiser.step()
        process.eval()
        new = torch.rand(200, 2)
        with torch.no_grad(), gpytorch.settings.skip_posterior_variances():
            error = (process(new).mean - field(new)).square().mean().sqrt()
    lengths = process.kernel.base_kernel.lengthscale.detach().squeeze()
    print(f"lengths {lengths.numpy().round(2)}, noise {likelihood.noise.item() ** 0.5:.2f}, error {error:.3f}")
    return lengths, error


if __name__ == "__main__":
    main()
