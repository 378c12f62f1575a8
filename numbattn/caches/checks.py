"""Check the arrays of a cache, and tokens: refuse those that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ..base.checks import DTYPES, cast_of, check_values, words_for
from .eight_bits import EIGHT_BITS

NUMBERS = DTYPES + EIGHT_BITS
SIXTEEN_BITS = DTYPES[:2]


def check(name: str, x: Any, dtypes: Sequence[Any], shape: tuple[int | str, ...]) -> Any:
    """x, of one of these dtypes and of this shape, in which a word stands for any size."""
    if x.dtype not in dtypes:
        cast = cast_of(name.split()[-1], x.dtype, dtypes)
        raise TypeError(f"{name}: got {x.dtype}, allowed {', '.join(map(str, dtypes))}{cast}")
    if not _fits(x.shape, shape):
        expected = ", ".join(map(str, shape)) + "," * (len(shape) == 1)
        raise ValueError(f"{name}: got the shape {x.shape}, expected ({expected})")
    return x


@lru_cache(maxsize=256)
def _fits(shape: tuple[int, ...], wanted: tuple[int | str, ...]) -> bool:
    return len(shape) == len(wanted) and all(isinstance(size, str) or size == n for size, n in zip(wanted, shape))


def checked_dtype(name: str, dtype: Any) -> np.dtype[Any]:
    """The dtype of a cache's k and v."""
    allowed = ", ".join(map(str, NUMBERS))
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"{name}: got {words_for(dtype)}, allowed {allowed}") from None
    if found not in NUMBERS:
        raise TypeError(f"{name}: got {found}, allowed {allowed}")
    return found


@lru_cache(maxsize=64)
def check_lengths(lengths: bytes, dtype: np.dtype[Any], capacity: int) -> None:
    """Check the lengths in a NumPy array, given as its bytes: cached, since all layers of a model have the same."""
    check_values("KVCache lengths", np.frombuffer(lengths, dtype), capacity)
