"""The arrays of integers and booleans that a user's function reads in plain Python, and what it may not return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

IS_A_MASK = "returns True or False, as a mask does: return s where it shows, -math.inf where it hides, or give a mask"

IS_NO_TRUTH = "may return something else than True or False: let it compare, x != 0, say, on every way"


class Entries:
    """An array whose entries are Python's numbers: no 8 bits wrap around, and True - False is 1. In compiled code the
    same is `compiled.wide.Wide`."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __getitem__(self, place: Any) -> Any:
        return _entry(self._array[place])

    def __iter__(self) -> Iterator[Any]:
        return map(_entry, self._array)

    def __len__(self) -> int:
        return len(self._array)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def ndim(self) -> int:
        return self._array.ndim

    @property
    def size(self) -> int:
        return self._array.size

    @property
    def T(self) -> Entries:
        return Entries(self._array.T)


def entries_of(array: Any) -> Any:
    """An array as the function sees it, or a number. Floats are float64, where s * float32 would be float32."""
    if isinstance(array, int | np.generic):
        return array
    return array.astype(np.float64, copy=False) if array.dtype.kind == "f" else Entries(array)


def _entry(x: Any) -> Any:
    return x.item() if isinstance(x, np.generic) else Entries(x)
