from functools import cache

import pytest

collect_ignore = ["factories.py"]  # no tests in it, and it needs numba-cuda


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
def cache_dir(tmp_path, monkeypatch):
    """An empty place for cubins."""
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path))
    return tmp_path / "cuda"
