"""How the kernel for few queries loads keys and values."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ...tile import (
    WARP,
    Alignment,
    allocate,
    commit_copies,
    copy_async,
    copy_layout,
    device,
    maximum,
    sync_warp,
    wait_copies,
)
from ...words.arguments import Matrix
from ..shared.layouts import vector

WARPS = 4  # of a block


@dataclass(frozen=True)
class Keys(Matrix):
    """A Matrix of keys or values, in pages if the cache has pages."""

    heads: str = "k"

    def flat(self, planner, work):
        yield planner.whole(self.name) if work.problem.page_size else planner.at(self.name, self.heads)


KEYS = Keys("k"), Keys("v", may_be_empty=True)


class Loads(NamedTuple):
    """How a warp loads its tiles of K and V: device functions, and the arguments mK and mV."""

    start: Any  # (mK, mV), by all threads of a block
    stages: Any  # (warp) -> its stages of K and of V
    load_k: Any  # (K, mK, cache, work, n_block): start to load a tile, if the work tile has it
    load_v: Any
    wait_k: Any  # (K, work, n_block) -> the tile, once it has arrived
    wait_v: Any
    next_use: Any  # (K or V) -> the same stage, for the next tile
    keys: Any  # the arguments
    maps: tuple = ()  # tensor maps


def cp_async_loads(shared, held, head_dim, head_dim_v, tile_n, page_size, mask, nbytes):
    """Loads by cp.async: K and V in turn, each a group, the last of which may be in flight."""
    in_boxes = held.widened is None and held.dtype.itemsize == 2
    place = shared.boxes if in_boxes else partial(shared.tile, widened=held.widened)
    SHARED_K, SHARED_V = (place(tile_n, cols, held.dtype, WARPS) for cols in (head_dim, head_dim_v))
    ROWS_OF, TILE_N, rows_of = Alignment(nbytes), tile_n, held.rows_of

    @device
    def start(mK, mV):
        pass

    @device
    def stages(warp):
        return allocate(SHARED_K, warp), allocate(SHARED_V, warp)

    def load_step(cols, load_scales):
        COPY = copy_layout(tile_n, cols, WARP, vector(held.dtype))

        @device
        def load_tile(place, matrices, cache, work, n_block):
            if n_block < work.n_blocks:
                keys = maximum(work.band[3], 1)                 # rows beyond a sequence's length may be NaN
                copy_async(place, rows_of(matrices, cache, work, keys, ROWS_OF), COPY, n_block * TILE_N)
                load_scales(cache, work, keys, n_block * TILE_N)
            commit_copies()

        return load_tile

    @device
    def arrived(place, work, n_block):
        wait_copies(1)
        sync_warp()
        return place

    @device
    def next_use(place):
        return place

    steps = load_step(head_dim, held.load_k), load_step(head_dim_v, held.load_v), arrived, arrived
    return Loads(start, stages, *steps, next_use, KEYS)
