"""Compile by Numba, and keep the result on disk."""

import ctypes
import hashlib
import pickle
import sys
from functools import cache

import numba
from numba import types
from numba.core.caching import NullCache
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCPUCodegen, RuntimeLinker
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

from .. import cache as disk
from ..compiling import compiling

# what changes the code that Numba makes, beside the CPU
SETTINGS = "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "USING_SVML"

def kernel(function):
    """Compile a function when it is first called, to run without the GIL.

    It allocates nothing, and counts no references to its arrays (_nrt), which takes longer than a short call computes.
    """
    compiled = numba.njit(nogil=True, error_model="numpy", _nrt=False)(function)
    compiled._cache = DiskCache(function.__name__)
    compile_now = compiled._compiler.compile

    def compile_and_say_so(kinds, *args):
        with compiling("cpu", _shown(function.__name__, kinds)):
            return compile_now(kinds, *args)

    compiled._compiler.compile = compile_and_say_so  # what Numba calls where the cache has nothing
    return compiled


def _shown(name, kinds):
    """A kernel, and the dtype of its arrays of floats."""
    floats = {str(x.dtype) for x in kinds if isinstance(x, types.Array) and isinstance(x.dtype, types.Float)}
    return f"{name}{' of ' * bool(floats)}{', '.join(sorted(floats))} for the CPU"


class DiskCache(NullCache):
    """Numba's own cache misses changes in other files than the function's, and fails on a damaged file."""

    def __init__(self, name):
        self.name = name

    def load_overload(self, signature, target_context):
        target_context.refresh()
        content = disk.read("cpu", file_of(self.name, signature, target_context.codegen()))
        return content and CompileResult._rebuild(target_context, *pickle.loads(content))

    def save_overload(self, signature, result):
        disk.write("cpu", file_of(self.name, signature, result.codegen), dumps(result._reduce()))


class CFunction:
    """A function of int64 numbers, without a result, for calls by its address."""

    def __init__(self, library, symbol, arguments):
        self._library = library  # the code lives as long
        self.address = library.get_pointer_to_function(symbol)
        self.ctypes = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)(self.address)


@global_compiler_lock
def c_function(name, arguments, make):
    """The CFunction of what make() returns, from the disk if it is there. name: tells it from others in every process.

    What comes from the disk has an engine of its own: Numba names symbols by a count that each process begins anew, and
    nothing says which of two with one name an engine would call.
    """
    cpu_target.target_context.refresh()
    kinds = types.void, (types.int64,) * arguments
    file = file_of(name, kinds, cpu_target.target_context.codegen())
    content = disk.read("cpu", file)
    if content is None:
        with compiling("cpu", "a function of a score for the CPU"):
            result = CFunc(make(), kinds[::-1], {}, {"error_model": "numpy"})._compile_uncached()
        library, symbol = result.library, result.fndesc.llvm_cfunc_wrapper_name
        content = dumps((library.serialize_using_object_code(), symbol))
        if any(x.name.startswith(RuntimeLinker.PREFIX) for x in library._final_module.global_variables):
            return CFunction(library, symbol, arguments)  # it calls itself, by an address in this process
        disk.write("cpu", file, content)
    state, symbol = pickle.loads(content)
    return CFunction(JITCPUCodegen("numbattn").unserialize_library(state), symbol, arguments)


def file_of(name, signature, codegen):
    """The name of the code compiled from these sources, by these versions, for this CPU, with Numba's settings."""
    settings = [str(getattr(numba.config, setting, None)) for setting in SETTINGS]
    parts = name, signature, codegen.magic_tuple(), settings, numba.__version__, sys.version_info[:2], _sources()
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def _sources():
    return disk.sources_digest("*.py", "cpu/*.py")
