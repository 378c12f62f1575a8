"""The mask of a call with a cache."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ..base.values import Memo, Value
from ..masks import All, Cached, Mask, placed

MASKS = Memo("masks")  # by cache and mask


def masked(cache: Value, lengths: Any, mask: Mask) -> Mask:
    """The mask of a call with a cache of these lengths: aligned with them, and nothing visible after them."""
    if isinstance(mask._frame, Cached):
        return mask
    if isinstance(lengths, np.ndarray) and not mask._holds_arrays:
        return _masked_by_numbers(mask, lengths.tobytes(), lengths.dtype)
    found = MASKS.get(cache, mask)
    if found is None:
        found = placed(mask, lengths[:, None])
        MASKS.keep(cache, mask, found)
    return found


@lru_cache(maxsize=64)
def _masked_by_numbers(mask: Mask, lengths: bytes, dtype: np.dtype[Any]) -> Mask:
    """A mask without arrays, with the lengths as they are now: the same object in the next layer, and the next call."""
    found = All((Cached(np.frombuffer(lengths, dtype)[:, None]), *mask._parts))
    found._set(_is_immutable=True)
    return found
