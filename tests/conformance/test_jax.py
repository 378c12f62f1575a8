"""JAX's own tests of jax.nn.dot_product_attention: results and gradients, its modes of masks, gradients of a bias."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest

from .suites import check, checkout, run

pytestmark = pytest.mark.skipif(not find_spec("jax"), reason="jax is not installed")


def test_dot_product_attention(count):
    tests = checkout("jax-ml/jax", "tests/nn_test.py")
    found = run("jax", tests, "-k", "DotProductAttention", JAX_PLATFORMS="cpu")
    check(count, "JAX", f"jax {version('jax')}", found, at_least=24)
