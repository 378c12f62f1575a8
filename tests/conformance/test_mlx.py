"""MLX's own tests of its fast attention."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest

from .suites import check, checkout, run

pytestmark = pytest.mark.skipif(not find_spec("mlx"), reason="mlx is not installed")


def test_fast_sdpa(count):
    found = run("mlx", checkout("ml-explore/mlx", "python/tests/test_fast_sdpa.py"))
    check(count, "MLX", f"mlx {version('mlx')}", found, at_least=18)
