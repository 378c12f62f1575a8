"""The tile language: attention on the registers of a GPU, written like the paper.

A kernel is a Python function over tiles. `load`, `put`, `get`, `save` move them, `dot` multiplies them, operators and
the functions of `math` do the rest; all unrolling happens inside. Layouts and places in shared memory are made while
the kernel is being made, and captured. Every word has two meanings, see `world`; `simulate` runs a kernel on the plain
one.
"""

from .conversion import convert
from .copies import copy_async, wait_copies
from .creation import col_index, cols_between, full, row_index
from .elementwise import exp2, log2, maximum, minimum, reciprocal, rescaled, spread, where, wide_product
from .fragment import bfloat16
from .global_memory import Alignment, aligned, has_bits, load, save
from .integers import INDEX, index, lowest_bit, opaque, shape
from .layout import ONE, WARPGROUP, WARPGROUP_ROWS, Axis, Layout, copy_layout, mma, simt, wgmma
from .pipeline import Pipeline, acquire, advance, commit, init_pipeline, read, release, stage, wait
from .product import dot
from .reductions import part_sum, row_max, row_sum
from .shared_memory import SharedMemory, allocate, clear, get, put
from .simulator import DeadlockError, RaceError, simulate
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
from .tma import fence_async_proxy, prefetch_tensor_map, tma_load, tma_store, tma_store_wait
from .warpgroup import operand, wgmma_wait
from .world import device, primitive

__all__ = [
    "INDEX",
    "ONE",
    "WARPGROUP",
    "WARPGROUP_ROWS",
    "Alignment",
    "Axis",
    "DeadlockError",
    "Layout",
    "Pipeline",
    "RaceError",
    "SharedMemory",
    "acquire",
    "advance",
    "aligned",
    "allocate",
    "atomic_add",
    "atomic_inc",
    "ballot",
    "bfloat16",
    "block_index",
    "clear",
    "col_index",
    "cols_between",
    "commit",
    "convert",
    "copy_async",
    "copy_layout",
    "decrease_registers",
    "device",
    "dot",
    "exp2",
    "fence_async_proxy",
    "full",
    "get",
    "grid_size",
    "has_bits",
    "increase_registers",
    "index",
    "init_pipeline",
    "launch_dependents",
    "load",
    "log2",
    "lowest_bit",
    "maximum",
    "minimum",
    "mma",
    "opaque",
    "operand",
    "part_sum",
    "prefetch_tensor_map",
    "primitive",
    "put",
    "read",
    "reciprocal",
    "release",
    "rescaled",
    "row_index",
    "row_max",
    "row_sum",
    "save",
    "shape",
    "simt",
    "simulate",
    "spread",
    "stage",
    "sync_threads",
    "sync_warp",
    "sync_warpgroup",
    "sync_warpgroups",
    "thread_index",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "wait",
    "wait_copies",
    "wait_on_dependencies",
    "warpgroup_index",
    "wgmma",
    "wgmma_wait",
    "where",
    "wide_product",
]  # fmt: skip
