"""What parts that depend on the distance between a key and a query's own key share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np

from ..base.checks import Integers, integers
from ..base.origin import Crop
from ..base.values import Held, Memo, clip, for_queries, given
from .parts import ArrayPart, Part

FARTHEST = 2**30  # a farther offset means the same
ALIGNED = Memo("aligned")  # parts aligned within Segments, by these


class DistancePart(ArrayPart):
    """A part that depends on how far a key is ahead of a query's own key, i + offset."""

    offset: Integers | None
    _frame: Any = None  # of the mask: what it is aligned within
    _crops_by_sequence = True

    def __post_init__(self) -> None:
        super().__post_init__()
        name = f"{type(self).__name__} offset"
        self._set(offset=None if self.offset is None else integers(name, self.offset))

    def __getstate__(self) -> dict[str, Any]:  # a copy of what a call has aligned, in Saved, stays aligned
        return super().__getstate__() | ({} if self._frame is None else {"_frame": self._frame})

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        return given(offset=self.offset)

    def _within(self, frame: Any) -> Part:
        if frame is None or self.offset is not None:
            return self
        part = ALIGNED.get(self, frame)
        if part is None:
            part = replace(cast(Any, self))
            part._set(_frame=frame)
            ALIGNED.keep(self, frame, part)
        return cast(Part, part)

    def _cropped(self, crop: Crop, frame: Any) -> Part:
        offset = self.offset
        if frame is not None and offset is None:
            offset = frame._own_key(crop.seqlen_q, crop.seqlen_k)
            if offset is None:
                raise ValueError(f"score: got {self} without an offset within Segments of unequal queries and keys, "
                                 "which is not distributed: give it an offset")
        return replace(cast(Any, self), offset=crop.offset(offset))

    def _whole_offset(self, seqlen_q: int, seqlen_k: int) -> Any:
        """An int, or an integer array over the batch axes; None where it depends on the frame."""
        if self._frame is not None:
            return self._frame._own_key(seqlen_q, seqlen_k)
        return seqlen_k - seqlen_q if self.offset is None else clip(self.offset, -FARTHEST, FARTHEST)

    @staticmethod
    def _reading(clip: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """The function (ahead, reach) -> which entry of its array a pair reads, and the derivative by it.

        ahead: how far the key is ahead of the query's own, a number or what clip(x, low, high) takes, of NumPy or of a
        kernel; reach: half of the number of entries, rounded down.
        """
        raise NotImplementedError

    def _ahead(self, S: Any) -> Any:
        """How far each key is ahead of each query's own."""
        m, n = S.shape[-2:]
        i, j, offset = np.arange(m, like=S), np.arange(n, like=S), self._whole_offset(m, n)
        own = self._frame._rows(i, n).own if offset is None else i + for_queries(offset)
        return j - own[..., None]
