"""MLX's own tests of its fast attention."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest

from .suites import checkout, run

pytestmark = pytest.mark.skipif(not find_spec("mlx"), reason="mlx is not installed")


def test_fast_sdpa(count):
    found = run("mlx", checkout("ml-explore/mlx", "python/tests/test_fast_sdpa.py"))
    count("MLX", f"mlx {version('mlx')}", found)
    assert not found.failed
    assert found.passed >= 18
