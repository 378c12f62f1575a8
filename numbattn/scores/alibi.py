"""Alibi: S = S - slope |i + offset - j|."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..base.checks import Floats, Integers
from ..base.values import sum_broadcast
from .distance import DistancePart


@dataclass(frozen=True, eq=False, repr=False)
class Alibi(DistancePart):
    """``S = S - slope |i + offset - j|``: the farther a key is from a query's own, the less it counts.

    Parameters
    ----------
    slopes : array or list, broadcast to the batch axes, (..., heads), or float
        Any floating dtype. Finite: inf * 0, where a key is a query's own, is NaN.
    gradient : bool, optional
        Whether the gradient of the slopes is wanted.
    offset : int or integer array over the batch axes, optional
        The own key of query 0. Default: seqlen_k - seqlen_q, which aligns the last query with the last key, as in
        `Causal`; within `Segments`, those of each segment.

    Notes
    -----
    Press, Smith and Lewis, "Train Short, Test Long: Attention with Linear Biases" (ICLR 2022).

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, k = np.zeros((2, 3, 8))
    >>> na.attention_weights(q, k, causal=True, score=na.Alibi(np.log(2.0))).round(2)
    array([[1.  , 0.  , 0.  ],
           [0.33, 0.67, 0.  ],
           [0.14, 0.29, 0.57]])
    """

    slopes: Floats
    gradient: bool = True
    offset: Integers | None = field(default=None, kw_only=True)

    _examples = (("alibi", lambda shape, dtype, gradient: Alibi(np.ones(shape[:1], dtype), gradient)),)

    @staticmethod
    def _reading(clip: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda ahead, reach: (0, -abs(ahead))

    def _weight(self, S: Any) -> Any:
        _, slope = self._reading(np.clip)(self._ahead(S), 0)
        return slope.astype(S.dtype)

    def _applied(self, S: Any) -> Any:
        return S + self._array.astype(S.dtype)[..., None, None] * self._weight(S)

    def _gradient(self, dS: Any, lse: Any, delta: Any, S: Any = None) -> Any:
        return sum_broadcast((dS * self._weight(dS)).sum(axis=(-2, -1)), self._array.shape)
