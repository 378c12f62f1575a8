"""GPyTorch's own tests of its kernels RBF and Matern: values, lengthscales of batches and features, gradients."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest

from .suites import check, checkout, run

pytestmark = pytest.mark.skipif(not find_spec("gpytorch"), reason="gpytorch is not installed")
FILES = {"test_rbf_kernel": 24, "test_matern_kernel": 47}  # and how many tests are in each


@pytest.mark.parametrize("name", FILES)
def test_kernels(name, count):
    tests = checkout("cornellius-gp/gpytorch", f"test/kernels/{name}.py")
    check(count, "GPyTorch", f"gpytorch {version('gpytorch')}", run("gpytorch", tests), at_least=FILES[name])
