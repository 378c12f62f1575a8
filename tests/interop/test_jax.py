"""The tests of in_jax.py and the examples of numbattn.interop.jax, in a process of their own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.skipif(not find_spec("jax"), reason="jax is not installed")


def in_a_process(*arguments, **environment):
    """Since JAX changes a process for good: every later fork warns."""
    command = sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *arguments
    environment = os.environ | environment
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=900)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.parametrize("file", ["tests/interop/in_jax.py", "numbattn/interop/jax/__init__.py"])
def test_on_cpus(file):
    in_a_process(file, JAX_PLATFORMS="cpu")


@pytest.mark.gpu
def test_on_gpus():
    in_a_process("tests/interop/in_jax.py", "-m", "gpu", JAX_PLATFORMS="", XLA_PYTHON_CLIENT_PREALLOCATE="false")
