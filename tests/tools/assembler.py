"""A kernel function -> PTX -> what ptxas says of it, on a machine without a GPU."""

import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from cuda.pathfinder import find_nvidia_binary_utility
from numba import cuda
from numba.cuda import types
from numba.cuda.np import numpy_support


def type_of(argument):
    """The type of a kernel's argument: arrays of any strides, bfloat16 as uint16."""
    if isinstance(argument, np.ndarray):
        dtype = np.dtype(np.uint16) if argument.dtype.name == "bfloat16" else argument.dtype
        return types.Array(numpy_support.from_dtype(dtype), argument.ndim, "A")
    return numpy_support.from_dtype(np.asarray(argument).dtype)


def compile_ptx(kernel, arguments, threads, cc=(8, 0), blocks=1):
    """PTX for NumPy arguments like these. Nested device functions ask for the current device: they get this one."""
    device = SimpleNamespace(compute_capability=cc[:2])
    signature = types.void(*map(type_of, arguments))
    with mock.patch("numba.cuda.dispatcher.get_current_device", return_value=device):
        ptx, _ = cuda.compile(
            kernel, signature, device=False, abi="numba", cc=cc, launch_bounds=(threads, blocks), output="ptx"
        )
    return ptx.decode() if isinstance(ptx, bytes) else ptx


def assemble(ptx):
    """Registers, bytes of stack, spill stores and loads of the one kernel in a PTX text; the cubin too."""
    arch = re.search(r"^\.target (\w+)", ptx, re.M)[1]
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [find_nvidia_binary_utility("ptxas"), f"-arch={arch}", "-v", source, "-o", cubin]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        stack, stores, loads = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr
        ).groups()
        return SimpleNamespace(
            registers=int(re.search(r"Used (\d+) registers", done.stderr)[1]),
            stack=int(stack),
            spills=int(stores) + int(loads),
            cubin=cubin.read_bytes(),
        )
