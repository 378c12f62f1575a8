"""Arrays that calls need beside those given, made once: where they are, and for as long as CUDA graphs read them."""

from collections.abc import Callable
from typing import Any, TypeVar

from .backends import backend
from .checks import library
from .values import remembered

T = TypeVar("T")
KEPT: dict[Any, Any] = {}  # arrays, by what they are and where
OF_GRAPHS: dict[Any, Any] = {}  # those that graphs read


def kept(key: tuple[Any, ...], array: Any, find: Callable[[], T]) -> T:
    """What find() finds, kept for later calls on arrays of the library of `array`, on a GPU in the same stream. In a
    capture, in which arrays cannot be copied to a GPU, it has been found before, and lives as long as the process."""
    xp = str(library(array))
    if xp == "numpy" or (place := backend(xp).place()) is not None:
        return remembered(KEPT, (*key, xp, () if xp == "numpy" else place), find)
    whole = (*key, xp, backend(xp).place_before())
    found: T = OF_GRAPHS.get(whole) or KEPT.get(whole) or find()
    return OF_GRAPHS.setdefault(whole, found)
