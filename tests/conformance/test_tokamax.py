"""tokamax' own test cases of attention; those that it calls long, too."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from .suites import check, run

pytestmark = pytest.mark.skipif(not find_spec("tokamax"), reason="tokamax is not installed")


def test_attention(count):
    tests = Path(__file__).with_name("plugins") / "tokamax.py"
    found = run("tokamax", tests, JAX_PLATFORMS="cpu")
    check(count, "tokamax", f"tokamax {version('tokamax')}", found, at_least=50)
