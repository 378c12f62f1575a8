"""numba-cuda, and beside a NumPy that is newer."""

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import numbattn
from numbattn.cuda import compiler
from numbattn.cuda.missing import Missing

PACKAGE = Path(numbattn.__file__).parent
AS_NUMPY_2_5 = """
import numpy as np
if hasattr(np, "row_stack"):
    del np.row_stack
    np.__all__.remove("row_stack")
from numbattn.cuda.build import compile_ptx
from numbattn.cuda.tile import full
from tests.cuda import factories
assert ".entry" in compile_ptx(factories.scale(), (8, 0))
assert not hasattr(np, "row_stack")
"""


def test_kernels_compile_without_row_stack_and_it_does_not_stay():
    done = subprocess.run([sys.executable, "-W", "error", "-c", AS_NUMPY_2_5], capture_output=True, text=True,
                          cwd=PACKAGE.parent)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_what_numpy_has_stays():
    before = getattr(np, "row_stack", None)
    with compiler.numpy_with_row_stack():
        assert hasattr(np, "row_stack")
    assert getattr(np, "row_stack", None) is before


def test_without_numba_cuda(monkeypatch):
    """What is called numba.cuda then is an old part of Numba."""
    monkeypatch.delitem(sys.modules, compiler.__name__)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Missing, match=r"numba-cuda not found.*numbattn\[cu13\]"):
        importlib.import_module(compiler.__name__)


FAULTS = {
    "            yield\n            import_module": "            yield\n            len",
    "        del np.row_stack": "        pass",
    'if find_spec("numba_cuda") is None:': "if False:",
}
