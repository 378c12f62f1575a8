"""Compile with Numba, and keep the result on disk."""

import ctypes
import hashlib
import sys
from array import array
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

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
from ..functions.compiled.linked import LINKED
from .record import HEAD, kind_of, reader
from .target import PLATFORM
from .tile import add_one, contiguous_view, inline_view, is_set

# what changes the code that Numba makes, apart from the CPU
SETTINGS = "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "USING_SVML"
# words of a run, before those of its arguments: how many steps and how many threads have begun; whether to stop; all
# blocks, and those of a step; the address of the memory of all threads, and the bytes of each; how many words lack the
# address of an array, where the numbers of these words begin, which the arrays follow, as Python objects, and how far
# into an object its address is, which is not compiled in: Pythons with and without the GIL share code
STEPS, THREADS, STOP, BLOCKS, STEP, MEMORY, NBYTES, OBJECTS, NUMBERS, INTO, WORDS = *range(10), 10


class Kernel:
    """A function of (first block, end block, stop, scratch, *arguments), without a result. An argument annotated with
    a NamedTuple takes as many of those in the Records as that has fields; or None, which code is compiled for.

    It is compiled for each combination of argument types, and called by its address, without the GIL: each thread of a
    run calls its entry, which calls the kernel for steps of blocks until all have begun. It allocates nothing and
    counts no references to its arrays (_nrt), which would take longer than a short call computes.
    """

    def __init__(self, function):
        self.function, self.__name__, self.entries = function, function.__name__, {}

    def given(self, *records):
        """The Call for arguments in Records. The first Record is that of scratch, whose addresses count from the
        beginning of a thread's memory."""
        form = tuple([record.form for record in records])
        words, holes = array("q", bytes(8 * WORDS)), array("q", [MEMORY])
        for record in records:
            holes.extend([len(words) + hole for hole in record.holes])
            words += record.words
        words[OBJECTS], words[NUMBERS], words[INTO] = len(holes), len(words), HEAD
        words += holes
        return Call(self.entries.get(form) or self._compile(form, records), records, words, holes)

    @uninterrupted
    @global_compiler_lock
    def _compile(self, form, records):
        if form not in self.entries:
            single = [kind_of(x) for record in records for x in record.arguments]
            kinds = grouped(self.function, single)
            name = f"{self.function.__module__}.{self.function.__qualname__}", kinds
            make, shown = partial(self._entry, kinds), _shown(self.__name__, single)
            self.entries[form] = c_function(name, (ctypes.c_int64,), make, shown, _nrt=False)
        return self.entries[form]

    def _entry(self, kinds):
        options = {**LINKED, "error_model": "numpy", "fastmath": {"contract"}, "_nrt": False}
        body, read = numba.njit(**options)(self.function), reader(kinds)

        def entry(run):
            words = contiguous_view(run, 1, WORDS, WORDS, np.int64)[0]
            for number in range(words[NUMBERS], words[NUMBERS] + words[OBJECTS]):  # every thread: there is no order
                hole, x = word_at(run + 8 * number)[0], word_at(run + 8 * (number + words[OBJECTS]))[0]
                word_at(run + 8 * hole)[0] = word_at(x + words[INTO])[0]
            stop, blocks, step = words[STOP : STOP + 1], words[BLOCKS], words[STEP]
            memory = words[MEMORY] + (add_one(words, THREADS) - 1) * words[NBYTES]
            first = (add_one(words, STEPS) - 1) * step
            while first < blocks and not is_set(stop):
                body(first, min(first + step, blocks), stop, *read(run + 8 * WORDS, memory))
                first = (add_one(words, STEPS) - 1) * step

        return entry


@inline_view
def word_at(address):
    return contiguous_view(address, 1, 1, 1, np.int64)[0]


class Call(NamedTuple):
    """What is left of a kernel with its arguments."""

    function: Any  # the CFunction of an entry
    records: tuple  # which keep its arrays alive
    words: array  # of a run, with those of its arguments and the numbers of holes
    holes: array  # where in these addresses are missing: of memory, and of arrays that are given later


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
    file, ahead = file_of(name, kinds, cpu_target.target_context.codegen()), file_ahead_of(name, kinds)
    kept = disk.read("cpu", file) or disk.read_installed(ahead)
    if kept is None:
        with compiling("cpu", f"{shown} for the CPU"):
            result = CFunc(make(), kinds[::-1], {}, {"error_model": "numpy", **options})._compile_uncached()
            library, symbol = result.library, result.fndesc.llvm_cfunc_wrapper_name
            kept = keep(file, {"function": symbol, "ahead": ahead}, library)  # LLVM's half of the time
        if kept is None:
            return CFunction(library, library.get_pointer_to_function(symbol), arguments)
    code = Code(kept)
    return CFunction(code, code.address, arguments)


def file_of(name, signature, codegen):
    """The name of the code compiled from these sources, by these versions, for this CPU, with Numba's settings."""
    return digest_of(name, signature, codegen.magic_tuple(), numba.__version__, sys.version_info[:2])


def file_ahead_of(name, signature):
    """The name of code compiled ahead from these sources, by whatever versions; its header has it, too."""
    return digest_of(name, signature, PLATFORM)


def digest_of(*parts):
    settings = [str(getattr(config, setting, None)) for setting in SETTINGS]
    return hashlib.sha256(repr((*parts, settings, sources.digest("cpu"))).encode()).hexdigest()

