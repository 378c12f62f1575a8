"""The tests of in_jax.py and the examples of numbattn.interop.jax, in a process of their own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not find_spec("jax"), reason="jax is not installed")
@pytest.mark.parametrize("file", ["tests/interop/in_jax.py", "numbattn/interop/jax/__init__.py"])
def test_in_a_process_with_jax(file):
    """Since JAX changes a process for good: every later fork warns."""
    command = sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", file
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=900)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
