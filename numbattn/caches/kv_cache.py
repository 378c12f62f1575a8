"""Key-value caches: the tokens of sequences, appended as they come, which `attention` reads in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..base.backends import backend
from ..base.checks import (
    DTYPES,
    Array,
    Integers,
    check_apart,
    check_writable,
    integer,
    integer_array,
    integers,
    overlap,
    own,
    same_library,
)
from ..base.values import moved
from ..rotations import Rotary
from ..rotations.calls import check_rotary, turned_tokens
from .arrays import CacheArrays
from .checks import check, checked_dtype
from .eight_bits import FLOAT8, INT8, bits_of
from .tokens import by_token, check_path, checked_offsets, new_tokens, stored


class KVCache(CacheArrays):
    """Keys and values of sequences: a value made of arrays, which `attention` takes instead of k and v.

    `append`, `keep` and `truncate` write into these arrays, lengths included, and keep nothing else: a cache made of
    the same arrays again is the same cache, and equal; one of copies is not. Only one thread may change it at a time,
    and not while another one reads it.

    Parameters
    ----------
    k : array, (batch, heads, capacity, head_dim), or in pages (pages, heads, page_size, head_dim)
    v : array, (batch, heads, capacity, head_dim_v), or in pages (pages, heads, page_size, head_dim_v)
        Of the dtype of q; of float16 or bfloat16 beside a q of float32; or of int8 or float8_e4m3fn (of ml_dtypes; in
        CuPy ``bits.view(ml_dtypes.float8_e4m3fn)`` of an array of uint8). Any strides, but no two elements share
        memory; v may be a part of k, ``k[..., :n]``, to which `append` and `keep` write no int8. On a GPU a NaN of
        float8_e4m3fn may be read as 480.
    lengths : array of int32, (batch,)
        How many tokens each sequence has. Whatever is stored beyond them is never used, even NaN. A list, and an array
        of other integers, become a new array, ``cache.lengths``.
    table : array of int32, (batch, pages of a sequence), optional
        Token t of sequence b is row ``t % page_size`` of page ``table[b, t // page_size]``. Sequences may share pages.
        Page numbers beyond a sequence's length are never used, whatever they are.
    k_scale, v_scale : array of float32, optional
        What the numbers of 8 bits are multiplied by: for int8 one scale for each token and head, of the shape of k
        without head_dim; for float8_e4m3fn one for each head, (heads,), by default 1, from 1.2e-38 to 7.6e+35.
    window, first, chunk : int, optional
        Of a rolling cache, see `KVCache.rolling`; by default it is none. Its capacity is first + window + chunk - 1:
        token t has row t, from `first` on row ``first + (t - first) % (window + chunk - 1)``, in which each token
        overwrites an earlier one. `first` is 0 by default, `chunk` is 1.

    See Also
    --------
    KVCache.zeros, KVCache.rolling : an empty cache.

    Notes
    -----
    The results of a sequence are equal bit for bit, whatever the batch, the capacity and the pages.

    On a GPU from compute capability 8.0 on, calls of up to 16 queries read pages in place, and a dtype of fewer bits
    than q, too, unless q is float64. Other calls first copy such a cache in the dtype of q.

    In a rolling cache `lengths` count all tokens that a sequence has ever had, and positions are true ones: what takes
    positions, such as `Alibi`, `First`, `Window`, functions and rotary embeddings, has the same results as with a cache
    of all tokens. What has a column for each key is refused, but for a `Tail`; the columns of `attention_weights` are
    rows of the cache. A mask beside the window costs a call some time, as it is drawn as Bits.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 5, 8))
    >>> cache = na.KVCache(k, v, lengths=np.array([3], np.int32))
    >>> o = na.attention(q[:, :, :1], cache)
    >>> np.allclose(o, na.attention(q[:, :, :1], k[:, :, :3], v[:, :, :3]))
    True
    """

    @classmethod
    def zeros(
        cls, batch: int, heads: int, capacity: int, head_dim: int, *, like: Any, head_dim_v: int | None = None,
        dtype: Any = None, page_size: int | None = None, table: Array | None = None,
    ) -> KVCache:  # fmt: skip
        """An empty cache.

        Parameters
        ----------
        batch, heads, capacity, head_dim : int
            Number of sequences; key heads, of which q's heads are a multiple; most tokens of a sequence; features of k.
        like : array
            The cache is of its library, and by default of its dtype.
        head_dim_v : int, optional
            Default: head_dim.
        dtype : dtype, optional
            float16 or bfloat16, for a q of the same or of float32; float32 or float64, which q has then; or int8 or
            float8_e4m3fn, with any q.
        page_size : int, optional
            Tokens of a page. By default there are no pages.
        table : array of int32, (batch, pages of a sequence), optional
            See `KVCache`. By default each sequence has pages of its own, in order. With a table of your own the pages,
            as many as batch x capacity tokens take, are yours to hand out, to share and to use again: `append` writes
            where the table says.

        Returns
        -------
        KVCache

        Raises
        ------
        TypeError, ValueError
            For what is of a wrong type, shape or size.

        Examples
        --------
        >>> import numbattn as na, numpy as np
        >>> cache = na.KVCache.zeros(2, 8, 100, 64, like=np.zeros(0, np.float32), page_size=16, dtype=np.int8)
        >>> cache.k.shape, cache.capacity
        ((14, 8, 16, 64), 112)
        """
        same_library(**{"KVCache.zeros like": like})
        sizes = {"batch": batch, "heads": heads, "capacity": capacity, "head_dim": head_dim,
                 "head_dim_v": head_dim if head_dim_v is None else head_dim_v}  # fmt: skip
        sizes = {name: integer(f"KVCache.zeros {name}", size, low=0) for name, size in sizes.items()}
        batch, heads, rows, *features = sizes.values()
        dtype, lead = checked_dtype("KVCache.zeros dtype", like.dtype if dtype is None else dtype), batch
        if page_size is not None:
            page_size = integer("KVCache.zeros page_size", page_size, low=1)
            most = -(-rows // page_size)
            lead, rows = batch * most, page_size
            if table is None:
                table = np.arange(lead, dtype=np.int32, like=like).reshape(batch, most)
            same_library(**{"KVCache.zeros like": like, "table": table})
            check("KVCache.zeros table", table, [np.dtype(np.int32)], (batch, "pages of a sequence"))
        elif table is not None:
            raise ValueError("KVCache.zeros table: got one without a page_size")
        bits = np.uint8 if dtype == FLOAT8 else dtype
        k, v = (np.zeros((lead, heads, rows, size), bits, like=like).view(dtype) for size in features)
        scales: Any = (np.zeros(k.shape[:3], np.float32, like=like) for _ in range(2)) if dtype == INT8 else ()
        return cls(k, v, np.zeros(batch, np.int32, like=like), table, *scales)

    @classmethod
    def rolling(
        cls, batch: int, heads: int, window: int, head_dim: int, *, first: int = 0, chunk: int = 1, like: Any,
        head_dim_v: int | None = None, dtype: Any = None, page_size: int | None = None, table: Array | None = None,
    ) -> KVCache:  # fmt: skip
        """An empty cache for attention within a window, in which new tokens take the place of old ones.

        It stores ``first + window + chunk - 1`` tokens of each sequence, of any length. Queries see the last `window`
        tokens, their own included, and the first ones: a call has the results of one with a cache of all tokens and
        with the mask ``Causal() & (Window(window - 1, 0) | First(first))``.

        Parameters
        ----------
        batch, heads, window, head_dim : int
            Number of sequences; key heads, of which q's heads are a multiple; tokens that a query sees; features of k.
        first : int, optional
            How many of the first tokens are kept, and seen, too.
        chunk : int, optional
            The most queries of a call. A longer prompt takes attention of its own arrays, with the mask above, and then
            one `append`, which keeps the tokens that later ones see.
        like, head_dim_v, dtype, page_size, table
            As in `zeros`.

        Returns
        -------
        KVCache

        Raises
        ------
        TypeError, ValueError
            For what is of a wrong type, shape or size.

        Examples
        --------
        >>> import numbattn as na, numpy as np
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 8, 100, 64))
        >>> cache = na.KVCache.rolling(2, 8, 16, 64, first=4, like=q)
        >>> cache.append(k, v)                                          # a prompt of 100 tokens, 20 of which are stored
        >>> o = na.attention(q[:, :, -1:], cache)
        >>> want = na.attention(q[:, :, -1:], k, v, mask=na.Window(15, 0) | na.First(4))
        >>> np.allclose(o, want)
        True
        """
        window = integer("KVCache.rolling window", window, low=1)
        first, chunk = integer("KVCache.rolling first", first, low=0), integer("KVCache.rolling chunk", chunk, low=1)
        empty = cls.zeros(batch, heads, first + window + chunk - 1, head_dim, like=like, head_dim_v=head_dim_v,
                          dtype=dtype, page_size=page_size, table=table)  # fmt: skip
        return replace(empty, window=window, first=first, chunk=chunk)

    def append(
        self, k: Array, v: Array, segments: Integers | None = None, *, rotary: Rotary | None = None
    ) -> None:  # fmt: skip
        """Write new tokens after each sequence, and let lengths grow by their number.

        Parameters
        ----------
        k, v : arrays, (batch, heads, tokens, head_dim) and (batch, heads, tokens, head_dim_v)
            Of any floating dtype, rounded to that of the cache as it is written. To 8 bits it is quantised: in int8 the
            largest number of a token and head becomes 127; numbers too large for float8_e4m3fn become its largest, as
            do numbers of float64 too large for int8's scales of float32.
        segments : integer array, (batch + 1,), optional
            For a ragged batch: k and v are then packed, (heads, total, head_dim), and the tokens from segments[b] to
            segments[b + 1] belong to sequence b. See `pack`.
        rotary : Rotary, optional
            Turn keys by their positions, as `rotary` does, before they are rounded and written: a token's position is
            the number of tokens before it in its sequence. The tokens of a tree have others: turn these by `rotary`.

        Returns
        -------
        None

        Raises
        ------
        TypeError, ValueError
            For what does not fit; on NumPy arrays also for tokens beyond the capacity, which a rolling cache takes.
            Then nothing has been written.

        Examples
        --------
        >>> import numbattn as na, numpy as np
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 8, 5, 64))
        >>> cache = na.KVCache.zeros(2, 8, 100, 64, like=q)
        >>> cache.append(k, v)                                          # a prompt of 5 tokens
        >>> o = na.attention(q, cache, causal=True)
        >>> cache.append(k[:, :, :1], v[:, :, :1])                      # one more token each
        >>> o = na.attention(q[:, :, :1], cache)
        >>> cache.lengths
        array([6, 6], dtype=int32)
        """
        self._check_lengths()
        heads = self.k.shape[1]
        lead = (len(self.lengths), heads) if segments is None else (heads,)
        if not type(self.k) is type(k) is type(v):
            same_library(KVCache=self.k, k=k, v=v)
        check("k", k, DTYPES, (*lead, "tokens", self.k.shape[-1]))
        check("v", v, DTYPES, (*lead, k.shape[-2], self.v.shape[-1]))
        if rotary is not None:
            check_rotary(rotary)
            rotary._width(k.shape[-1], name="k")
            if overlap(self.k, self.v):
                raise ValueError("rotary: got one with a v that is a part of k, which would be turned, too")
        self._check_device(k=k, v=v)
        self._check_writable()
        if not self._is_numpy:
            return self._append_on_gpu(k, v, segments, rotary)
        self._check_scales()
        if self.k.dtype == FLOAT8 and (self.k_scale != self.v_scale).any() and overlap(self.k, self.v):
            raise ValueError("KVCache v_scale: got another one than k_scale, with a v that is a part of k")
        sequence, positions, own, counts = new_tokens(self.lengths, self._longest, segments, k.shape[-2])
        new_k, new_v = by_token(k)[own], by_token(v)[own]
        if self._ring is not None:
            lasts = self._ring.lasts(positions, (self.lengths + counts)[sequence])
            sequence, positions, new_k, new_v = (x[lasts] for x in (sequence, positions, new_k, new_v))
        page, row = self._places(sequence, positions)
        if rotary is not None:
            new_k = turned_tokens(new_k, positions, rotary)
        writes = stored(new_k, self.k, self.k_scale) + stored(new_v, self.v, self.v_scale)
        self._overwrite(counts)
        for x, of_tokens in writes:
            x[page, :, row] = of_tokens
        self.lengths[...] = self.lengths + counts  # last: an interrupted call has appended nothing

    def _append_on_gpu(self, k: Any, v: Any, segments: Any, rotary: Rotary | None = None) -> None:
        append = backend("cupy").append
        offsets, counts = None, k.shape[-2]
        if segments is not None:
            offsets = moved(checked_offsets(segments, len(self.lengths)), k).astype(np.int32)
            counts = offsets[1:] - offsets[:-1]
        ring = () if self._ring is None else self._ring[:2]
        self._overwrite(counts)
        append(bits_of(self.k), k, self.lengths, self.table, offsets, self.k_scale, rotary, ring)
        append(bits_of(self.v), v, self.lengths, self.table, offsets, self.v_scale, None, ring)
        self.lengths[...] += counts

    def _overwrite(self, counts: Any) -> None:
        """So many more tokens of each sequence take rows of earlier ones, even if the call is interrupted."""
        if self._ring is not None:
            self._reached[...] = np.maximum(self._reach(), self.lengths + counts)

    def keep(self, path: Sequence[Sequence[int]] | Array, nodes: int) -> None:
        """Keep a path of each sequence's last tokens, a tree that has been verified, and drop the rest.

        Parameters
        ----------
        path : integer array, (batch, depth)
            Which of the last `nodes` tokens to keep, ascending; -1 ends a row. They move to the place where the tree
            began.
        nodes : int
            How many tokens the tree has, in a rolling cache at most `chunk`; see also `truncate`.

        Returns
        -------
        None

        Raises
        ------
        TypeError, ValueError
            For what does not fit; then nothing has changed. CuPy arrays are not checked.

        Examples
        --------
        >>> import numbattn as na, numpy as np
        >>> k = v = np.arange(6.0).reshape(1, 1, 6, 1)
        >>> cache = na.KVCache(k, v, np.array([6], np.int32))
        >>> cache.keep([[0, 2, -1]], nodes=4)                           # a tree of the tokens 2 to 5
        >>> cache.k[0, 0, : cache.lengths[0], 0]
        array([0., 1., 2., 4.])
        """
        batch, lengths = len(self.lengths), self._checked_lengths()
        nodes = integer("nodes", nodes, 0, self.capacity if self._ring is None else self.chunk)
        steps = moved(own("path", integer_array("path", path, "(batch, depth)")), lengths).astype(np.int64)
        if steps.ndim != 2 or len(steps) != batch or steps.shape[1] > nodes:
            raise ValueError(f"path: got the shape {steps.shape}, expected ({batch}, depth), a depth of 0 to {nodes}")
        self._check_writable()
        if self._is_numpy:
            check_path(steps, nodes)
            if batch and lengths.min() < nodes:
                raise ValueError(f"nodes: got {nodes} for a sequence of {lengths.min()} tokens")
        t, sequence = np.arange(steps.shape[1], like=steps), np.arange(batch, like=steps)[:, None]
        before = np.clip(lengths - nodes, 0, self._longest - nodes)[:, None]
        page, row = self._places(sequence, before + np.maximum(steps, 0))  # entries after -1 may be anything
        to_page, to_row = self._places(sequence, before + t)
        arrays = bits_of(self.k), bits_of(self.v), *((self.k_scale, self.v_scale) if self.k.dtype == INT8 else ())
        rows, held = [x[page, :, row] for x in arrays], [x[to_page, :, to_row] for x in arrays]
        left = self._cut("path", lengths - nodes + (steps >= 0).sum(axis=1), lengths)
        try:
            for x, moving in zip(arrays, rows):  # all have been read: v may be a part of k
                x[to_page, :, to_row] = moving
            self.lengths[...] = left
        except BaseException:  # a signal's
            for x, before_it in zip(arrays, held):
                x[to_page, :, to_row] = before_it
            self.lengths[...] = lengths
            raise

    def truncate(self, lengths: Integers) -> None:
        """Drop the tokens beyond these lengths.

        A rolling cache can drop at most `chunk` tokens until more are appended, unless it has overwritten none yet, or
        no more than the `first` ones are left. After that a call has as many queries less until then. It knows of what
        was dropped from the same KVCache, or before that was copied, alone.

        Parameters
        ----------
        lengths : int or integer array, (batch,)
            At most the length of each sequence. CuPy arrays are not checked but clipped to what is allowed.

        Returns
        -------
        None

        Raises
        ------
        TypeError, ValueError
            For what does not fit; then nothing has changed.

        Examples
        --------
        >>> import numbattn as na, numpy as np
        >>> cache = na.KVCache(*np.zeros((2, 2, 1, 6, 8)), np.array([6, 3], np.int32))
        >>> cache.truncate([4, 0])
        >>> cache.lengths
        array([4, 0], dtype=int32)
        """
        given, held = own("lengths", integers("lengths", lengths)), self._checked_lengths()
        given = np.full_like(held, given) if isinstance(given, int) else moved(given, held)
        if given.shape != held.shape:
            raise ValueError(f"lengths: got the shape {given.shape}, expected {held.shape}")
        check_apart("KVCache lengths", self.lengths)
        check_writable("KVCache lengths", self.lengths)
        if self._is_numpy:
            for b in np.flatnonzero((given < 0) | (given > held))[:1]:
                raise ValueError(f"lengths: got {given[b]} for sequence {b}, allowed 0 to {held[b]}, its length")
        self.lengths[...] = self._cut("lengths", np.clip(given, 0, held), held)

    def _cut(self, name: str, lengths: Any, held: Any) -> Any:
        """The lengths to which sequences that are `held` are cut if these are wanted, as said by an argument."""
        if self._ring is None:
            return lengths
        least, reached = self._least_lengths(lengths), self._reach()
        if self._is_numpy:
            for b in np.flatnonzero(lengths < least)[:1]:
                raise ValueError(f"{name}: got {lengths[b]} tokens for sequence {b}, allowed {least[b]} to {held[b]}: "
                                 f"after more than {self.chunk}, the chunk, earlier keys have been overwritten")
        lengths = np.maximum(lengths, least)
        self._reached[...] = np.where(lengths <= self._ring.first, lengths, reached)
        return lengths

    def overflowed(self) -> bool:
        """Whether a sequence has been given more tokens than it has room for. On a GPU this waits for the device.

        On NumPy arrays `append` refuses them. On a GPU it does not wait to find out: tokens beyond the capacity are not
        written, but lengths grow.

        Returns
        -------
        bool

        Examples
        --------
        >>> import numbattn as na, numpy as np
        >>> na.KVCache.zeros(2, 8, 100, 64, like=np.zeros(0)).overflowed()
        False
        """
        return bool((self.lengths > self._longest).any())
