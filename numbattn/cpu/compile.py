"""Compile with Numba, and keep the result on disk."""

import ctypes
import hashlib
import sys
from functools import partial
from itertools import islice

import numba
import numpy as np
from llvmlite import binding as llvm
from numba import types
from numba.core import config
from numba.core.ccallback import CFunc
from numba.core.codegen import RuntimeLinker
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from ..base import cache as disk
from ..base import sources
from ..base.compiling import compiling
from ..base.interrupts import uninterrupted
from .linked import LINKED
from .record import data_address, kind_of, reader
from .tile import LINE, contiguous_view

# what changes the code that Numba makes, apart from the CPU
SETTINGS = "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "USING_SVML"
ENTRY = *[ctypes.c_int64] * 4, ctypes.c_char_p  # first and end block, addresses of stop, memory and arguments


class Kernel:
    """A function of (first block, end block, stop, scratch, *arguments), without a result. An argument annotated with
    a NamedTuple takes as many of those in the Records as that has fields; or None, which code is compiled for.

    It is compiled for each combination of argument types, and called by its address, without the GIL. It allocates
    nothing and counts no references to its arrays (_nrt), which would take longer than a short call computes.
    """

    def __init__(self, function):
        self.function, self.__name__, self.entries = function, function.__name__, {}

    def given(self, *records):
        """A function of (first block, end block, stop, memory), for arguments in Records. The first Record is that of
        scratch, whose addresses count from the first line of the memory."""
        form = tuple([record.form for record in records])
        entry = (self.entries.get(form) or self._compile(form, records)).ctypes
        arguments = b"".join([record.words for record in records])

        def call(first, end, stop, memory):
            entry(first, end, data_address(stop), -(-data_address(memory) // LINE) * LINE, arguments)

        call.records = records  # keeps their arrays alive
        return call

    @uninterrupted
    @global_compiler_lock
    def _compile(self, form, records):
        if form not in self.entries:
            single = [kind_of(x) for record in records for x in record.arguments]
            kinds = grouped(self.function, single)
            name = f"{self.function.__module__}.{self.function.__qualname__}", kinds
            make, shown = partial(self._entry, kinds), _shown(self.__name__, single)
            self.entries[form] = c_function(name, ENTRY, make, shown, _nrt=False)
        return self.entries[form]

    def _entry(self, kinds):
        options = {**LINKED, "error_model": "numpy", "fastmath": {"contract"}, "_nrt": False}
        body, read = numba.njit(**options)(self.function), reader(kinds)

        def entry(first, end, stop, memory, arguments):
            body(first, end, contiguous_view(stop, 1, 1, 1, np.int32), *read(arguments, memory))

        return entry


def grouped(function, kinds):
    """The types of a kernel's arguments, from scratch on; kinds: those in its Records, one by one."""
    code, kinds, found = function.__code__, iter(kinds), []
    for name in code.co_varnames[3 : code.co_argcount]:
        group, kind = function.__annotations__.get(name), next(kinds)
        if group and kind != types.none:
            kind = types.BaseTuple.from_types([kind, *islice(kinds, len(group._fields) - 1)], group)
        found.append(kind)
    return *found, *kinds


def _shown(name, kinds):
    """A kernel, and the dtype of its arrays of floats."""
    floats = {str(x.dtype) for x in kinds if isinstance(x, types.Array) and isinstance(x.dtype, types.Float)}
    return f"{name}{' of ' * bool(floats)}{', '.join(sorted(floats))}"


class Code:
    """A function from object code on disk.

    It has an engine of its own: Numba names symbols by a count that restarts in each process, and it is undefined which
    of two with the same name an engine would call.
    """

    def __init__(self, kept):
        machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)  # keeps the code alive
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(kept.code))
        self._engine.finalize_object()
        self.address = self._engine.get_function_address(kept.header["function"])


def keep(file, header, library):
    """Keep the object code of a library, unless addresses in this process are part of it, and return what is kept."""
    has_addresses = library.has_dynamic_globals  # finalizes it: only now its needs are known
    if has_addresses or any(x.name.startswith(RuntimeLinker.PREFIX) for x in library._final_module.global_variables):
        return None  # the latter: it calls itself
    kept = disk.Entry(header, library._get_compiled_object())
    disk.write("cpu", file, *kept)
    return kept


class CFunction:
    """A function without a result, for calls by its address."""

    def __init__(self, owner, address, arguments):
        self._owner, self.address = owner, address  # its owner keeps the code alive
        self.ctypes = ctypes.CFUNCTYPE(None, *arguments)(address)


@uninterrupted
@global_compiler_lock
def c_function(name, arguments, make, shown="a function of a score", **options):
    """The CFunction of the function that make() returns, from the disk if it is there. name: unique across processes;
    arguments: ctypes' types, int64 in compiled code; shown: its name in the log."""
    cpu_target.target_context.refresh()
    kinds = types.void, (types.int64,) * len(arguments)
    file = file_of(name, kinds, cpu_target.target_context.codegen())
    kept = disk.read("cpu", file)
    if kept is None:
        with compiling("cpu", f"{shown} for the CPU"):
            result = CFunc(make(), kinds[::-1], {}, {"error_model": "numpy", **options})._compile_uncached()
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

