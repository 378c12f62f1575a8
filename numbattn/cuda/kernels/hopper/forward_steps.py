"""What the consumers, the scheduler and the loader of Hopper's `forward` pass to each other."""

from typing import Any, NamedTuple

from ...tile import device, index
from ..shared.segments import Segment, whole
from ..shared.visibility import FARTHEST, PACKED


class WorkTile(NamedTuple):
    """A tile of queries, and the tiles of keys [n_block, n_blocks) in its sight."""

    batch: Any
    head: Any
    m_block: Any
    n_block: Any  # the first one that is not empty
    n_blocks: Any  # 0: there is no work left
    segment: Any


class ConsumerTile(NamedTuple):
    """A consumer's share of a work tile: 64 queries of a head, from m0 on."""

    batch: Any
    head: Any
    m0: Any
    m_block: Any
    n_block: Any
    n_blocks: Any
    segment: Any


class Call(NamedTuple):
    """What consumers need of the kernel's arguments."""

    tails: Any  # O, where TMA cannot store all of a tile
    mLse: Any
    sight: Any
    scores: Any
    drops: Any
    heads: Any
    scale_log2: Any
    kept_scale: Any
    heads_per_tile: Any
    ramp: Any = ()  # of the head, where there is one: see ramp


class Accumulators(NamedTuple):
    """What a consumer carries from tile to tile: O still lacks alpha and P V of the last one."""

    O: Any
    P: Any
    m: Any
    l: Any
    alpha: Any


BY_CONSUMER = -1  # in place of a row: TMA does not store this O


def record_steps(mask):
    """Device functions: a WorkTile as integers, and from them again; and the integers for no work."""

    @device
    def numbers(work):
        return work.batch, work.head, work.m_block, work.n_block, work.n_blocks

    @device
    def from_numbers(record):
        batch, head, m_block, n_block, n_blocks = record
        return WorkTile(batch, head, m_block, n_block, n_blocks, whole(index(FARTHEST)))

    @device
    def packed_numbers(work):
        at = work.segment
        return (
            work.batch, work.head, work.m_block, work.n_block, work.n_blocks,
            at.first_query, at.queries, at.first_key, at.keys,
        )  # fmt: skip

    @device
    def from_packed_numbers(record):
        batch, head, m_block, n_block, n_blocks, first_query, queries, first_key, keys = record
        segment = Segment(first_query, queries, first_key, keys, index(0))
        return WorkTile(batch, head, m_block, n_block, n_blocks, segment)

    if PACKED in mask:
        return packed_numbers, from_packed_numbers, (0,) * 9
    return numbers, from_numbers, (0,) * 5
