"""Numba's compiler for CUDA. This is imported before anything of it, since it is older than the newest NumPy.

numba-cuda 0.30 defines np.row_stack for kernels, which NumPy 2.5 no longer has, and makes a timedelta without a unit,
of which NumPy 2.5 warns. It does the former in a module that it imports when it first compiles.
"""

import warnings
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

import numpy as np

from .missing import missing

if find_spec("numba_cuda") is None:  # what is called numba.cuda then is an old part of Numba
    raise missing("numba-cuda")


@contextmanager
def numpy_with_row_stack():
    """While numba.cuda is imported."""
    if hasattr(np, "row_stack"):
        yield
        return
    np.row_stack = np.vstack  # noqa: NPY201
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The 'generic' unit for NumPy timedelta", DeprecationWarning)
            yield
            import_module("numba.cuda.np.arrayobj")
    finally:
        del np.row_stack  # noqa: NPY201


with numpy_with_row_stack():
    from numba import cuda
    from numba.cuda import types
    from numba.cuda.np.numpy_support import from_dtype

__all__ = ["cuda", "from_dtype", "types"]
