from functools import cache
from importlib import import_module

import numpy as np
import pytest


@cache
def no_gpu():
    """Why the GPU tests cannot run; None where they can."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    return None if cupy.is_available() else "no CUDA device"


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and no_gpu():
        pytest.skip(no_gpu())


@pytest.fixture
def rng():
    return np.random.default_rng(20220524)


@pytest.fixture(scope="session", params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request):
    """NumPy and, where there is a GPU, CuPy."""
    return import_module(request.param)
