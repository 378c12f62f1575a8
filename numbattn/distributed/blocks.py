"""A rank's work with the keys of one rank, in as few calls as the mask allows."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ..base.origin import Crop
from ..masks import All, Causal, First, Lengths, Mask, Window, cropped
from .pieces import TokenRange, tokens_of


class Block(NamedTuple):
    """One call: queries in these rows of a rank's part, keys in these rows of another one's."""

    queries: slice
    keys: slice
    mask: Mask  # between them
    crop: Crop  # their place in the whole; of several pieces, that of the first ones

    @classmethod
    def of(cls, mask: Mask, a: TokenRange, b: TokenRange, sizes: tuple[int, int], rows: int) -> Block:
        """The block of two pieces. mask: of the whole, of these sizes; rows: of the part that a is in."""
        crop = Crop(a.first, a.length, b.first, b.length, *sizes, a.row, rows)
        return cls(a.rows, b.rows, cropped(mask, crop), crop)

    @property
    def may_show(self) -> bool:
        return self.mask._may_show(self.crop.queries, self.crop.keys)

    @property
    def offset(self) -> int | None:
        """The offset of the Causal that is equal to the mask, from -queries, nothing visible, to keys - 1, everything
        visible; None if there is no such Causal."""
        m, n = self.crop.queries, self.crop.keys
        lo, hi, queries, keys = self.mask._band(m, n)
        is_band = all(isinstance(part, Causal | Window | Lengths | First) for part in self.mask._parts)
        return self.clipped(hi) if is_band and lo <= 1 - m and (queries, keys) == (m, n) else None

    def clipped(self, offset: int) -> int:
        return max(-self.crop.queries, min(offset, self.crop.keys - 1))


class Hop(NamedTuple):
    """A rank's work with the keys of one rank."""

    keys: slice  # the rows of that rank's part that it needs
    blocks: tuple[Block, ...]

    def keys_of(self, block: Block) -> slice:
        """The place of a block's keys among them."""
        return slice(block.keys.start - self.keys.start, block.keys.stop - self.keys.start)


def hop_of(
    mask: Mask, queries: tuple[TokenRange, ...], keys: tuple[TokenRange, ...], sizes: tuple[int, int], joins: bool
) -> Hop:  # fmt: skip
    """The work with one rank's pieces of queries and another one's pieces of keys. joins: whether a call may have
    several pieces."""
    rows = tokens_of(queries)
    blocks = [Block.of(mask, a, b, sizes, rows) for a in queries for b in keys]
    seen = [block for block in blocks if block.may_show]
    if not seen:
        return Hop(slice(0, 0), ())
    of_q, of_k = _around([block.queries for block in seen]), _around([block.keys for block in seen])
    joined = _joined(blocks, of_q, of_k) if joins else None
    return Hop(of_k, tuple(seen) if joined is None else (joined,))


hop_by_numbers = lru_cache(maxsize=4096)(hop_of)  # of masks without arrays, which do not change


def _around(rows: list[slice]) -> slice:
    """The rows from the first of them to the last."""
    return slice(min(some.start for some in rows), max(some.stop for some in rows))


def _joined(blocks: list[Block], of_q: slice, of_k: slice) -> Block | None:
    """These queries and keys in one call, if a single Causal is equal to the mask of each block."""
    inside = [block for block in blocks if of_q.start <= block.queries.start < of_q.stop
              and of_k.start <= block.keys.start < of_k.stop]  # fmt: skip
    wanted = [offset for block in inside if (offset := block.offset) is not None]
    if len(wanted) < len(inside):
        return None
    places = [block.queries.start - of_q.start - (block.keys.start - of_k.start) for block in inside]
    for offset in [own - place for own, place in zip(wanted, places)]:
        if wanted == [block.clipped(offset + place) for block, place in zip(inside, places)]:
            mask = All() if offset >= of_k.stop - of_k.start - 1 else Causal(offset)
            return Block(of_q, of_k, mask, inside[0].crop)
    return None
