"""Merge the results of `decode` for chunks of keys, in their order: the weighted mean of their O, and lse."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...build import Source
from ...tile import (
    WARP,
    Alignment,
    SharedMemory,
    aligned,
    allocate,
    block_index,
    col_index,
    copy_layout,
    device,
    full,
    get,
    load,
    maximum,
    put,
    row_index,
    row_max,
    row_sum,
    save,
    shape,
    simt,
    sync_threads,
    sync_warp,
    thread_index,
    where,
)
from ...words.arguments import O_BEFORE, Argument, Matrix, Statistic
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..scores import SCORE, may_be_far, sink_steps
from ..shared.chunks import chunks_between, count_of_chunks
from ..shared.layouts import DTYPES, sum_type
from ..shared.schedule import overlap_launches, split
from ..shared.softmax import LN_2, alpha_steps, logsumexp, low_step, softmax_steps
from ..shared.start import resume_step
from ..shared.visibility import BAND, band_kinds, band_of, visible_keys
from ..tables import of_o, rounded

THREADS = 128
PARTS = 16  # sums of a row
MANY = 8  # rows a multiprocessor; a block for each of 32 or 512 rows takes 2 us less, of 2048 1 us more (H200)


def columns_of_o(work):
    """Rounded; none where lse alone is wanted."""
    size = work.problem.head_dim_v
    return rounded("head_dim_v", size) if size else 0


@dataclass(frozen=True)
class Partials(Argument):
    """The results of chunks for each query, (batch, heads, chunks, seqlen_q, columns)."""

    name: str

    def find(self, planner, work):
        problem = work.problem
        columns = {"partial o": columns_of_o(work), "statistics": 2}[self.name]
        chunks = count_of_chunks(problem.seqlen_k)
        planner.add_temporary(self.name, (*problem.batch, chunks, problem.seqlen_q, columns), problem.sum_dtype)

    def flat(self, planner, work):
        yield planner.at(self.name, own=3)

    def type(self, about):
        return about.sums_of(5)


PARTIALS = Partials("partial o"), Partials("statistics")  # m and l of each row


class RowThreads(NamedTuple):
    """A row of the table: how many threads share a row of O, a warp or a block."""

    threads: int

    unit, tile_m, tile_n = "fma", 1, 1


def combine(*, dtype, out_dtypes, head_dim_v, threads, mask, score, resumes=False):
    """The kernel. A row is a query of a head. resumes: whether O and lse over other keys are added, see `shared.start`.

    Its chunks are added up in PARTS sums, each of every PARTS-th chunk, and these in order, for any number of threads.
    """
    dtype, ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
    TILE = copy_layout(PARTS, head_dim_v, threads, 4)
    COLUMNS = simt(head_dim_v, PARTS, min(threads, max(head_dim_v & -head_dim_v, 1)), 1, 4)  # divides both
    CHUNKS, MAXIMA, SUMS = TILE.row_vector(), simt(1, 4 * WARP, WARP, WARP, 1), simt(1, PARTS, WARP, 1, 4)
    ONE, O_LINE = SUMS.row_vector(), COLUMNS.row_vector()
    shared, COUNT, SHARE = SharedMemory(), THREADS // threads, threads
    SHARED_O, SHARED_L = shared.tile(PARTS, head_dim_v, ACC, COUNT), shared.tile(PARTS, 1, ACC, COUNT)
    ROWS_OF, ZERO, NONE, LN2, AT_ONCE = Alignment(16), ACC(0), ACC(-np.inf), ACC(LN_2), 4 * WARP
    HAS_LOW, far = dtype.itemsize > 2, may_be_far(score)
    no_max, _ = softmax_steps(ACC, far)
    band_at, (with_sink, inverse) = band_of(mask), sink_steps(score, ACC)
    RESUMES, m_and_l = resumes, resume_step(ACC, no_max)
    low_of, (_, alpha_of) = low_step(ACC, far), alpha_steps(ACC, HAS_LOW and not far)
    arrive = sync_warp if threads == WARP else sync_threads

    @device
    def largest_of(maxima, chunks, scale_log2):
        top = full(ONE, no_max(scale_log2))
        for chunk in range(0, chunks, AT_ONCE):
            x = load(maxima, MAXIMA, chunk)
            top = full(ONE, row_max(where(col_index(MAXIMA, chunk) < chunks, x, NONE), top))
        return top

    @device
    def sums_of(O, maxima, sums, chunks, top, scale_log2):
        """The weighted sums of l and O of each part."""
        l, o = full(CHUNKS, ZERO), full(TILE, ZERO)
        for chunk in range(0, chunks, PARTS):
            x, m = load(O, TILE, chunk), load(maxima, CHUNKS, chunk)
            weights = where(row_index(CHUNKS, chunk) < chunks, alpha_of(m, full(CHUNKS, top), scale_log2), 0)
            l = l + load(sums, CHUNKS, chunk) * weights
            o = o + x * weights
        return l, o

    def kernel(mPartial, mStatistics, mO, before, mLse, mLow, mask, scores, scale_log2, kept_scale):
        overlap_launches()
        batches, heads, _, seqlen_q, _ = shape(mPartial)
        place = thread_index() // SHARE
        rest, query = split(block_index() * COUNT + place, seqlen_q)
        batch, head = split(rest, heads)
        if batch < batches:
            keys, end_of_keys = visible_keys(band_at(mask, batch, head), 0, seqlen_q)
            first, end = chunks_between(keys, end_of_keys)
            O = aligned(mPartial[batch, head, first:end, query], ROWS_OF)
            maxima, sums = mStatistics[batch, head, first:end, query, 0], mStatistics[batch, head, first:end, query, 1]
            top = largest_of(maxima, end - first, scale_log2)
            if RESUMES:
                m_before, l_before = m_and_l(full(ONE, mLse[batch, head, query]), scale_log2)
                top = maximum(top, m_before)
                o_before = load(before[0][batch, head, query], O_LINE, 0)   # before a warp saves o there
            l, o = sums_of(O, maxima, sums, end - first, top, scale_log2)
            put(allocate(SHARED_O, place), o)
            put(allocate(SHARED_L, place), l)
            arrive()
            total = row_sum(get(allocate(SHARED_L, place).T, SUMS))
            o_line = row_sum(get(allocate(SHARED_O, place).T, COLUMNS))
            if RESUMES:
                weight = l_before * alpha_of(m_before, top, scale_log2)
                total = total + weight
                o_line = o_line + o_before * full(O_LINE, weight / kept_scale)
            m, total, alpha = with_sink(top * (scale_log2 * LN2), total, scores, batch, head)
            factor, lse = inverse(total, alpha), logsumexp(m, total, LN2)
            save(mO[batch, head, query], o_line * full(O_LINE, factor * kept_scale), 0)
            save(mLse[batch, head], lse, query)
            if HAS_LOW:
                save(mLow[batch, head], low_of(lse, top, scale_log2, factor), query)

    dtypes = {"o": out_dtypes[0]}
    signature = signature_of(kernel, SPEC.arguments, dtype, ACC, dtypes, mask=mask, score=score, resumes=resumes)
    return Source(kernel, signature, THREADS, shared=shared.nbytes, overlaps=True)


def row_threads(work):
    """A block, or a warp if it can load all chunks at once and there are many rows."""
    problem = work.problem
    few = count_of_chunks(problem.seqlen_k) <= PARTS and problem.head_dim_v <= 128
    many = math.prod(problem.lse_shape) > MANY * work.device.multiprocessors
    return (RowThreads(WARP if few and many else THREADS),)


def blocks(work, tiles, m_blocks, n_blocks):
    """For one element of the batch."""
    return -(-work.problem.heads * work.problem.seqlen_q * tiles.threads // THREADS)


SPEC = Spec(
    combine,
    (*PARTIALS, Matrix("o", may_be_empty=True), O_BEFORE, Statistic("lse"), Statistic("lse_low"), BAND, SCORE,
     "scale_log2", "kept_scale"),
    tiles=row_threads,
    parameters=lambda work, tiles: {
        "dtype": work.problem.dtype.name, "threads": tiles.threads, **of_o(work),
        "head_dim_v": columns_of_o(work), "mask": band_kinds(work.mask),
        "score": work.score,
    },
    blocks=blocks,
)  # fmt: skip
