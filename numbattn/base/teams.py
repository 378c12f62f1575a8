"""The threads of the library that multiplied the user's matrices a moment ago.

After a product OpenBLAS' threads spin for a tenth of a second, and after a loop those of OpenMP for milliseconds. A
thread of ours would get half a core beside each of them: so they are asked to compute, too. They also begin sooner than
a new thread would.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import RLock, local
from time import sleep
from typing import Any

import numpy as np

from .forks import cached_property
from .interrupts import uninterrupted

# of OpenBLAS, in whose releases a job looks as below; others may change it
KNOWN = range(27, 32)  # 0.3.27 to 0.3.31
JOB_WORDS, ROUTINE, ARGUMENT, NEXT = 64, 0, 3, 8  # of a blas_queue_t in common_thread.h, and some more words of zeros


# OpenBLAS ends its threads before a fork, whatever they do. So a fork waits for those who are here, and who comes while
# a process forks computes alone: words are how many are here, and whether it forks. One native call counts, since a
# signal handler may raise between two instructions of Python.
GUARDED = """
define void @guarded(i64* %words, void (i64, i64)* %start, i64 %size, i64 %jobs, void (i64)* %function, i64 %data) {
  %one = atomicrmw add i64* %words, i64 1 seq_cst
  %place = getelementptr i64, i64* %words, i64 1
  %forks = load atomic i64, i64* %place seq_cst, align 8
  %is_free = icmp eq i64 %forks, 0
  br i1 %is_free, label %together, label %alone
together:
  call void %start(i64 %size, i64 %jobs)
  %two = atomicrmw sub i64* %words, i64 1 seq_cst
  ret void
alone:
  %three = atomicrmw sub i64* %words, i64 1 seq_cst
  call void %function(i64 %data)
  ret void
}
"""


class OpenBlas:
    """The threads of the OpenBLAS in NumPy's wheels, by the function with which it starts its own products."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._start, self._count = library.exec_blas, library.scipy_openblas_get_num_threads64_
        self._callback = ctypes.c_void_p.in_dll(library, "openblas_threads_callback_")
        self._words, self._forking = (ctypes.c_int64 * 2)(), RLock()
        os.register_at_fork(before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._in_child)

    def _before_fork(self) -> None:
        """Wait until nobody is here, and let nobody in."""
        self._forking.acquire()
        self._words[1] = 1
        while self._words[0]:
            sleep(1e-4)

    def _after_fork(self) -> None:
        self._words[1] = 0
        self._forking.release()

    def _in_child(self) -> None:
        self._words[0] = 0
        self._after_fork()

    @cached_property
    @uninterrupted
    def _guarded(self) -> Any:
        """The function above."""
        from llvmlite import binding as llvm

        machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(GUARDED), machine)
        engine.finalize_object()
        arguments = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 2, ctypes.c_void_p, ctypes.c_int64]
        function: Any = ctypes.CFUNCTYPE(None, *arguments)(engine.get_function_address("guarded"))
        function.engine = engine  # keeps the code: several threads may make one at once, each its own
        return function

    def size(self, threads: int, limit: int, here: bool) -> int:
        """How many threads it would use where `threads` are wanted, and at most `limit` allowed; 0 if it should not be
        asked: the user wants fewer threads of it, or has given it others. here: whether this thread would ask."""
        return 0 if self._count() < threads or self._callback else threads

    def run(self, function: int, data: int, size: int) -> None:
        """function(data) in each of its threads, this one among them: addresses of a C function and its argument."""
        jobs = np.zeros((size, JOB_WORDS), np.int64)
        first = jobs.ctypes.data
        jobs[:, ROUTINE], jobs[:, ARGUMENT] = function, data
        jobs[:-1, NEXT] = first + jobs.strides[0] * np.arange(1, size)
        self._guarded(ctypes.addressof(self._words), self._start, size, first, function, data)


class OpenMP:
    """The threads of the OpenMP runtime that a library computes with, in its loops of this thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._start, self._count = library.GOMP_parallel, library.omp_get_max_threads
        self._start.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint

    def size(self, threads: int, limit: int, here: bool) -> int:
        """As of OpenBlas. They are all asked, since it would end those that are not; in a child it would wait for those
        of its parent."""
        count: int = self._count() if here and not _forked else 0
        return count if threads <= count <= limit else 0

    def run(self, function: int, data: int, size: int) -> None:
        """As of OpenBlas."""
        self._start(function, data, size, 0)


Team = OpenBlas | OpenMP


@cache
def of_numpy() -> Team | None:
    """The threads of NumPy's products, if they are known."""
    for path in Path(np.__file__).parents[1].glob("numpy.libs/libscipy_openblas64_*.so"):
        library = _loaded(path)
        if library is not None and hasattr(library, "exec_blas"):
            config = library.scipy_openblas_get_config64_
            config.restype = ctypes.c_char_p
            version = re.match(rb"OpenBLAS 0\.3\.(\d+)\b(?!.*USE_OPENMP)", config())
            if version and int(version[1]) in KNOWN:
                return OpenBlas(library)
    return None


@cache
def of_torch() -> Team | None:
    """The threads of torch's operations on CPUs, if they are OpenMP's."""
    (package,) = sys.modules["torch"].__path__
    library = _loaded(Path(package, "lib", "libtorch_cpu.so"))  # which also finds what it is linked with
    return OpenMP(library) if library is not None and hasattr(library, "GOMP_parallel") else None


def _loaded(path: Path) -> ctypes.CDLL | None:
    """A library of this process; None if it is not in it."""
    try:
        return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
    except (OSError, AttributeError):  # there are no such modes on Windows
        return None


class Here(local):
    """The library that calls."""

    team: Callable[[], Team | None] = staticmethod(of_numpy)


_here = Here()
_forked = False  # whether this process is a child of one that had this module


def team() -> Team | None:
    """The threads to ask in this thread, if any."""
    return _here.team()


class OnThreadsOf:
    """Inside, the threads of another library are asked."""

    def __init__(self, team: Callable[[], Team | None]) -> None:
        self._team = team

    def __enter__(self) -> None:
        _here.team = self._team

    def __exit__(self, *_: Any) -> None:
        _here.team = of_numpy


def _in_child() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
