"""`launch` runs a kernel in the world of a test: simulated, or compiled and interpreted. See the fixture `world`."""

from contextlib import contextmanager

import numpy as np
import pytest
from numba.core.errors import TypingError as CompilersTypingError

from numbattn.cuda.compiler import TypingError
from numbattn.cuda.tile import simulate

from .assembler import compile_ptx
from .ptx import Kernel, TensorMap, interpret

WORLDS = "simulated", "compiled"
simulated_only, compiled_only = map(pytest.mark.world, WORLDS)
mostly_simulated = pytest.mark.mostly_simulated
MISUSED = TypingError, CompilersTypingError  # what a word raises, simulated and compiled
_world = ["compiled"]


@contextmanager
def world_of(name):
    _world.append(name)
    try:
        yield name
    finally:
        _world.pop()


def simulated():
    return _world[-1] == "simulated"


def launch(kernel, grid, threads, shared_bytes, *arguments, cc=(8, 0), cluster=1):
    """Run a kernel on NumPy arrays (outputs in place) and scalars. Returns what is known of its PTX; None simulated."""
    if simulated():
        simulate(kernel, grid, threads, shared_bytes, *arguments, cluster=cluster)
        return None
    ptx = compile_ptx(kernel, arguments, threads, cc, cluster)
    return interpret(ptx, grid, threads, shared_bytes, *arguments)


def tensor_map(array, box):
    """What `launch` takes for a tensor map."""
    return array if simulated() else TensorMap(array, box)


def ptx_of(kernel, threads, *arguments, cc=(8, 0)):
    return Kernel(compile_ptx(kernel, arguments, threads, cc))


def poisoned(shape, dtype=np.float32):
    """An output of which every element is to be written."""
    return np.full(shape, np.nan, dtype)
