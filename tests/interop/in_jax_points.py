"""Sums over pairs of JAX arrays: derivatives are those of finite differences. Run by test_jax.py."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.test_util import check_grads

from numbattn import points
from numbattn.interop.jax import points as arrays

from .over_points import Plain, calls

jax.config.update("jax_enable_x64", True)
NAMES = "product", "logsumexp", "scores", "sinkhorn", "divergence", "unbalanced"
MOSTLY = [pytest.param(name, marks=[pytest.mark.slow] * (name in ("divergence", "unbalanced"))) for name in NAMES]


@pytest.mark.parametrize("name", MOSTLY)
def test_derivatives(rng, name):
    f, given = calls(arrays, rng)[name]
    np.testing.assert_allclose(jax.jit(f)(*map(jnp.asarray, given)), calls(Plain, rng)[name][0](*given), rtol=1e-7)
    given = [*map(jnp.asarray, given)]
    check_grads(f, given, order=1, modes=["fwd"])
    check_grads(f, given, order=2, modes=["rev"])


@pytest.mark.parametrize("name", MOSTLY)
def test_several_tangents_and_batches(rng, name):
    f, given = calls(arrays, rng)[name]
    x, *others = map(jnp.asarray, given)

    def loss(x):
        return (f(x, *others) ** 2).sum()

    hessian = jax.jit(jax.hessian(loss))(x)  # tangents along an axis in front
    np.testing.assert_allclose(hessian, jax.jacrev(jax.grad(loss))(x), rtol=1e-6, atol=1e-8)
    mapped = jax.jit(jax.vmap(jax.grad(loss)))(jnp.stack([x, x + 1]))
    for one, own in zip(mapped, (x, x + 1)):
        np.testing.assert_allclose(one, jax.grad(loss)(own), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_lengths_and_factors_of_a_batch(rng, make):
    x, b, lengths = rng.random((4, 3)), rng.random((4, 2)), rng.random((2, 1)) + 0.5

    def f(x, b):
        return arrays.product(x, x, b, lengths[:, 0] * points.Gaussian(make(lengths)))

    wanted = points.product(x, x, b, lengths[:, 0] * points.Gaussian(lengths))
    np.testing.assert_allclose(jax.jit(f)(x, b), wanted, rtol=1e-7)
    check_grads(jax.jit(f), (x, b), order=1, modes=["rev"])


def test_errors():
    x = jnp.ones((4, 3))
    with pytest.raises(ValueError, match=r"b: got the shape \(3, 3\), expected \(..., 4, columns\)"):
        jax.jit(lambda x: arrays.product(x, x, x[:3], points.Gaussian()))(x)
    with pytest.raises(TypeError, match=r"x: got 'x', expected a jax.Array or a numpy.ndarray"):
        arrays.product("x", x, x, points.Gaussian())
    with pytest.raises(TypeError, match=r"x: got jax.Array of .*; product, .* are in numbattn.interop.jax.points; el"):
        points.product(x, x, x, points.Gaussian())


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(rng, name):
    f, given = calls(arrays, rng)[name]
    wanted, given = calls(Plain, rng)[name][0](*given), [*map(jnp.asarray, given)]
    np.testing.assert_allclose(jax.jit(f)(*given), wanted, rtol=1e-7)
    check_grads(f, given, order=2, modes=["rev"])
