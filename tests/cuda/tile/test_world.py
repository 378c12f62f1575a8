"""Both meanings, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from numbattn.cuda.tile import SIMULATED

ROOT = Path(__file__).parents[3]


def python(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("module", ["numbattn", "numbattn.cuda"])
def test_nothing_is_imported_before_a_kernel_is_wanted(module):
    early = python("-c", f"import sys, {module}; print(*sys.modules)").split()
    assert not [name for name in early if name.startswith(("numba.cuda", "numbattn.cuda.tile"))]


@pytest.mark.parametrize("simulated", ["0", "1"])
def test_the_meaning_is_chosen_by_the_environment(simulated):
    script = "from numbattn.cuda import tile; print(tile.SIMULATED, callable(getattr(tile.dot, '_defn', None)))"
    wanted = "True False" if simulated == "1" else "False True"
    assert python("-c", script, NUMBA_ENABLE_CUDASIM=simulated).split() == wanted.split()


SEVERAL = "test_blocks_of_several_tiles[300-200-250-float16]"
BACKEND = [f"tests/cuda/test_passes.py::{name}"
           for name in ("test_dtypes", "test_masks", "test_masks_together", "test_shapes", SEVERAL)]  # fmt: skip


@pytest.mark.skipif(SIMULATED, reason="this is the process that it starts")
@pytest.mark.parametrize("tests", [["tests/cuda/tile"], ["tests/cuda/kernels"], BACKEND], ids=str)
def test_the_other_meaning(tests):
    """The tests of the language and of the kernels once more, simulated, and some of whole calls."""
    options = "-q", "-n0", "-p", "no:cacheprovider", "-k", "not warps"  # the other forward pass is interpreted
    assert " passed" in python("-m", "pytest", *options, *tests, NUMBA_ENABLE_CUDASIM="1")
