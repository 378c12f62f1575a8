"""numba-cuda, and beside a NumPy that is newer."""

import importlib
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import numbattn
from numbattn.cuda import compiler
from numbattn.cuda.build import compile_ptx
from numbattn.cuda.compiler import cuda, dispatcher, types
from numbattn.cuda.missing import Missing

from . import factories

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


def test_numba_stays_as_it_was():
    ask = dispatcher.get_current_device
    compile_ptx(factories.scale(), (8, 0))

    def kernel(x):
        unknown(x)  # noqa: F821

    with pytest.raises(compiler.TypingError, match="unknown"):
        compile_ptx(replace(factories.scale(), function=kernel, signature=types.void(types.int32)), (8, 0))
    assert dispatcher.get_current_device is ask


def test_other_threads_ask_numba_for_their_own_device(monkeypatch):
    monkeypatch.setattr(dispatcher, "get_current_device", lambda: "theirs")
    seen = []
    with compiler._device_of((9, 0, "a")):
        thread = threading.Thread(target=lambda: seen.append(dispatcher.get_current_device()))
        thread.start()
        thread.join()
        assert dispatcher.get_current_device().compute_capability == (9, 0)
    assert seen == ["theirs"]


def test_missing_libnvvm(monkeypatch):
    def compile(*args, **options):
        raise cuda.cudadrv.error.NvvmSupportError("libNVVM is not available")

    monkeypatch.setattr(cuda, "compile", compile)
    with pytest.raises(RuntimeError, match=r"libnvvm.*not found.*numbattn\[cu13\]"):
        compile_ptx(factories.scale(), (8, 0))


FAULTS = {
    "            yield\n            import_module": "            yield\n            len",
    "        del np.row_stack": "        pass",
    'if find_spec("numba_cuda") is None:': "if False:",
    "lambda: device if get_ident() == here else ask()": "lambda: device",
    "            dispatcher.get_current_device = ask\n": "            pass\n",
    "except (NvvmSupportError, ": "except (ZeroDivisionError, ",
    "cuda/tile/test_mapping.py": {
        "            return self.implementation": "            return self.key",
        "        def get_impl_key": "        def get_no_key",
    },
}
