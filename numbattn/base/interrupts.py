"""What an exception of a signal handler, as of Ctrl-C, would break for good is done where none arrives.

Python runs signal handlers in its main thread, between any two bytecodes, also in Numba, llvmlite and their callbacks.
So what compiles has a thread of its own, whoever calls; it also has the stack that LLVM needs, more than 64 KiB.
"""

import os
import sys
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import cache, partial, wraps
from importlib import import_module
from operator import attrgetter
from threading import Thread, local, stack_size
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
PATIENCE = 0.1  # seconds between two looks at whether this is a fork
LOCKS = ("numba.core.compiler_lock", "global_compiler_lock._lock"), ("llvmlite.binding.ffi", "lib._lock._lock")

_here = local()  # .works: this thread is one of ours


def uninterrupted(work: Callable[P, R]) -> Callable[P, R]:
    """Decorate what compiles: it runs in another thread, and the caller waits. If a signal handler raises, the call
    ends at once; the other thread goes on, and the process does not end before it."""

    @wraps(work)
    def run(*args: P.args, **options: P.kwargs) -> R:
        if hasattr(_here, "works") or any(_holds(*lock) for lock in LOCKS):
            return work(*args, **options)
        return _elsewhere(partial(work, *args, **options))

    return run


def _holds(module: str, lock: str) -> bool:
    """Whether this thread holds a lock that the other one would wait for: a user's code compiles, and calls us."""
    with suppress(KeyError, AttributeError):  # it is not imported yet
        return attrgetter(lock)(sys.modules[module])._is_owned()
    return False


def _elsewhere(work: Callable[[], R]) -> R:
    """work() in another thread."""
    context, process, done, found = copy_context(), os.getpid(), allocate_lock(), list[Any]()

    def run() -> None:
        _here.works = True
        try:
            found[:] = context.run(work), None
        except BaseException as error:
            found[:] = None, error
        done.release()

    done.acquire()
    try:
        start_new_thread(_start, (run,))
    except RuntimeError as refused:  # too many threads, or the interpreter shuts down
        if "new thread" not in str(refused):  # it is a handler's
            raise
        return work()
    while not done.acquire(timeout=PATIENCE):
        if os.getpid() != process:  # a handler has forked, and the other thread is not here
            return _elsewhere(work)
    value, error = found
    try:
        if error:
            raise error
        return value
    finally:
        del error, found[:]  # its traceback refers to this


def _start(run: Callable[[], None]) -> None:
    """Start a Thread, for which the end of a process waits. Who waits for it does not: an exception in its start() may
    leave it waiting for ever, and one in the callbacks when it is freed is lost."""
    is_usual = allocate_lock()
    is_usual.acquire()

    def run_then() -> None:
        with is_usual:  # before the caller goes on
            pass
        run()

    usual = stack_size()  # what the user wants, 0 if nothing; it is the system's default now, which is large
    try:
        Thread(target=run_then, name="numbattn compiles", daemon=False).start()
    except RuntimeError:
        run()
    finally:
        if usual:
            stack_size(usual)
        is_usual.release()


imported = cache(uninterrupted(import_module))  # what an interrupt leaves of Numba could not be imported again
