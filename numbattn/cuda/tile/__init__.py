"""The tile language: attention on the registers of a GPU, written like the paper.

A kernel is a Python function over tiles; all unrolling happens inside. Layouts and places in shared memory are made
before the kernel, which captures them. Every word has two meanings, see `world`; `simulate` runs a kernel with the
plain one. Numbers take the dtype of the tile that they are combined with. With a tile of no columns words do nothing.

| word | what it does | PTX |
|---|---|---|
| simt, mma, wgmma, copy_layout | which thread holds which elements of a tile: a Layout of two Axis | |
| load, save | a tile from global memory, or to it | ld.global, st.global |
| aligned, rows_between, lines_of | promises about a matrix, some of its rows, a vector in lines | |
| heads_as_rows, rows_of_pages | several matrices as one | |
| gather, scatter | rows by their numbers | ld.global, st.global |
| has_bits, take | single elements | ld.global |
| copy_async, commit_copies, wait_copies | from global to shared memory, in the background | cp.async |
| SharedMemory, allocate | places in shared memory, the tiles there | |
| columns, line | some columns of such a tile, one of its rows | |
| put, get, clear | a tile to shared memory, or from there; zeros | st.shared, stmatrix, ld.shared |
| put_number, get_number | an integer, likewise | st.shared, ld.shared |
| full, row_index, col_index, diagonal_index, cols_between | a number everywhere; positions of elements | mov, add |
| fold_index | the tile of a folded layout that a row is in | mov, add |
| + - * / // & | ^ ~ << >> < <= == != abs | arithmetic of tiles, vectors and numbers | add.f32 ... |
| exp2, log2, reciprocal, sqrt | in float32; in float64 by libdevice | ex2, lg2, rcp, sqrt.approx.ftz |
| exp, log, tanh | by those | ex2, lg2, rcp, fma |
| maximum, minimum, capped, where | for tiles and numbers; `capped` keeps NaN | max, min, min.NaN, selp |
| map_elements, holds | any function of an element and its position, any truth of its position | |
| map_tiles | any function of the elements of several tiles | |
| row_max, row_sum, part_sum | along the rows: by a warp, or by each thread | max, add, shfl.bfly |
| diagonal_sums | along the diagonals of a tile in shared memory, by a warp | ldmatrix, mma.sync, shfl |
| box_sums | over pairs of tokens of two boxes at one offset, likewise | ldmatrix, mma.sync, shfl |
| part_argmin, anywhere | a running minimum of each row and its column; whether truths hold | min, vote.any |
| convert, bitcast | another dtype; the same bits as another dtype | cvt, mov |
| rescaled, spread, wide_product | scaling by what is often 1; shared values; 64-bit products | vote.any, mul.wide |
| column_halves, beside | a tile's halves, and the tile of two halves | |
| column_pairs, paired | its even and odd columns, and the tile of these | |
| shifted | the rows of a tile, moved one column on | |
| transposed_halves | 2x2 matrices of half words in two lanes | shfl.bfly, prmt |
| dot, dots | a product of tiles, or several | fma, mma.sync, wgmma |
| (positive_)operand(_columns), wgmma_wait | of products by a warpgroup | wgmma |
| Pipeline, init_pipelines, stage, advance, alongside | stages of shared memory in turn | mbarrier.init |
| acquire, wait, release, commit, read | who may write a stage, who read it | mbarrier.try_wait, .arrive |
| tma_load(_part, _pages), tma_store | tiles of boxes, in the background | cp.async.bulk.tensor |
| tma_store_wait, tma_store_complete | until these have been read, or are there | cp.async.bulk.wait_group |
| bulk_load | a part of a line, in the background | cp.async.bulk |
| bulk_add, bulk_store | to sums of tiles that many blocks add to, in the background | cp(.reduce).async.bulk |
| put_registers, get_registers, load_registers | a tile in register order | st.shared, ld.shared, ld.global |
| add_registers; add_lines, load_lines | to such sums, immediately; the same in lines | red.global, ld.global |
| cluster_rank, sync_cluster | the blocks of a cluster | %cluster_ctarank, barrier.cluster |
| put_in_peer, release_in_peer | to the other block's shared memory, in the background | st.async, mapa |
| prefetch_tensor_map, fence_async_proxy | before all these | prefetch.tensormap, fence.proxy |
| thread_index, block_index, grid_size, warpgroup_index | where this thread is | %tid, %ctaid, %nctaid |
| index, shape, opaque, always, lowest_bit, ballot | integers that count; bits | mov, bfind, vote.ballot |
| sync_threads, sync_warp, sync_warpgroup(s) | makes what others have written visible | bar.sync, bar.warp.sync |
| add_element | to one element of sums, immediately | red.global |
| atomic_add, atomic_inc | counters in global memory | atom.add, atom.inc |
| post, wait_for_post | numbers in global memory by which blocks wait for others | st.release, ld.acquire |
| launch_dependents, wait_on_dependencies | overlap with the stream's next kernel | griddepcontrol |
| increase_registers, decrease_registers | register reallocation of a warpgroup | setmaxnreg |

In the words' examples TILE is a layout of 2x4, x the tile of ARRAY, 0 to 7, and show(f) shows f(x); run(kernel,
*arrays) simulates one warp and returns the last array. PLACE is the place of such a tile in shared memory, BOXES that
of boxes of 8x64 float16, RING a pipeline of two stages of four int32 with one reader.
"""

