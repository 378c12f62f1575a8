"""A fork waits for other threads that import or compile. They do not exist in the child, where nobody would release
their locks.

A new lock in the child would guard a compiler that another thread has left in the middle of its work.
"""

import functools
import logging  # noqa: F401  a fork takes the locks of what was imported last first: Numba logs
import os
import sys
import threading
from contextlib import ExitStack, suppress
from importlib import _bootstrap, import_module
from operator import attrgetter
from typing import TYPE_CHECKING

PACKAGES = "numbattn", "numba", "numba_cuda", "llvmlite", "numpy"
LOCKS = (  # in the order in which threads take them
    ("numbattn.cuda.launch", "_lock"),
    ("numba.core.compiler_lock", "global_compiler_lock"),
    ("llvmlite.binding.ffi", "lib._lock"),
    ("numbattn.functions.frozen", "LOCK"),
)


if TYPE_CHECKING:
    cached_property = functools.cached_property
else:

    class cached_property(functools.cached_property):
        """Without the lock, one for all instances, that it has before Python 3.12: Numba may compile in one."""

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            found = instance.__dict__[self.attrname] = self.func(instance)
            return found


class Forks(threading.local):
    """The forks that a thread is in; a signal handler may fork within one."""

    def __init__(self) -> None:
        self.held: list[ExitStack] = []

    def before(self) -> None:
        """Take as many of the locks as possible: an error here does not keep a process from forking."""
        held = ExitStack()
        self.held.append(held)
        finished: set[str] = set()
        while begun := _begun() - finished:
            for name in begun:
                with suppress(ImportError):
                    import_module(name)  # waits for the thread that imports it
            finished |= begun
        for module, lock in LOCKS:
            if module in sys.modules:
                held.enter_context(attrgetter(lock)(sys.modules[module]))

    def after(self) -> None:
        self.held.pop().close()


def _begun() -> set[str]:
    """The modules that threads are importing."""
    return {name for name in [*getattr(_bootstrap, "_module_locks", ())] if name.partition(".")[0] in PACKAGES}


if hasattr(os, "register_at_fork"):
    _forks = Forks()
    os.register_at_fork(before=_forks.before, after_in_parent=_forks.after, after_in_child=_forks.after)
