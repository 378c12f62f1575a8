"""Errors that are numbattn's own fault, and how they are reported to the user."""

import platform
from types import TracebackType
from typing import Any

import numpy as np

from .checks import UserError
from .version import __version__

# say themselves what is wrong; floating-point errors are raised where NumPy is told to raise them
STATED = UserError, NotImplementedError, MemoryError, OSError, ImportError, FloatingPointError, Warning
OURS = "numbattn", "numba", "llvmlite", "numpy", "cupy", "cuda"


class Fault(RuntimeError):
    """An error of numbattn, not of its caller."""


def is_fault(error: Exception) -> bool:
    """Whether no user can have caused it, and numbattn or its libraries raised it, not a signal handler."""
    return not isinstance(error, STATED) and _where(error.__traceback__).partition(".")[0] in OURS


def fault(error: Exception, problem: Any, backend: Any) -> Fault:
    """The Fault that stands for an error."""
    first, *_ = [*str(error).splitlines(), ""]
    return Fault(f"this is a fault of numbattn, {type(error).__name__}: {first}\nPlease report it with this line: "
                 f"{line_of(problem, backend)}")  # fmt: skip


def line_of(problem: Any, backend: Any) -> str:
    """Everything that decides how a call is computed, in a line."""
    shapes = ", ".join(f"{name} {shape} {strides}" for name, shape, strides in
                       zip("qkv", problem.shapes, problem.strides))  # fmt: skip
    cache = "" if problem.cache is None else f", cache {problem.cache.dtype}, page_size {problem.cache.page_size}"
    masks = " & ".join(kind.__name__ for kind in problem.mask_kinds) or "none"
    scores = ", ".join(map(_score, problem.score_kinds)) or "none"
    return (f"numbattn {__version__}, Python {platform.python_version()}, {_device(backend)}, {problem.dtype}, "
            f"{shapes}{cache}, mask {masks}, score {scores}{', dropout' if problem.dropout else ''}")  # fmt: skip


def _score(kind: tuple[Any, ...]) -> str:
    return " ".join([kind[0].__name__, *[str(x) for x in kind[1:] if isinstance(x, np.dtype)]])


def _device(backend: Any) -> str:
    """A GPU's compute capability, or the kind of CPU."""
    current = getattr(backend, "current", None)
    return f"compute capability {current().device.cc}" if current else platform.machine()


def _where(traceback: TracebackType | None) -> str:
    """The name of the module that raised."""
    name = ""
    while traceback is not None:
        name, traceback = traceback.tb_frame.f_globals.get("__name__", ""), traceback.tb_next
    return name
