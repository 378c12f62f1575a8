"""delta = rowsum(dO * O) - dlse: D of Algorithm 4, line 19, less the gradient of lse. Also the gradient of a sink.

lse is written as well, as the backward kernels take it: in base 2, and +inf for a query that sees nothing, because of a
mask, a length or scores of -inf. Then exp(S - lse) is 0 whatever S is, and there are no gradients. Both are padded,
each segment on its own, since kernels copy them tile by tile: queries beyond the last one see nothing.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...build import Source
from ...compiler import types
from ...tile import (
    block_index,
    convert,
    device,
    exp2,
    full,
    load,
    row_index,
    row_sum,
    save,
    shape,
    simt,
    where,
)
from ...words.arguments import LSE_LOG2, Argument, Matrix, Statistic
from ...words.numbers import LOG2_E
from ...words.signatures import signature_of
from ...words.spec import PADDED, Spec, block_per_query_tile
from ...words.steps import array_of_part, sums_by_row
from ..shared.layouts import DTYPES, sum_type, vector
from ..shared.recompute import low_steps
from ..shared.schedule import overlap_launches, place
from ..shared.segments import slot_step
from ..shared.slices import slice_steps
from ..shared.softmax import log2_step
from ..shared.visibility import PACKING, packing_of
from ..tables import by_slices, dtypes_of, sliced_dims


class QueryTiles(NamedTuple):
    """The tile of a block; there are no keys in it."""

    tile_m: int
    tile_n: int = 1


THREADS, LANES = 128, 8
SHORT_ROW = 128  # bytes


def tiles_of(work):
    """Twice as many queries where rows are short: fewer blocks look for their segment, a fifth less time at head_dim 64
    in 16 bits (H200); as fast without segments."""
    _, head_dim_v = sliced_dims(work.problem)
    return (QueryTiles(64 if head_dim_v * work.problem.dtype.itemsize <= SHORT_ROW else 32),)


def delta(
    *, dtype, out_dtypes, tile_m, head_dim_v, dlse, nbytes, bounded, low=False, mask=(), sink=False, by_slices=False
):  # fmt: skip
    """The kernel. out_dtypes: of O; dlse: whether lse has a gradient; sink: whether a sink's logits have one, which is
    still to be summed over the queries: a sink has no dP, so that its dS is -P delta.

    bounded: whether lse is rounded up where it has too few bits for exp(S - lse), so that P is at most 1. Kernels for
    any GPU clamp each element instead, which would take 1 to 3 % of the time on Hopper. low: whether what rounding took
    from lse is given.
    """
    dtype, ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
    TILE_M = tile_m
    TILE = simt(tile_m, head_dim_v, THREADS, LANES, vector(dtype))
    ROWS, INFINITE, LOG2E, ZERO = TILE.row_vector(), ACC(np.inf), ACC(LOG2_E), ACC(0)
    digits = np.finfo(ACC).nmant
    FAR, MARGIN, in_log2 = ACC(2.0**digits), ACC(2.0 ** (3 - digits)), log2_step(ACC)
    TILES_A_SLOT, segment_of = PADDED // TILE_M, slot_step(mask, "q", PADDED)
    HAS_SINK, IS_GIVEN, BOUNDED = sink, low, bounded and not low
    HAS_LOW, (first_low, *_) = dtype.itemsize > 2, low_steps(dtype)
    BY_SLICES, WIDTH, (_, slice_of) = by_slices, head_dim_v, slice_steps(by_slices, head_dim_v, nbytes)

    @device
    def row_sums(dO, O, m0, number=0):
        dO, O = load(slice_of(dO, number), TILE, m0), load(slice_of(O, number), TILE, m0)
        return row_sum(convert(dO, ACC) * convert(O, ACC))

    @device
    def delta_of(mDO, mO, mLse, mDlse, batch, head, first, end, m0):
        """lse and delta of a tile of the queries [first, end), from number m0 on, and which of them see something."""
        dO, O = mDO[batch, head][first:end], mO[batch, head][first:end]
        D = row_sums(dO, O, m0)
        if BY_SLICES:
            for number in range(1, (shape(O)[1] + WIDTH - 1) // WIDTH):
                D = D + row_sums(dO, O, m0, number)
        if dlse:
            D = D - load(mDlse[batch, head][first:end], ROWS, m0)
        lse = load(mLse[batch, head][first:end], ROWS, m0)
        sees = (lse != -INFINITE) & (row_index(ROWS, m0) < end - first)
        return lse, where(sees, D, 0), sees

    @device
    def low_of(mLow, batch, head, first, end, m0):
        return load(mLow[batch, head][first:end], ROWS, m0) if IS_GIVEN else full(ROWS, ZERO)

    @device
    def save_sink(sinks, batch, head, lse, low, D, sees, first, end, m0):
        if HAS_SINK:
            logits, sums = sinks
            P = exp2(((logits[batch, head] - lse) - low) * LOG2E)
            save(sums[batch, head][first:end], where(sees, -(P * D), 0), m0)

    @device
    def to_log2(lse, sees):
        lse_log2 = in_log2(lse)
        if BOUNDED:
            lse_log2 = where(abs(lse_log2) > FAR, lse_log2 + abs(lse_log2) * MARGIN, lse_log2)
        return where(sees, lse_log2, INFINITE)

    @device
    def save_low(mLseLog2, batch, head, low, sees, padded_row):
        if HAS_LOW:
            save(mLseLog2[batch, head], where(sees, low * LOG2E, 0), first_low(mLseLog2) + padded_row)

    def kernel(mDO, mO, mLse, mLow, mDlse, sinks, mDelta, mLseLog2, packing):
        overlap_launches()
        batches, heads, seqlen_q = shape(mLse)
        tile, batch, head = place(block_index(), batches * heads, heads)
        segment, slot = segment_of(packing, batch, tile // TILES_A_SLOT, seqlen_q)
        m0 = slot * PADDED + tile % TILES_A_SLOT * TILE_M
        first, padded_row = segment.first_query, segment.first_padded_row + m0
        if slot * PADDED < segment.queries:
            end = first + segment.queries
            lse, D, sees = delta_of(mDO, mO, mLse, mDlse, batch, head, first, end, m0)
            save(mDelta[batch, head], D, padded_row)
            save(mLseLog2[batch, head], to_log2(lse, sees), padded_row)
            low = low_of(mLow, batch, head, first, end, m0)
            save_low(mLseLog2, batch, head, low, sees, padded_row)
            save_sink(sinks, batch, head, lse, low, D, sees, first, end, m0)

    signature = signature_of(kernel, SPEC.arguments, dtype, ACC, {"o": out_dtypes[0]}, mask=mask, sink=sink)
    return Source(kernel, signature, THREADS, overlaps=True)


def parameters(bounded):
    return lambda work, tiles: {
        "dtype": work.problem.dtype.name, **dtypes_of(work, "o"), "tile_m": tiles.tile_m, "dlse": "dlse" in work.dtypes,
        "low": "lse_low" in work.dtypes,
        "nbytes": work.nbytes, "head_dim_v": sliced_dims(work.problem)[1], **by_slices(work),
        "sink": work.sink is not None, "mask": packing_of(work.mask), "bounded": bounded,
    }  # fmt: skip


class SinkSums(Argument):
    """A sink's logits and the sums for their gradient, (batch, heads, seqlen_q); nothing if it is not wanted."""

    def find(self, planner, work):
        if work.sink is not None:
            planner.add_temporary(sums_by_row(work.sink), work.problem.lse_shape, work.problem.sum_dtype)

    def flat(self, planner, work):
        if work.sink is not None:
            yield from (planner.at(array_of_part(work.sink), own=0), planner.at(sums_by_row(work.sink), own=1))

    def type(self, about):
        return types.Tuple((about.sums_of(2), about.sums_of(3)) if about.sink else ())


def blocks_of_slots(work, tiles, m_blocks, n_blocks):
    """Blocks for all rows of padded statistics."""
    return work.problem.heads * (work.padded_length // tiles.tile_m)


def blocks_of_queries(work, tiles, m_blocks, n_blocks):
    """Blocks for the queries alone: kernels for any GPU read no statistics beyond them, which for 32 queries would take
    three of four blocks."""
    blocks = blocks_of_slots if work.segments else block_per_query_tile
    return blocks(work, tiles, m_blocks, n_blocks)


SINK_SUMS = SinkSums()
SPEC = Spec(
    delta,
    (Matrix("do"), Matrix("o"), Statistic("lse"), Statistic("lse_low"), Statistic("dlse"), SINK_SUMS,
     Statistic("delta", padded=True), LSE_LOG2, PACKING),
    tiles=tiles_of,
    parameters=parameters(bounded=False),
    blocks=blocks_of_queries,
    packs=True,
    slices=True,
)  # fmt: skip
SPEC_BOUNDED = replace(SPEC, parameters=parameters(bounded=True), blocks=blocks_of_slots)
