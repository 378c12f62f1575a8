"""Kernel products, soft minima, nearest neighbours and optimal transport of points, without the matrix of all pairs.

>>> import numpy as np
>>> from numbattn import points
>>> x, y = np.random.default_rng(0).random((2, 1000, 3))
>>> points.product(x, y, np.ones((1000, 1)), points.Gaussian(0.5)).shape        # sum_j K(x_i, y_j) b_j
(1000, 1)
>>> points.logsumexp(x, y, np.zeros(1000), points.Cost(power=2, epsilon=0.05)).shape    # log sum_j exp(w_j - ...)
(1000,)
>>> distances, indices = points.nearest(x, y, k=5)

Each takes NumPy arrays, computed on CPUs, or CuPy arrays, computed on the GPU, of float16, bfloat16, float32 or
float64, in memory linear in the number of points; batch axes broadcast as in `numpy.matmul`, and numbattn's masks say
which points see each other, ``mask=numbattn.Segments(...)`` for clouds of unequal size. `product_vjp`, `logsumexp_vjp`
have exact gradients, of points, weights and lengths of kernels.
"""

from .gradients import LogsumexpGradients, ProductGradients
from .kernels import (
    Cauchy,
    Cosine,
    Cost,
    Gaussian,
    Kernel,
    Laplacian,
    Linear,
    Matern,
    Polynomial,
    Radial,
    RationalQuadratic,
)
from .logsumexp import logsumexp, logsumexp_vjp
from .nearest import nearest
from .product import product, product_vjp

__all__ = [
    "Cauchy",
    "Cosine",
    "Cost",
    "Gaussian",
    "Kernel",
    "Laplacian",
    "Linear",
    "LogsumexpGradients",
    "Matern",
    "Polynomial",
    "ProductGradients",
    "Radial",
    "RationalQuadratic",
    "logsumexp",
    "logsumexp_vjp",
    "nearest",
    "product",
    "product_vjp",
]
