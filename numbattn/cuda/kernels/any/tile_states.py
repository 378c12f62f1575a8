"""The states of tiles, empty, partial or full: M of Algorithm 5, for tiles of any size.

They follow from a mask's intervals, the gaps in these and its grids of blocks.

They are stored as bits, uint32 (batch, heads, kept tiles, words): for every WORD tiles one word says which are not
empty and another one which are full. `visibility.next_tile` and `visibility.needs_test` look them up.
"""

from functools import reduce

from ...build import Source
from ...tile import (
    ballot,
    block_index,
    device,
    maximum,
    minimum,
    shape,
    thread_index,
)
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..shared.schedule import overlap_launches, place, split
from ..shared.visibility import (
    BY_INTERVALS,
    GAP,
    MASK,
    PLACED,
    WORD,
    band_of,
    first_of_tail,
    grids_of,
    has_blocks,
    is_function,
)

EMPTY, PARTIAL, FULL = 0, 1, 2
THREADS = 64  # of a block: each warp finds words of a kept tile; to find its place takes most of the time
WORDS = 8  # of a warp


def tile_states(*, tile_m, tile_n, kept, mask):
    """The kernel: a warp finds several words, one bit a thread. kept: the side whose tiles blocks keep, "q" or "k"."""
    TILE_M, TILE_N, WARPS = tile_m, tile_n, THREADS // WORD
    KEEPS_Q = kept == "q"

    def state_of(g, has_states):
        WHOLE = FULL if has_states else 1

        @device
        def state(mask, batch, head, m0, n0, seqlen_q, seqlen_k):
            grid = mask.grids[g]
            cells, rows, cols = grid.cells[batch, head], grid.rows, grid.cols
            if rows == TILE_M and cols == TILE_N:               # saves divisions
                cell = cells[m0 // TILE_M, n0 // TILE_N]
                return FULL if cell >= WHOLE else PARTIAL if cell != 0 else EMPTY
            some, every = False, True
            for r in range(m0 // rows, (minimum(m0 + TILE_M, seqlen_q) - 1) // rows + 1):
                for c in range(n0 // cols, (minimum(n0 + TILE_N, seqlen_k) - 1) // cols + 1):
                    cell = cells[r, c]
                    some, every = some or cell != 0, every and cell >= WHOLE
            return FULL if every else PARTIAL if some else EMPTY

        return state

    @device
    def state_by_intervals(mask, batch, head, m0, n0, seqlen_q, seqlen_k):
        first, end = mask.intervals
        first, end, n_end = first[batch, head], end[batch, head], minimum(n0 + TILE_N, seqlen_k)
        some, every = False, True
        for i in range(m0, minimum(m0 + TILE_M, seqlen_q)):
            some = some or (first[i] < n_end and n0 < end[i])
            every = every and (first[i] <= n0 and n_end <= end[i])
        return FULL if every else PARTIAL if some else EMPTY

    def state_beside_gap(g):
        @device
        def state(mask, batch, head, m0, n0, seqlen_q, seqlen_k):
            first, end, gap, gap_end = *mask.intervals, mask.gaps[2 * g], mask.gaps[2 * g + 1]
            first, end, n_end = first[batch, head], end[batch, head], minimum(n0 + TILE_N, seqlen_k)
            gap, gap_end = gap[batch, head], gap_end[batch, head]
            some, every = False, True
            for i in range(m0, minimum(m0 + TILE_M, seqlen_q)):
                low, high = maximum(first[i], n0), minimum(end[i], n_end)       # the keys of the tile in the interval
                some = some or (low < high and (low < gap[i] or gap_end[i] < high))
                every = every and first[i] <= n0 and n_end <= end[i]
                every = every and minimum(gap_end[i], n_end) <= maximum(gap[i], n0)
            return FULL if every else PARTIAL if some else EMPTY

        return state

    def in_part(state):
        """A state by positions: each tile with some of the last keys is tested."""

        @device
        def placed(mask, batch, head, m0, n0, seqlen_q, seqlen_k):
            if n0 + TILE_N > first_of_tail(band_at(mask, batch, head)):
                return PARTIAL
            return state(mask, batch, head, m0, n0, seqlen_q, seqlen_k)

        return placed

    def least(one, other):
        @device
        def state(mask, batch, head, m0, n0, seqlen_q, seqlen_k):
            return minimum(one(mask, batch, head, m0, n0, seqlen_q, seqlen_k),
                           other(mask, batch, head, m0, n0, seqlen_q, seqlen_k))

        return state

    states = [state_of(g, is_function(kind)) for g, kind in enumerate(grids_of(mask))
              if has_blocks(kind)]  # fmt: skip
    by_intervals = [*map(state_beside_gap, range(mask.count(GAP)))] or [state_by_intervals] * (BY_INTERVALS in mask)
    by_intervals, band_at = [*map(in_part, by_intervals)] if PLACED in mask else by_intervals, band_of(mask)
    state = reduce(least, states + by_intervals)

    def kernel(mask, seqlen_q, seqlen_k):
        overlap_launches()
        out = mask.states[0]
        batches, heads, kept_tiles, words = shape(out)
        words = words // 2
        chunk, batch, head = place(block_index(), batches * heads, heads)
        kept_tile, run = split(chunk * WARPS + thread_index() // WORD, (words + WORDS - 1) // WORDS)
        if kept_tile >= kept_tiles:
            return
        for word in range(run * WORDS, minimum((run + 1) * WORDS, words)):
            tile, found = word * WORD + thread_index() % WORD, EMPTY
            m0, n0 = (kept_tile, tile) if KEEPS_Q else (tile, kept_tile)
            m0, n0 = m0 * TILE_M, n0 * TILE_N
            if m0 < seqlen_q and n0 < seqlen_k:
                found = state(mask, batch, head, m0, n0, seqlen_q, seqlen_k)
            not_empty, full = ballot(found != EMPTY), ballot(found == FULL)
            if thread_index() % WORD == 0:
                out[batch, head, kept_tile, 2 * word] = not_empty
                out[batch, head, kept_tile, 2 * word + 1] = full

    return Source(kernel, signature_of(kernel, ARGUMENTS, mask=mask), THREADS, overlaps=True)


def states_shape(kept_tiles, other_tiles):
    """The shape of the states of one matrix."""
    return kept_tiles, 2 * -(-other_tiles // WORD)


def states_blocks(kept_tiles, words):
    """The number of blocks that compute the states of one matrix."""
    return -(-kept_tiles * -(-words // 2 // WORDS) * WORD // THREADS)


def states_spec(kept):
    """The Spec of this kernel for another one, whose tiles it takes."""

    def blocks(work, tiles, m_blocks, n_blocks):
        shape = states_shape(*((m_blocks, n_blocks) if kept == "q" else (n_blocks, m_blocks)))
        return work.problem.heads * states_blocks(*shape)

    return Spec(
        tile_states,
        ARGUMENTS,
        tiles=None,
        parameters=lambda work, tiles: {
            "tile_m": tiles.tile_m, "tile_n": tiles.tile_n, "kept": kept, "mask": work.mask,
        },
        keeps=kept,
        blocks=blocks,
    )  # fmt: skip


ARGUMENTS = MASK, "seqlen_q", "seqlen_k"
STATES = {kept: states_spec(kept) for kept in ("q", "k")}
