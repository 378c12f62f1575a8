"""Tell the user about compiling: a log line for each kernel and, once on a terminal, why a call takes so long."""

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
PATIENCE = 1.0  # seconds of compiling before a terminal is told

_told: list[str] = []  # not empty once a terminal has been told


@contextmanager
def compiling(kind: str, what: str) -> Iterator[None]:
    """A context in which something compiles: logs how long it took, and tells a terminal if it takes long."""
    start, timer = perf_counter(), threading.Timer(PATIENCE, _tell, [kind])
    timer.daemon = True
    if sys.stderr and (sys.stderr.isatty() or hasattr(sys, "ps1")):  # notebooks have prompts and no terminal
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
    LOGGER.info("compiled %s in %.1f s", what, perf_counter() - start)


def keep_quiet() -> None:
    """Say nothing about compiling on this process's terminal."""
    _told.append("")


def check_setting(name: str) -> None:
    """Refuse to go on if a setting of Numba's stops it from compiling."""
    numba: Any = imported("numba")
    if getattr(numba.config, name, False):
        raise ImportError(f"NUMBA_{name} is set in the environment: numbattn needs Numba to compile its kernels")


def _tell(kind: str) -> None:
    if not _told:
        keep_quiet()
        with suppress(OSError):  # there may be no folder, and no terminal any more
            print(f"numbattn compiles for some seconds, once for all calls of a kind, and keeps the result in "
                  f"{cache_dir(kind)}",
                  file=sys.stderr)  # fmt: skip