from . import operators  # noqa: F401, defines them
from .accumulation import (
    add_element,
    add_lines,
    add_registers,
    bulk_add,
    bulk_store,
    get_registers,
    load_lines,
    load_registers,
    put_registers,
)
from .arrays import Alignment
from .box_sums import BoxGroup, box_sums
from .cluster import (
    cluster_rank,
    put_in_peer,
    release_in_peer,
    sync_cluster,
)
from .commits import commit, read
from .conversion import bitcast, convert
from .copies import commit_copies, copy_async, wait_copies
from .creation import col_index, cols_between, diagonal_index, fold_index, full, row_index
from .diagonals import DIAGONALS, diagonal_sums
from .elementwise import (
    beside,
    capped,
    column_halves,
    column_pairs,
    maximum,
    minimum,
    paired,
    rescaled,
    shifted,
    spread,
    transposed_halves,
    where,
    wide_product,
)
from .fragment import bfloat16
from .functions import exp, exp2, log, log2, reciprocal, sqrt, tanh
from .global_memory import gather, has_bits, load, save, scatter, take
from .integers import INDEX, always, index, lowest_bit, opaque, shape
from .layout import ONE, WARP, WARPGROUP, WARPGROUP_ROWS, Axis, Layout, copy_layout, mma, simt, wgmma
from .mapping import fold_elements, holds, map_elements, map_tiles
from .matrices import aligned, heads_as_rows, lines_of, rows_between, rows_of_pages
from .pipeline import Pipeline, acquire, advance, alongside, init_pipelines, release, stage, wait
from .places import SharedMemory
from .posts import post, wait_for_post
from .product import dot, dots
from .races import RaceError
from .reductions import anywhere, part_argmin, part_sum, row_max, row_sum
from .shared_memory import allocate, clear, columns, get, get_number, line, put, put_number
from .simulator import DeadlockError, simulate
from .synchronisation import (
    atomic_add,
    atomic_inc,
    ballot,
    block_index,
    decrease_registers,
    grid_size,
    increase_registers,
    launch_dependents,
    sync_threads,
    sync_warp,
    sync_warpgroup,
    sync_warpgroups,
    thread_index,
    wait_on_dependencies,
    warpgroup_index,
)
from .tma import (
    bulk_load,
    fence_async_proxy,
    prefetch_tensor_map,
    tma_load,
    tma_load_pages,
    tma_load_part,
    tma_store,
    tma_store_complete,
    tma_store_wait,
)
from .warpgroup import operand, operand_columns, positive_operand, wgmma_wait
from .world import device

__all__ = [
    "DIAGONALS",
    "INDEX",
    "ONE",
    "WARP",
    "WARPGROUP",
    "WARPGROUP_ROWS",
    "Alignment",
    "Axis",
    "BoxGroup",
    "DeadlockError",
    "Layout",
    "Pipeline",
    "RaceError",
    "SharedMemory",
    "acquire",
    "add_element",
    "add_lines",
    "add_registers",
    "advance",
    "aligned",
    "allocate",
    "alongside",
    "always",
    "anywhere",
    "atomic_add",
    "atomic_inc",
    "ballot",
    "beside",
    "bfloat16",
    "bitcast",
    "block_index",
    "box_sums",
    "bulk_add",
    "bulk_load",
    "bulk_store",
    "capped",
    "clear",
    "cluster_rank",
    "col_index",
    "cols_between",
    "column_halves",
    "column_pairs",
    "columns",
    "commit",
    "commit_copies",
    "convert",
    "copy_async",
    "copy_layout",
    "decrease_registers",
    "device",
    "diagonal_index",
    "diagonal_sums",
    "dot",
    "dots",
    "exp",
    "exp2",
    "fence_async_proxy",
    "fold_elements",
    "fold_index",
    "full",
    "gather",
    "get",
    "get_number",
    "get_registers",
    "grid_size",
    "has_bits",
    "heads_as_rows",
    "holds",
    "increase_registers",
    "index",
    "init_pipelines",
    "launch_dependents",
    "line",
    "lines_of",
    "load",
    "load_lines",
    "load_registers",
    "log",
    "log2",
    "lowest_bit",
    "map_elements",
    "map_tiles",
    "maximum",
    "minimum",
    "mma",
    "opaque",
    "operand",
    "operand_columns",
    "paired",
    "part_argmin",
    "part_sum",
    "positive_operand",
    "post",
    "prefetch_tensor_map",
    "put",
    "put_in_peer",
    "put_number",
    "put_registers",
    "read",
    "reciprocal",
    "release",
    "release_in_peer",
    "rescaled",
    "row_index",
    "row_max",
    "row_sum",
    "rows_between",
    "rows_of_pages",
    "save",
    "scatter",
    "shape",
    "shifted",
    "simt",
    "simulate",
    "spread",
    "sqrt",
    "stage",
    "sync_cluster",
    "sync_threads",
    "sync_warp",
    "sync_warpgroup",
    "sync_warpgroups",
    "take",
    "tanh",
    "thread_index",
    "tma_load",
    "tma_load_pages",
    "tma_load_part",
    "tma_store",
    "tma_store_complete",
    "tma_store_wait",
    "transposed_halves",
    "wait",
    "wait_copies",
    "wait_for_post",
    "wait_on_dependencies",
    "warpgroup_index",
    "wgmma",
    "wgmma_wait",
    "where",
    "wide_product",
]  # fmt: skip
