"""RelativeBias: S = S + table[entry of how far a key is ahead of a query's own]."""

from __future__ import annotations

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
    On a GPU the gradient of the table is slow within `Segments` whose queries and keys differ: each score looks up its
    entry.

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

    @property
    def _reach(self) -> int:
        return self._array.shape[-1] // 2

    def _whole_shape(self, batch: tuple[int, ...], seqlen_q: int, seqlen_k: int) -> tuple[int, ...]:
        return *batch, self._array.shape[-1]

    def _entries(self, S: Any) -> Any:
        """The number of each element's entry."""
        return np.clip(self._ahead(S), -self._reach, self._reach) + self._reach

    def _applied(self, S: Any) -> Any:
        tables = np.broadcast_to(self._array.astype(S.dtype)[..., None, :], (*S.shape[:-1], self._array.shape[-1]))
        return S + np.take_along_axis(tables, np.broadcast_to(self._entries(S), S.shape), -1)

    def _gradient(self, dS: Any, lse: Any, delta: Any, S: Any = None) -> Any:
        entries, offset = self._array.shape[-1], self._whole_offset(*dS.shape[-2:])
        if offset is not None:
            table = by_entry(sums_along_diagonals(dS), dS.shape[-2] - 1 + offset, entries)
            return sum_broadcast(table, self._array.shape)
        at = self._entries(dS)
        sums = [np.where(at == entry, dS, 0).sum(axis=(-2, -1)) for entry in range(entries)]
        return sum_broadcast(np.stack(sums, axis=-1), self._array.shape)


def sums_along_diagonals(S: Any) -> Any:
    """(..., m + n - 1), from the lower left on, of matrices (..., m, n)."""
    *lead, m, n = S.shape
    count = max(m + n - 1, 0)
    skewed = np.zeros_like(S, shape=(*lead, m, m + n))
    skewed[..., :n] = S[..., ::-1, :]
    rows = skewed.reshape(*lead, m * (m + n))[..., : m * count]  # each row starts one later than the one before
    return rows.reshape(*lead, m, count).sum(axis=-2)


def by_entry(sums: Any, own: Any, entries: int) -> Any:
    """Sums along diagonals (..., m + n - 1), added up by the entries of a table.

    own: the number of the diagonal of own keys, an int or an array over the axes before the last.
    """
    (*lead, count), reach = sums.shape, entries // 2
    if reach == 0 or count == 0:
        return np.broadcast_to(sums.sum(axis=-1, keepdims=True), (*lead, entries))
    own = own if isinstance(own, int) else own[..., None]
    ahead, at = np.arange(count, like=sums) - own, np.arange(1 - reach, reach, like=sums) + own
    inside = np.take_along_axis(sums, np.broadcast_to(np.clip(at, 0, count - 1), (*lead, entries - 2)), -1)
    table = np.zeros_like(sums, shape=(*lead, entries))
    table[..., 0] = np.where(ahead <= -reach, sums, 0).sum(axis=-1)
    table[..., 1:-1] = np.where((at >= 0) & (at < count), inside, 0)
    table[..., -1] = np.where(ahead >= reach, sums, 0).sum(axis=-1)
    return table
