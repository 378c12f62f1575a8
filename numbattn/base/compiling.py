"""Tell the user about compiling: a log line for each kernel and, once, why a call takes so long."""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

from .cache import cache_dir
from .interrupts import imported

LOGGER = logging.getLogger("numbattn")
LOGGER.addHandler(logging.NullHandler())
PATIENCE = 1.0  # seconds of compiling before the user is told

_told: list[str] = []  # not empty once the user has been told


@contextmanager
def compiling(kind: str, what: str) -> Iterator[None]:
    """A context in which something compiles: logs how long it took, and tells the user if it takes long."""
    start, timer = perf_counter(), threading.Timer(PATIENCE, _tell, [kind])
    timer.daemon = True
    with suppress(RuntimeError):  # the interpreter shuts down, or there are too many threads
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
    LOGGER.info("compiled %s in %.1f s", what, perf_counter() - start)


def keep_quiet() -> None:
    """Tell the user nothing about compiling in this process."""
    _told.append("")


def check_setting(name: str) -> None:
    """Refuse to go on if a setting of Numba's stops it from compiling."""
    numba: Any = imported("numba")
    if getattr(numba.config, name, False):
        raise ImportError(f"NUMBA_{name} is set in the environment: numbattn needs Numba to compile its kernels")


def _tell(kind: str) -> None:
    """On a terminal or in a notebook, which has prompts, in words; elsewhere as a warning in the log."""
    if not _told:
        keep_quiet()
        with suppress(OSError):  # there may be no folder, and no terminal any more
            text = (f"numbattn compiles for some seconds, once for all calls of a kind, and keeps the result in "
                    f"{cache_dir(kind)}")  # fmt: skip
            if sys.stderr and (sys.stderr.isatty() or hasattr(sys, "ps1")):
                print(text, file=sys.stderr)
            else:
                LOGGER.warning(text)
