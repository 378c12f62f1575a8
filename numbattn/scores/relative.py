"""RelativeBias: S = S + table[entry of how far a key is ahead of a query's own]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..base.checks import Floats, Integers
from ..base.values import sum_broadcast
from .distance import DistancePart


@dataclass(frozen=True, eq=False, repr=False)
class RelativeBias(DistancePart):
    """S = S + table[..., clip(j - (i + offset), -reach, reach) + reach], with reach = (entries - 1) / 2.

    Parameters
    ----------
    table : array or list, (..., 2 reach + 1)
        Any floating dtype; its leading axes are broadcast to the batch axes, (..., heads).
    gradient : bool, optional
        Whether its gradient is wanted.
    offset : int or integer array over the batch axes, optional
        The own key of query 0. Default: seqlen_k - seqlen_q, which aligns the last query with the last key, as in
        `Causal`; within `Segments`, those of each segment. So a step of decoding, one query and all keys, uses the same
        table as training.

    Notes
    -----
    On a GPU a table takes more time within `Segments` whose queries and keys differ: each score looks up its entry, and
    adds to the entry's gradient, by itself.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> table = np.log([0.5, 1.0, 2.0])
    >>> q, k = np.zeros((2, 3, 8))
    >>> na.attention_weights(q, k, score=na.RelativeBias(table)).round(2)
    array([[0.2 , 0.4 , 0.4 ],
           [0.14, 0.29, 0.57],
           [0.25, 0.25, 0.5 ]])
    >>> na.attention_weights(q[-1:], k, score=na.RelativeBias(table)).round(2)
    array([[0.25, 0.25, 0.5 ]])
    >>> na.attention_weights(q[-1:], k, score=na.RelativeBias(table, offset=0)).round(2)
    array([[0.2, 0.4, 0.4]])
    """

    table: Floats
    gradient: bool = True
    offset: Integers | None = field(default=None, kw_only=True)

    _own_axes = 1
    _examples = (
        ("relative", lambda shape, dtype, gradient: RelativeBias(np.zeros((shape[0], 257), dtype), gradient)),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._array.ndim < 1 or self._array.shape[-1] % 2 == 0:
            raise ValueError(f"RelativeBias table: got the shape {self._array.shape}, expected (..., 2 reach + 1), "
                             "an odd number of entries")

    @staticmethod
    def _reading(clip: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda ahead, reach: (clip(ahead, -reach, reach) + reach, 1)

    def _whole_shape(self, batch: tuple[int, ...], seqlen_q: int, seqlen_k: int) -> tuple[int, ...]:
        return *batch, self._array.shape[-1]

    def _entries(self, S: Any) -> Any:
        """The number of each element's entry."""
        entries, _ = self._reading(np.clip)(self._ahead(S), self._array.shape[-1] // 2)
        return np.broadcast_to(entries, S.shape)

    def _applied(self, S: Any) -> Any:
        tables = np.broadcast_to(self._array.astype(S.dtype)[..., None, :], (*S.shape[:-1], self._array.shape[-1]))
        return S + np.take_along_axis(tables, self._entries(S), -1)

    def _gradient(self, dS: Any, lse: Any, delta: Any, S: Any = None) -> Any:
        *lead, m, n = dS.shape
        sums, matrix = np.zeros((*lead, self._array.shape[-1])), np.indices(dS.shape, sparse=True)[:-2]
        np.add.at(sums, (*matrix, self._entries(dS)), dS)
        return sum_broadcast(sums, self._array.shape)
