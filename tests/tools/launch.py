"""`launch` runs a kernel in the world that this process is in: simulated, or compiled and interpreted."""

import numpy as np
import pytest

from numbattn.cuda.tile import SIMULATED, simulate

from .assembler import compile_ptx
from .ptx import Kernel, TensorMap, interpret

simulated_only = pytest.mark.skipif(not SIMULATED, reason="for NUMBA_ENABLE_CUDASIM=1")


def launch(kernel, grid, threads, shared_bytes, *arguments, cc=(8, 0)):
    """Run a kernel on NumPy arrays (outputs in place) and scalars. Returns what is known of its PTX; None simulated."""
    if SIMULATED:
        simulate(kernel, grid, threads, shared_bytes, *arguments)
        return None
    return interpret(compile_ptx(kernel, arguments, threads, cc), grid, threads, shared_bytes, *arguments)


def tensor_map(array, box):
    """What `launch` takes for a tensor map."""
    return array if SIMULATED else TensorMap(array, box)


def ptx_of(kernel, threads, *arguments, cc=(8, 0)):
    return Kernel(compile_ptx(kernel, arguments, threads, cc))


def poisoned(shape, dtype=np.float32):
    """An output of which every element is to be written."""
    return np.full(shape, np.nan, dtype)
