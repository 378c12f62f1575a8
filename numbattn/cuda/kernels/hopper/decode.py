"""`kernels.any.decode` on Hopper, where TMA loads each warp's tiles of keys."""

from ...build import TensorMapArgument
from ...tile import (
    WARP,
    Pipeline,
    advance,
    clear,
    device,
    fence_async_proxy,
    init_pipelines,
    prefetch_tensor_map,
    stage,
    sync_threads,
    sync_warp,
    thread_index,
    tma_load,
    tma_load_pages,
    wait,
)
from ...tile.alignment import VECTOR_BYTES
from ...tile.boxes import fits_pages
from ...words.arguments import Matrix, TmaMatrix
from ...words.spec import Spec
from ..any import decode as any_gpu
from ..any.decode import ARGUMENTS, KeyTiles, blocks, parameters
from ..any.decode_loads import WARPS, Loads
from ..shared.visibility import has_key_lengths
from .forward_tiles import head_dims


class TmaKeys(TmaMatrix):
    """A TmaMatrix of keys or values, in pages if the cache has pages."""

    def flat(self, planner, work):
        return [planner.whole(self.name)] if work.problem.page_size else super().flat(planner, work)


KEYS = TmaKeys("k", "k"), TmaKeys("v", "k", may_be_empty=True)


def tma_loads(shared, held, head_dim, head_dim_v, tile_n, page_size, mask, nbytes):
    """Loads by TMA, which a warp's first lane starts. Stage w of a pipeline belongs to warp w, in every round."""
    SHARED_K, SHARED_V = (shared.boxes(tile_n, cols, held.dtype, WARPS) for cols in (head_dim, head_dim_v))
    K_PIPELINE, V_PIPELINE = (Pipeline.within(shared, x, readers=1, once=True) for x in (SHARED_K, SHARED_V))
    TILE_N, PAGE_SIZE, HAS_V, HAS_KEY_LENGTHS = tile_n, page_size, head_dim_v > 0, has_key_lengths(mask)

    @device
    def start(mK, mV):
        if thread_index() == 0:
            prefetch_tensor_map(mK)
            if HAS_V:
                prefetch_tensor_map(mV)
        init_pipelines(K_PIPELINE, V_PIPELINE)
        sync_threads()

    @device
    def stages(warp):
        return stage(K_PIPELINE, warp), stage(V_PIPELINE, warp)

    @device
    def of_sequence(place, matrices, cache, work, n_block):
        if thread_index() % WARP == 0 and n_block < work.n_blocks:
            tma_load(place, matrices, work.batch, work.head_k, n_block * TILE_N)

    @device
    def of_pages(place, pages, cache, work, n_block):
        if thread_index() % WARP == 0 and n_block < work.n_blocks:
            tma_load_pages(place, pages, cache[0][work.batch], work.head_k, n_block * TILE_N, PAGE_SIZE)

    @device
    def wait_k(place, work, n_block):
        wait(place)
        return place.tile

    @device
    def wait_v(place, work, n_block):
        wait(place)
        left = work.band[3] - n_block * TILE_N
        if HAS_KEY_LENGTHS and left < TILE_N:                   # else TMA has filled in zeros beyond the matrix
            clear(place.tile, left, WARP)                       # it may be NaN, and 0 * NaN is NaN
            fence_async_proxy()
            sync_warp()
        return place.tile

    @device
    def next_use(place):
        return advance(place, WARPS)

    load_tile, rows = (of_pages, min(page_size, tile_n)) if page_size else (of_sequence, tile_n)
    boxes = ((i, (1, 1, rows, tiles.width)) for i, tiles in ((1, SHARED_K), (2, SHARED_V)) if tiles.cols)
    maps = tuple(TensorMapArgument(i, box, l2_promotion=0) for i, box in boxes)
    return Loads(start, stages, load_tile, load_tile, wait_k, wait_v, next_use, KEYS, maps)


def hopper_decode(**parameters):
    """The kernel."""
    return any_gpu.decode(loads=tma_loads, **parameters)


TILES = {64: KeyTiles(128), 128: KeyTiles(64), 192: KeyTiles(32), 256: KeyTiles(32)}  # by the larger head_dim


def rows(work):
    return (TILES[max(head_dims(work.problem))],)


def takes_pages(work):
    """Whether TMA loads the pages of a cache in place."""
    (tiles,) = rows(work)
    return fits_pages(tiles.tile_n, work.problem.page_size) and work.nbytes == VECTOR_BYTES


SPEC = Spec(
    hopper_decode,
    (Matrix("q"), *KEYS, *ARGUMENTS),
    tiles=rows,
    parameters=lambda work, tiles: parameters(work, tiles, head_dims),
    blocks=blocks,
    persistent=True,
    arch="a",
)  # fmt: skip
