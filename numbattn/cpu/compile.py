"""Compile by Numba, and keep the result on disk."""

import ctypes
import hashlib
import sys

import numba
from llvmlite import binding as llvm
from numba import _dynfunc, types
from numba.core import config, typing
from numba.core.caching import NullCache
from numba.core.ccallback import CFunc
from numba.core.codegen import RuntimeLinker
from numba.core.compiler import compile_result
from numba.core.compiler_lock import global_compiler_lock
from numba.core.environment import Environment
from numba.core.funcdesc import ExternalFunctionDescriptor
from numba.core.registry import cpu_target

from .. import cache as disk
from .. import sources
from ..compiling import compiling

# what changes the code that Numba makes, beside the CPU
SETTINGS = "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "USING_SVML"


def kernel(function):
    """Compile a function when it is first called, to run without the GIL.

    It returns nothing, allocates nothing and counts no references to its arrays (_nrt): that takes longer than a short
    call computes.
    """
    compiled = numba.njit(nogil=True, error_model="numpy", _nrt=False)(function)
    compiled._cache = DiskCache(function)
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
    """Numba's own cache misses changes in other files than the function's, fails on a damaged file, and unpickles."""

    def __init__(self, function):
        self.function, self.name = function, f"{function.__module__}.{function.__qualname__}"

    def load_overload(self, signature, target_context):
        target_context.refresh()
        kept = disk.read("cpu", file_of(self.name, signature, target_context.codegen()))
        if kept is None:
            return None
        code, function = Code(kept), self.function
        environment = Environment(function.__globals__)
        code.set(kept.header["environment"], id(environment))
        module = sys.modules[function.__module__]
        entry = _dynfunc.make_function(module, function.__name__, "", code.address, environment, (code,))
        return compile_result(
            signature=typing.signature(types.none, *signature),
            fndesc=ExternalFunctionDescriptor(self.name, types.none, signature),
            entry_point=entry,
            objectmode=False,
        )

    def save_overload(self, signature, result):
        is_whole = result.signature.return_type == types.none and not (result.lifted or result.reload_init)
        if is_whole and not result.environment.consts:
            header = {"function": result.fndesc.llvm_cpython_wrapper_name, "environment": result.fndesc.env_name}
            keep(file_of(self.name, signature, result.codegen), header, result.library)


class Code:
    """A function of object code that was kept.

    It has an engine of its own: Numba names symbols by a count that each process begins anew, and nothing says which of
    two with one name an engine would call.
    """

    def __init__(self, kept):
        machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)  # the code lives as long
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(kept.code))
        self._engine.finalize_object()
        self.address = self._engine.get_function_address(kept.header["function"])

    def set(self, pointer, address):
        """Where its variable of this name points."""
        ctypes.c_void_p.from_address(self._engine.get_global_value_address(pointer)).value = address


def keep(file, header, library):
    """Keep the object code of a library, unless addresses in this process are part of it, and return what is kept."""
    has_addresses = library.has_dynamic_globals  # finalizes it: only now it is known what it needs
    if has_addresses or any(x.name.startswith(RuntimeLinker.PREFIX) for x in library._final_module.global_variables):
        return None  # the latter: it calls itself
    kept = disk.Entry(header, library._get_compiled_object())
    disk.write("cpu", file, *kept)
    return kept


class CFunction:
    """A function of int64 numbers, without a result, for calls by its address."""

    def __init__(self, owner, address, arguments):
        self._owner, self.address = owner, address  # the code lives as long as its owner
        self.ctypes = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)(address)


@global_compiler_lock
def c_function(name, arguments, make):
    """The CFunction of what make() returns, from the disk if it is there. name: no other has it in any process."""
    cpu_target.target_context.refresh()
    kinds = types.void, (types.int64,) * arguments
    file = file_of(name, kinds, cpu_target.target_context.codegen())
    kept = disk.read("cpu", file)
    if kept is None:
        with compiling("cpu", "a function of a score for the CPU"):
            result = CFunc(make(), kinds[::-1], {}, {"error_model": "numpy"})._compile_uncached()
        library, symbol = result.library, result.fndesc.llvm_cfunc_wrapper_name
        kept = keep(file, {"function": symbol}, library)
        if kept is None:
            return CFunction(library, library.get_pointer_to_function(symbol), arguments)
    code = Code(kept)
    return CFunction(code, code.address, arguments)


def file_of(name, signature, codegen):
    """The name of the code compiled from these sources, by these versions, for this CPU, with Numba's settings."""
    settings = [str(getattr(config, setting, None)) for setting in SETTINGS]
    compilers = numba.__version__, settings, sys.version_info[:2]
    parts = name, signature, codegen.magic_tuple(), compilers, sources.digest("cpu")
    return hashlib.sha256(repr(parts).encode()).hexdigest()

