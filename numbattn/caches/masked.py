"""The mask of a call with a cache."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ..base.values import Memo, Value
from ..masks import Cached, Mask, Ring, placed

MASKS = Memo("masks")  # by cache and mask


def masked(cache: Value, lengths: Any, mask: Mask, ring: Ring | None, seqlen_q: int) -> Mask:
    """The mask of a call with a cache of these lengths: aligned with them, and nothing visible after them."""
    about = (None, None) if ring is None else (seqlen_q, ring)
    if isinstance(mask._frame, Cached):
        return mask
    if isinstance(lengths, np.ndarray) and not mask._holds_arrays:
        return _masked_by_numbers(mask, lengths.tobytes(), lengths.dtype, *about)
    found = MASKS.get(cache, (mask, *about))
    if found is None:
        found = placed(mask, lengths[:, None], *about)
        MASKS.keep(cache, (mask, *about), found)
    return found


@lru_cache(maxsize=64)
def _masked_by_numbers(mask: Mask, lengths: bytes, dtype: np.dtype[Any], *about: Any) -> Mask:
    """A mask without arrays, with the lengths as they are now: the same object in the next layer, and the next call."""
    found = placed(mask, np.frombuffer(lengths, dtype)[:, None], *about)
    found._set(_is_immutable=not found._is_materialised)
    return found
