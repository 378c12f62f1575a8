"""A mask for the last keys only, those of the newest tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from ..base.checks import Array, Integers, check_values, integer_array, words_for
from ..base.origin import Crop
from ..base.values import Held, clip, for_queries, is_foreign
from .bands import Cached
from .base import Grid, Mask
from .dense import Bits, Dense
from .logic import as_mask
from .segments import Frame

WORD = 32  # bits


@dataclass(frozen=True, eq=False, repr=False)
class Tail(Mask):
    """The inner mask decides on the last seqlen_q keys; all earlier keys are visible to every query.

    For queries whose own keys are the last ones, as in speculative decoding: each token of a tree sees all tokens
    before the tree, and its ancestors in it. With a `KVCache` these are the last keys of each sequence.

    Parameters
    ----------
    mask : Bits, Dense or array of bool, (..., seqlen_q, seqlen_q)
        Broadcast as they are. If there are fewer keys than queries, it holds for the last keys. With packed queries of
        a `KVCache`: the Bits.tree of all their tokens, or Bits whose rows are these and whose columns are the tokens
        of a row's own sequence; these know no depths.
    positions : integer array, (..., seqlen_q), optional
        From 0 to seqlen_q - 1; CuPy arrays are clamped to that. Query i and its own key have the position of the first
        of the last keys plus positions[..., i]. Default: for `Bits.tree` the depths of the nodes, else the rows.

    Notes
    -----
    Where there are positions, masks beside it and scores take them for rows: `Causal`, `Window`, `Prefix`, `First`,
    `Alibi`, `RelativeBias`, which have no offset then, and functions, whose i is a query's positions[..., i] and whose
    j is a key's position. So each node of a tree has the result of a call on its path alone. Arrays with rows and
    columns stay as they are, and so do the rows of `Intervals`, whose keys are positions. `Lengths`, and `Segments`
    without a cache, are refused beside what takes positions. If there are fewer keys than queries, positions begin
    below 0, and a mask beside it may hide a node's own key.

    Examples
    --------
    >>> import numbattn as na
    >>> na.Tail(na.Bits.tree([-1, 0, 0])).dense(3, 5).astype(int)
    array([[1, 1, 1, 0, 0],
           [1, 1, 1, 1, 0],
           [1, 1, 1, 0, 1]])
    >>> (na.Tail(na.Bits.tree([-1, 0, 0])) & na.Window(1, 0)).dense(3, 5).astype(int)
    array([[0, 1, 1, 0, 0],
           [0, 0, 1, 1, 0],
           [0, 0, 1, 0, 1]])
    """

    mask: Mask | Array
    positions: Integers | None = None
    _is_tree: bool = field(init=False, default=False)  # whether each sees only those of lower positions, and itself

    _is_interval = False
    _is_tail = _crops_by_sequence = True
    _axis_of_queries = -2

    def __post_init__(self) -> None:
        mask = as_mask(self.mask, "Tail mask")
        if not isinstance(mask, Bits | Dense):
            raise TypeError(f"Tail mask: got {words_for(self.mask)}, expected Bits, Dense or a boolean array")
        given = self.positions
        self._set(mask=mask, positions=mask._depths if given is None else _checked(given), _is_tree=given is None)

    @property
    def _inner(self) -> Any:
        return self.mask

    def _arrays(self) -> dict[str, Any]:
        return self._inner._arrays() | ({} if self.positions is None else {"positions": self.positions})

    def _mapped(self, function: Callable[[Any], Any]) -> Tail:
        positions = self.positions if self.positions is None else function(self.positions)
        return self._with(self._inner._mapped(function), positions)

    def _fit(self, shape: tuple[int, ...]) -> Tail:
        return self._with(self._inner._fit((*shape[:-1], shape[-2])), self.positions)

    def _with(self, mask: Mask, positions: Any) -> Tail:
        if mask is self.mask and positions is self.positions:
            return self
        made = object.__new__(Tail)  # without checks
        made._set(mask=mask, positions=positions, _is_tree=self._is_tree)
        return made

    def _grids(self) -> tuple[Grid, ...]:
        return self._inner._grids()

    def _packed(self, seqlen_q: int) -> Tail:
        """With Bits inside."""
        if isinstance(self.mask, Bits):
            return self
        return self._with(Bits.pack(self._inner.dense(seqlen_q, seqlen_q)), self.positions)

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        own = () if self.positions is None else (Held("positions", self.positions, (seqlen_q,)),)
        return *self._inner._held(seqlen_q, seqlen_q), *own

    def _cropped(self, crop: Crop) -> Bits:
        (array,) = self._inner._arrays().values()
        whole = self._fit((*array.shape[:-2], crop.seqlen_q, crop.keys))
        words = whole._words(crop.seqlen_q, crop.keys, crop.seqlen_k - crop.seqlen_q - crop.first_key, array)
        return Bits(crop.of_queries("mask: Tail", words))

    def _bits(self, seqlen_q: int, seqlen_k: int, frame: Frame | None, array: Any) -> Bits:
        first: Any = frame._own_key(seqlen_q, seqlen_k) if isinstance(frame, Cached) else seqlen_k - seqlen_q
        if getattr(frame, "ring", None) is not None:
            row = cast(Any, frame)._tokens(np.arange(seqlen_k, like=array), seqlen_k) - for_queries(first)
            row = row[..., None, :]
            return Bits.pack(taken(self._inner.dense(seqlen_q, seqlen_q), row) | (row < 0))
        return Bits(self._words(seqlen_q, seqlen_k, first, array))

    def _words(self, seqlen_q: int, seqlen_k: int, first: Any, array: Any) -> Any:
        """Words of Bits, where the tail begins at the key `first`. In words before the tail all bits are set, its own
        words are packed, and words after it are beyond all keys."""
        first = np.asarray(first, np.int64, like=array)[..., None, None]
        key = np.arange(-(-(seqlen_q + WORD - 1) // WORD) * WORD, like=array) - first % WORD  # of the tail
        words = Bits.pack(taken(self._inner.dense(seqlen_q, seqlen_q), key) | (key < 0)).words
        word = np.arange(-(-seqlen_k // WORD), like=array) - first // WORD
        return np.where(word < 0, np.uint32(2**WORD - 1), taken(words, word))


def _checked(given: Any) -> Any:
    """Positions as int32, from 0 to seqlen_q - 1."""
    given = integer_array("Tail positions", given, "(..., seqlen_q)")
    if is_foreign(given):
        return given
    if isinstance(given, np.ndarray):
        check_values("Tail positions", given, given.shape[-1] - 1)
        return given.astype(np.int32, copy=False)
    return clip(given, 0, given.shape[-1] - 1).astype(np.int32)


def taken(x: Any, at: Any) -> Any:
    """x[..., at], where both are broadcast along all other axes, and `at` is clipped."""
    at = np.clip(at, 0, max(x.shape[-1] - 1, 0))
    lead = np.broadcast_shapes(x.shape[:-1], at.shape[:-1])
    x, at = (np.broadcast_to(y, (*lead, y.shape[-1])) for y in (x, at))
    return np.take_along_axis(x, at, -1)
