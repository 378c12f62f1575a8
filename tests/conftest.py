import ctypes
import platform
from functools import cache
from importlib import import_module

import numpy as np
import pytest
from hypothesis import settings

from numbattn.cpu import scratch

settings.register_profile("busy", deadline=None)  # others may be using the machine, too
settings.load_profile("busy")
M_PERTURB = -6  # of glibc's mallopt: fresh memory is full of the complement of a byte


deselected = []  # tests, most of them slow


def pytest_deselected(items):
    deselected.extend(items)


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


def full_of_nan_on_cpus(nbytes):
    memory = scratch.fresh(nbytes)
    memory.fill(0xFF)
    return memory


@pytest.fixture(autouse=True, scope="session")
def poisoned_memory():
    """What is left unwritten shows: fresh memory of GPUs and of CPU kernels is full of NaN, elsewhere of numbers as
    large as 3e38."""
    scratch.take = full_of_nan_on_cpus
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(M_PERTURB, 0x80)
    if no_gpu():
        yield
        return
    import cupy

    pool = cupy.get_default_memory_pool()

    def full_of_nan(nbytes):
        memory = pool.malloc(nbytes)
        if nbytes:
            memory.memset_async(0xFF, nbytes)
        return memory

    cupy.cuda.set_allocator(full_of_nan)
    yield
    cupy.cuda.set_allocator(pool.malloc)


@pytest.fixture
def rng():
    return np.random.default_rng(20220524)


@pytest.fixture(scope="session", params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request):
    """NumPy and, where there is a GPU, CuPy."""
    return import_module(request.param)
