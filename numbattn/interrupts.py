"""What an exception of a signal handler, as of Ctrl-C, would break for good is done where none arrives.

Python runs signal handlers in its main thread, between any two bytecodes, also in Numba, llvmlite and their callbacks.
So what compiles has a thread of its own, whoever calls, which also has a large enough stack.
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
_here = local()  # .job: that of this thread
PATIENCE = 0.1  # seconds between two looks at whether this is a fork; and on Windows no signal ends a wait
STACK = 8 << 20  # bytes; LLVM needs more than 64 KiB
LOCKS = ("numba.core.compiler_lock", "global_compiler_lock._lock"), ("llvmlite.binding.ffi", "lib._lock._lock")


def uninterrupted(work: Callable[P, R]) -> Callable[P, R]:
    """Decorate what compiles: it runs in another thread, and the caller waits. If a handler raises there, the call ends
    at once; the other thread goes on, and the process does not end before it."""

    @wraps(work)
    def run(*args: P.args, **options: P.kwargs) -> R:
        if hasattr(_here, "job") or any(_holds(*lock) for lock in LOCKS):
            return work(*args, **options)
        return _Job(partial(work, *args, **options)).result()

    return run


def _holds(module: str, lock: str) -> bool:
    """Whether this thread holds a lock that the other one would wait for: a user's code compiles, and calls us."""
    with suppress(KeyError, AttributeError):  # it is not imported yet
        return attrgetter(lock)(sys.modules[module])._is_owned()
    return False


imported = cache(uninterrupted(import_module))  # of packages that a retry could not import if half of them were there


class _Job:
    """A function without arguments, and what has come of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.context, self.done = work, copy_context(), allocate_lock()
        self.value: Any = None
        self.error: BaseException | None = None
        self.done.acquire()

    def result(self) -> Any:
        """Run it in another thread, and wait."""
        process = os.getpid()
        try:
            start_new_thread(self._start, ())
        except RuntimeError:  # too many threads, or the interpreter shuts down
            return self.work()
        while not self.done.acquire(timeout=PATIENCE):
            if os.getpid() != process:  # a handler has forked, and the other thread is not here
                return _Job(self.work).result()
        try:
            if self.error:
                raise self.error
            return self.value
        finally:
            self.error = None  # whose traceback refers to this

    def _start(self) -> None:
        """Start a Thread, for which the end of a process waits. The caller does not: an exception in its start() may
        leave it waiting for ever, and one in the callbacks when it is freed is lost."""
        usual = stack_size()  # of the user's threads; 0 is the system's default, which is large
        if 0 < usual < STACK:
            stack_size(STACK)
        try:
            Thread(target=self._run, name="numbattn compiles", daemon=False).start()
        except RuntimeError:
            self._run()
        finally:
            if 0 < usual < STACK:
                stack_size(usual)

    def _run(self) -> None:
        _here.job = self
        try:
            self.value = self.context.run(self.work)
        except BaseException as error:
            self.error = error
        self.done.release()
