"""The loop of kernels over pairs: a block keeps a tile of rows and walks over the columns that these see."""

from typing import Any, NamedTuple

from ...tile import device, index, sync_threads, wait_copies
from .pairs import block_steps, mask_steps


class Part(NamedTuple):
    """A tile of pairs in registers: some of the columns that have been copied together."""

    stage: Any
    chunk: Any
    n0: Any  # its first column
    is_masked: Any  # whether some of its pairs may be out of sight


def loop_steps(pairs, mask, fetch, hidden=0):
    """Device functions: (array with the axes of rows, mask) -> the Block of this block, and the mask of its segment;
    (P, mask, block, part) -> P, `hidden` out of sight; and a function (add) -> the loop, a device function (found,
    given, mask, block) -> what is found in the end, add(found, given, mask, block, part) of each Part in turn.

    fetch: a device function (given, block, stage, n0) that starts to copy columns from n0 on. The next tile is in
    flight while this one is computed.
    """
    block_of, next_tile = block_steps(mask, pairs.tile_m, pairs.tile_n)
    needs_mask, masked = mask_steps(mask, pairs.layout, pairs.tile_m, pairs.tile_n, hidden)
    TILE_N, COLS, CHUNKS, IN_TURN = pairs.tile_n, pairs.layout.cols.size, pairs.chunks, pairs.stages == 1

    @device
    def in_sight(P, mask, block, part):
        if part.is_masked:
            P = masked(P, mask, block, part.n0)
        return P

    def loop_of(add):
        @device
        def loop(found, given, mask, block):
            n_block, stage = block.first, index(0)
            if n_block < block.tiles:
                fetch(given, block, stage, n_block * TILE_N)
            while n_block < block.tiles:
                this = n_block
                n_block = next_tile(mask, block, n_block)
                wait_copies()
                sync_threads()                                  # this tile has arrived, all have read the last one
                if not IN_TURN and n_block < block.tiles:
                    fetch(given, block, 1 - stage, n_block * TILE_N)
                is_masked = needs_mask(mask, block, this)
                for chunk in range(CHUNKS):
                    found = add(found, given, mask, block, Part(stage, chunk, this * TILE_N + chunk * COLS, is_masked))
                if not IN_TURN:
                    stage = 1 - stage
                elif n_block < block.tiles:
                    sync_threads()                              # all have read this tile
                    fetch(given, block, stage, n_block * TILE_N)
            return found

        return loop

    return block_of, in_sight, loop_of
