"""A kernel function and NumPy arguments -> PTX -> what ptxas says of it, on a machine without a GPU."""

import re

from numbattn.cuda import build, kernel
from numbattn.cuda.compiler import types

from .memory import TensorMap


def type_of(argument):
    """As `kernel.type_of`, also of this interpreter's tensor maps."""
    return types.uint64 if isinstance(argument, TensorMap) else kernel.type_of(argument)


def compile_ptx(function, arguments, threads, cc=(8, 0), cluster=1):
    """PTX for NumPy arguments like these."""
    maps = [build.TensorMapArgument(i, x.box, x.swizzle) for i, x in enumerate(arguments) if isinstance(x, TensorMap)]
    signature = types.void(*map(type_of, arguments))
    return build.compile_ptx(build.Source(function, signature, threads, tensor_maps=maps, cluster=cluster), cc)


def assemble(ptx):
    """The Report of the one kernel in a PTX text."""
    major, minor, letter = re.search(r"^\.target sm_(\d+)(\d)(a?)", ptx, re.M).groups()
    _, report = build.assemble(ptx, (int(major), int(minor), *letter))
    return report
