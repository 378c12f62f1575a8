"""flax' own tests of its attention layers, of linen and of nnx."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest

from .suites import check, checkout, run

pytestmark = pytest.mark.skipif(not find_spec("flax"), reason="flax is not installed")


def test_layers(count):
    linen, nnx = (checkout("google/flax", f"tests/{x}_test.py") for x in ("linen/linen_attention", "nnx/nn/attention"))
    found = run("flax", linen, nnx, JAX_PLATFORMS="cpu")
    check(count, "flax", f"flax {version('flax')}", found, at_least=130)
