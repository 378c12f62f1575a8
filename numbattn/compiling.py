"""What a user is told of compiling: each kernel in a line of logging; on a terminal, once, why it takes so long."""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from time import perf_counter
from typing import Any

from .cache import cache_dir

LOGGER = logging.getLogger("numbattn")
LOGGER.addHandler(logging.NullHandler())
PATIENCE = 1.0  # seconds that it may compile without a word on a terminal

_told: list[str] = []  # that it compiles


@contextmanager
def compiling(kind: str, what: str) -> Iterator[None]:
    """Around what compiles: log how long it took, and where a person looks on say so while it takes long."""
    start, timer = perf_counter(), threading.Timer(PATIENCE, _tell, [kind])
    timer.daemon = True
    if sys.stderr and sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
    LOGGER.info("compiled %s in %.1f s", what, perf_counter() - start)


def keep_quiet() -> None:
    """Say nothing of compiling on the terminal of this process."""
    _told.append("")


def check_setting(name: str) -> None:
    """Refuse to go on where a setting of Numba's has it compile nothing."""
    numba: Any = import_module("numba")
    if getattr(numba.config, name, False):
        raise ImportError(f"NUMBA_{name} is set in the environment: numbattn needs Numba to compile its kernels")


def _tell(kind: str) -> None:
    if not _told:
        keep_quiet()
        with suppress(OSError):  # there may be no place, and nobody may listen any more
            print(f"numbattn compiles, once for all calls of a kind, and keeps the result in {cache_dir(kind)}",
                  file=sys.stderr)  # fmt: skip
