"""A kernel function and NumPy arguments -> PTX -> what ptxas says of it, on a machine without a GPU."""

import re

import numpy as np
from numba.cuda import types
from numba.cuda.np import numpy_support

from numbattn.cuda import build
from numbattn.cuda.tile import INDEX

from .memory import TensorMap


def type_of(argument):
    """The type of a kernel's argument: arrays of any strides, bfloat16 as uint16, tuples."""
    if isinstance(argument, tuple):
        parts, named = [type_of(part) for part in argument], hasattr(argument, "_fields")
        return types.NamedTuple(parts, type(argument)) if named else types.Tuple.from_types(parts)
    if isinstance(argument, np.ndarray):
        dtype = np.dtype(np.uint16) if argument.dtype.name == "bfloat16" else argument.dtype
        return types.Array(numpy_support.from_dtype(dtype), argument.ndim, "A")
    if isinstance(argument, TensorMap):
        return types.uint64
    return INDEX if isinstance(argument, np.int32) else numpy_support.from_dtype(np.asarray(argument).dtype)


def compile_ptx(kernel, arguments, threads, cc=(8, 0)):
    """PTX for NumPy arguments like these."""
    maps = [build.TensorMap(i, x.box, x.swizzle) for i, x in enumerate(arguments) if isinstance(x, TensorMap)]
    return build.compile_ptx(build.Source(kernel, types.void(*map(type_of, arguments)), threads, tensor_maps=maps), cc)


def assemble(ptx):
    """The Report of the one kernel in a PTX text."""
    major, minor, letter = re.search(r"^\.target sm_(\d+)(\d)(a?)", ptx, re.M).groups()
    _, report = build.assemble(ptx, (int(major), int(minor), *letter))
    return report
