"""folx' own tests of its attention: results, gradients, and forward Laplacians."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest

from .suites import check, checkout, run

pytestmark = pytest.mark.skipif(not find_spec("folx"), reason="folx is not installed")


def test_attention(count):
    tests = checkout("microsoft/folx", "test/experimental/pallas/test_attention.py")
    check(count, "folx", f"folx {version('folx')}", run("folx", tests, JAX_PLATFORMS="cpu"), at_least=21)
