"""JAX's own tests of jax.nn.dot_product_attention: results and gradients, its modes of masks, gradients of a bias."""

import pytest

from .suites import checkout, run

jax = pytest.importorskip("jax.version")  # the rest of JAX stays in processes of its own


def test_dot_product_attention(count):
    tests = checkout("jax-ml/jax", "tests/nn_test.py")
    found = run("jax_attention", tests, "-k", "DotProductAttention", JAX_PLATFORMS="cpu")
    count("JAX", f"jax {jax.__version__}", found)
    assert not found.failed
    assert found.passed >= 30
