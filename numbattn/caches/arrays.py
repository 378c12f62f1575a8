"""The arrays of a cache: what they have to be, and where in them tokens lie."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple, cast

import numpy as np

from ..base.backends import backend
from ..base.checks import (
    DTYPES,
    DtypeError,
    cast_of,
    check_apart,
    check_values,
    check_writable,
    integer,
    integer_array,
    library,
    lies_within_rows,
    overlap,
    same_library,
)
from ..base.forks import cached_property
from ..base.values import Value, clip, filled, moved
from ..masks import Ring
from .checks import NUMBERS, SIXTEEN_BITS, check, check_lengths
from .eight_bits import EIGHT_BITS, FLOAT8, INT8, check_scale

# NumPy's functions pass CuPy's arrays on to CuPy
INT32, FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


class CacheLayout(NamedTuple):
    """What the plan of a call with a cache depends on, besides shapes and strides."""

    dtype: np.dtype[Any]  # of k and v: that of q, a narrower one, or 8 bits, which have scales
    page_size: int | None


@dataclass(frozen=True, eq=False, repr=False)
class CacheArrays(Value):
    """The arrays of a `KVCache`, where they are described."""

    k: Any
    v: Any
    lengths: Any
    table: Any = None
    k_scale: Any = None
    v_scale: Any = None
    window: int | None = None
    first: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.lengths, list | tuple) and library(self.k):
            self._set(lengths=moved(integer_array("KVCache lengths", self.lengths, "(batch,)"), self.k))
        given = {"k": self.k, "v": self.v, "lengths": self.lengths, "table": self.table, "k_scale": self.k_scale,
                 "v_scale": self.v_scale}
        given = {name: x for name, x in given.items() if x is not None or name in ("k", "v", "lengths")}
        same_library(**{f"KVCache {name}": x for name, x in given.items()})
        if self.table is None:
            check("KVCache k", self.k, NUMBERS, ("batch", "heads", "capacity", "head_dim"))
        else:
            check("KVCache k", self.k, NUMBERS, ("pages", "heads", "page_size", "head_dim"))
            check("KVCache table", self.table, [INT32], ("batch", "pages of a sequence"))
            if not self.k.shape[2]:
                raise ValueError("KVCache k: got pages of 0 tokens, allowed 1 or more")
        check("KVCache v", self.v, [self.k.dtype], (*self.k.shape[:3], "head_dim_v"))
        for name, x in (("k", self.k), ("v", self.v)):
            check_apart(f"KVCache {name}", x)
        batch = len(self.k if self.table is None else self.table)
        if self.lengths.dtype.kind in "iu" and self.lengths.dtype != INT32:
            self._set(lengths=clip(self.lengths, -1, 2**31 - 1).astype(np.int32))
        check("KVCache lengths", self.lengths, [INT32], (batch,))
        self._set(k_scale=self._scale_of("k_scale"), v_scale=self._scale_of("v_scale"))
        self._check_scales()
        self._check_ring()

    def _scale_of(self, name: str) -> Any:
        scale = getattr(self, name)
        if self.k.dtype not in EIGHT_BITS:
            if scale is not None:
                raise ValueError(f"KVCache {name}: got one with {self.k.dtype}, which has none")
            return None
        if self.k.dtype == FLOAT8 and scale is None:
            return filled(1, self.k.shape[1:2], np.float32, self.k)
        same_library(**{f"KVCache {name}": scale})
        shape = self.k.shape[:3] if self.k.dtype == INT8 else self.k.shape[1:2]
        return check(f"KVCache {name}", scale, [FLOAT32], shape)

    def _check_ring(self) -> None:
        if self.window is None:
            for name in ("first", "chunk"):
                if getattr(self, name) is not None:
                    raise ValueError(f"KVCache {name}: got {getattr(self, name)} without a window")
            return
        self._set(window=integer("KVCache window", self.window, low=1),
                  first=integer("KVCache first", self.first or 0, low=0),
                  chunk=integer("KVCache chunk", 1 if self.chunk is None else self.chunk, low=1))  # fmt: skip
        wanted, rows = self.capacity, self._rows
        if rows < wanted or (self.table is None and rows > wanted):
            raise ValueError(f"KVCache k: got room for {rows} tokens of a sequence, expected {wanted}: first + window "
                             "+ chunk - 1")
        self._reach()                                           # _reached is made now: not in the capture of a call

    @cached_property
    def _ring(self) -> Ring | None:
        """Which rows have which tokens, if it is a rolling cache."""
        if self.window is None:
            return None
        first, chunk = cast(int, self.first), cast(int, self.chunk)
        return Ring(first, self.window + chunk - 1, self.window)

    @property
    def _rows(self) -> int:
        """Rows of a sequence."""
        return self.k.shape[2] * (1 if self.table is None else self.table.shape[1])

    def _arrays(self) -> dict[str, Any]:
        return {name: x for name, x in super()._arrays().items() if name != "_reached"}

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | ({} if self._ring is None else {"_reached": self._reached})

    @property
    def capacity(self) -> int:
        """The most tokens of a sequence that it stores."""
        return self._rows if self._ring is None else self._ring.capacity

    @cached_property
    def _longest(self) -> int:
        """The most tokens that a sequence may have."""
        return self.capacity if self._ring is None else 2**31 - 1

    # ------------------------------------------------------------------------------------------------- what calls ask
    @cached_property
    def _is_numpy(self) -> bool:
        return isinstance(self.k, np.ndarray)

    @cached_property
    def _layout(self) -> CacheLayout:
        return CacheLayout(self.k.dtype, None if self.table is None else self.k.shape[2])

    def _check_dtype(self, dtype: Any) -> None:
        """Refuse a q of this dtype, beside which k and v are not widened."""
        own = self.k.dtype
        if dtype == own:
            return
        wider = DTYPES if own in EIGHT_BITS else (own, FLOAT32) if own in SIXTEEN_BITS else (own,)
        if dtype in DTYPES and dtype not in wider:
            raise DtypeError(f"q: got {dtype}, allowed {' or '.join(map(str, wider))} with a KVCache of {own}"
                             f"{cast_of('q', dtype, wider[-1:])}")

    @cached_property
    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of k and v as if there were no pages: (batch, heads, capacity, features)."""
        lead = len(self.lengths), self.k.shape[1], self.capacity
        return (*lead, self.k.shape[-1]), (*lead, self.v.shape[-1])

    def _check_contents(self) -> None:
        """Refuse lengths beyond the capacity, pages that do not exist and invalid scales; arrays on a GPU are not
        checked."""
        if self._is_numpy:
            self._check_lengths()
            self._check_scales()
            if self.table is not None:
                first = np.arange(self.table.shape[1]) * self.k.shape[2]
                self._check_pages(self.table[first < np.minimum(self.lengths, self.capacity)[:, None]])

    def _check_lengths(self) -> None:
        if self._is_numpy:
            check_lengths(self.lengths.tobytes(), self.lengths.dtype, self._longest)

    def _checked_lengths(self) -> Any:
        self._check_lengths()
        return self.lengths.astype(np.int64)

    @cached_property
    def _reached(self) -> Any:
        """The most tokens that sequences of a rolling cache have had, if others than the last ones were dropped, or an
        `append` was interrupted: those tokens have overwritten earlier ones."""
        return self.lengths.copy()

    def _reach(self) -> Any:
        return np.maximum(self._reached, self.lengths).astype(np.int64)

    def _least_lengths(self, lengths: Any) -> Any:
        """The least lengths to which sequences of a rolling cache may be cut, where `lengths` are wanted: from there on
        a query of the next token finds all keys."""
        ring, reached = cast(Ring, self._ring), self._reach()
        least = np.minimum(reached - self.chunk, self.lengths)  # an interrupted `append` may have written more
        return np.where((reached <= ring.capacity) | (lengths <= ring.first), 0, least)

    def _check_queries(self, most: int, counts: Any = None) -> None:
        """Refuse more queries of a sequence than a rolling cache has keys for. counts: of each; by default `most`."""
        if self._ring is None:
            return
        if most > cast(int, self.chunk):
            raise ValueError(f"q: got {most} queries of a sequence, at most {self.chunk}, the chunk of the KVCache")
        if self._is_numpy and (self._reached > self.lengths).any():
            least = self._least_lengths(self.lengths)
            left, counts = self.lengths - least, np.broadcast_to(most if counts is None else counts, least.shape)
            for b in np.flatnonzero((counts > left) & (least > 0))[:1]:
                raise ValueError(f"q: got {counts[b]} queries of sequence {b}, at most {left[b]} until more tokens are "
                                 "appended: those that were dropped have overwritten earlier keys")

    def _check_scales(self) -> None:
        if self.k.dtype == FLOAT8 and self._is_numpy:
            check_scale("KVCache k_scale", self.k_scale)
            check_scale("KVCache v_scale", self.v_scale)

    @cached_property
    def _written(self) -> dict[str, Any]:
        """The arrays that `append` and `keep` write to. Refuses those where one write would change another one."""
        names = ("k", "v", "lengths", *(("k_scale", "v_scale") if self.k.dtype == INT8 else ()))
        found = {name: getattr(self, name) for name in names}
        for name, x in found.items():
            check_apart(f"KVCache {name}", x)
        shared = self.k.dtype != INT8 and lies_within_rows(self.v, self.k)  # latent attention; int8 has two scales
        for (one, x), (other, y) in combinations(found.items(), 2):
            if overlap(x, y) and not (shared and (one, other) == ("k", "v")):
                raise ValueError(f"KVCache {other}: overlaps {one}")
        return found

    def _check_writable(self) -> None:
        """Refuse NumPy arrays that are read-only, and, of any library, what `_written` does."""
        for name, x in self._written.items():
            check_writable(f"KVCache {name}", x)

    def _check_device(self, **new: Any) -> None:
        """Refuse arrays of CuPy's that are not on its current device, its own and new ones."""
        if not self._is_numpy:
            backend("cupy").check_device(new | {f"KVCache {name}": x for name, x in self._arrays().items()})

    def _check_pages(self, pages: Any) -> None:
        if self._is_numpy:
            check_values("KVCache table", pages, len(self.k) - 1)

    # --------------------------------------------------------------------------------------------- where tokens lie
    def _places(self, sequence: Any, position: Any) -> tuple[Any, Any]:
        """Where tokens lie: the indices of k along the axes 0 and 2."""
        position = position if self._ring is None else self._ring.rows(position)
        if self.table is None:
            return sequence, position
        size = self.k.shape[2]
        pages = self.table[sequence, position // size]
        self._check_pages(pages)
        return pages, position % size

    def _dense(self) -> tuple[Any, Any]:
        """k and v as float64 (batch, heads, capacity, features): for the reference."""
        return self._dense_of(self.k, self.k_scale), self._dense_of(self.v, self.v_scale)

    def _dense_of(self, x: Any, scale: Any) -> Any:
        x = x.astype(np.float64)
        if scale is not None:
            x = x * self._scale_of_tokens(scale)[..., None].astype(np.float64)
        if self.table is None:
            return x
        pages = x[np.clip(self.table, 0, max(len(x) - 1, 0))]  # (batch, table.shape[1], heads, page_size, features)
        rows = pages.swapaxes(1, 2).reshape(len(pages), x.shape[1], self._rows, x.shape[-1])
        return rows[:, :, : self.capacity]

    def _scale_of_tokens(self, scale: Any) -> Any:
        """One for each token and head, (batch or pages, heads, rows)."""
        return scale if scale.ndim == 3 else np.broadcast_to(scale[:, None], self.k.shape[:3])
