"""Kernel products, soft minima, losses, solves, nearest neighbours and transport, without the matrix of all pairs.

>>> import numpy as np
>>> from numbattn import points
>>> x, y = np.random.default_rng(0).random((2, 1000, 3))
>>> points.product(x, y, np.ones((1000, 1)), points.Gaussian(0.5)).shape        # sum_j K(x_i, y_j) b_j
(1000, 1)
>>> points.logsumexp(x, y, np.zeros(1000), points.Cost(power=2, epsilon=0.05)).shape    # log sum_j exp(w_j - ...)
(1000,)
>>> distances, indices = points.nearest(x, y, k=5)
>>> labels, centres, counts, inertia = points.kmeans_step(x, x[:10])
>>> a = np.full(1000, 1 / 1000)
>>> r = points.sinkhorn(x, y, a, a, points.Cost(power=2, epsilon=0.05))                 # r.cost, r.f, r.g
>>> points.cross_entropy(x, y, None, points.Cosine(10.0)).shape       # log sum_j exp(10 cos_ij) - 10 cos_ii: InfoNCE
(1000,)
>>> A = points.operator(x, x, points.Gaussian(0.5), ridge=0.1)                          # for scipy's eigsh, svds
>>> s = points.solve(x, np.ones((1000, 1)), points.Gaussian(0.5), ridge=0.1)            # s.x = (K + ridge)^-1 b
>>> points.log_determinant(x, points.Gaussian(0.5), ridge=0.1).shape                    # log det (K + ridge)
()

All take NumPy arrays, computed on CPUs, or CuPy arrays, computed on the GPU, of float16, bfloat16, float32 or float64,
in memory linear in the number of points. Batch axes broadcast as in `numpy.matmul`, and numbattn's masks say which
points see each other, such as ``mask=numbattn.Segments(...)`` for clouds of unequal size. `product_vjp`,
`logsumexp_vjp`, `cross_entropy_vjp` and `sinkhorn_vjp` have gradients with respect to points, weights and lengths of
kernels, and Hessian-vector products, as ``backprop.hvp``. `product_jvp` and `logsumexp_jvp` have tangents. `solve_vjp`
and `log_determinant_vjp` have gradients, of factors and ridges, too. `numbattn.interop.torch.points` and `.jax.points`
have products, logarithms and transport of these frameworks' arrays.

On GPUs gradients beyond 8 features, coordinates up to 8, and ``hvp``, where second derivatives multiply it, have an
error of a rounding of abs(x), from the median of all points. Squared distances have one of abs(x)**2 beyond 256
features, and on Hopper beyond 16 in `logsumexp` of a Gaussian or ``Cost(2)`` and in `nearest` with k = 1 (beyond 64 in
float32). Lengths of each feature, periods and products of kernels round coordinates so on CPUs, too.
"""

from .composition import Kernel
from .determinant import log_determinant, log_determinant_vjp
from .gradients import (
    LogDeterminantGradients,
    LogsumexpGradients,
    ProductGradients,
    SinkhornGradients,
    SolveGradients,
)
from .kernels import (
    Cauchy,
    Cosine,
    Cost,
    Gaussian,
    Laplacian,
    Linear,
    Matern,
    PairCost,
    Periodic,
    Polynomial,
    Radial,
    RationalQuadratic,
)
from .kmeans import KMeansStep, kmeans_step
from .logsumexp import LogsumexpBackprop, logsumexp, logsumexp_jvp, logsumexp_vjp
from .losses import cross_entropy, cross_entropy_vjp
from .marginals import KL, TV
from .nearest import nearest
from .operator import operator
from .product import ProductBackprop, product, product_jvp, product_vjp
from .sinkhorn import SinkhornBackprop, Transport, sinkhorn, sinkhorn_vjp
from .solve import Solution, solve, solve_vjp

__all__ = [
    "KL",
    "TV",
    "Cauchy",
    "Cosine",
    "Cost",
    "Gaussian",
    "KMeansStep",
    "Kernel",
    "Laplacian",
    "Linear",
    "LogDeterminantGradients",
    "LogsumexpBackprop",
    "LogsumexpGradients",
    "Matern",
    "PairCost",
    "Periodic",
    "Polynomial",
    "ProductBackprop",
    "ProductGradients",
    "Radial",
    "RationalQuadratic",
    "SinkhornBackprop",
    "SinkhornGradients",
    "Solution",
    "SolveGradients",
    "Transport",
    "cross_entropy",
    "cross_entropy_vjp",
    "kmeans_step",
    "log_determinant",
    "log_determinant_vjp",
    "logsumexp",
    "logsumexp_jvp",
    "logsumexp_vjp",
    "nearest",
    "operator",
    "product",
    "product_jvp",
    "product_vjp",
    "sinkhorn",
    "sinkhorn_vjp",
    "solve",
    "solve_vjp",
]
