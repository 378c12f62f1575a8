"""The tile language: attention on the registers of a GPU, written like the paper.

A kernel is a Python function over tiles. `load`, `put`, `get`, `save` move them, `dot` multiplies them, operators and
the functions of `math` do the rest; all unrolling happens inside. Layouts and places in shared memory are made while
the kernel is being made, and captured. Every word has two meanings, see `world`; `simulate` runs a kernel on the plain
one.
"""

from .barrier import (
    give_registers,
    let_kernel_after_start,
    sync_warp,
    sync_warpgroup,
    sync_warpgroups,
    take_registers,
    wait_for_kernel_before,
    warpgroup_index,
)
from .fragment import bfloat16
from .layout import ONE, WARPGROUP, WARPGROUP_ROWS, Axis, Layout, copying, mma, simt, wgmma
from .math import (
    ballot,
    col_index,
    cols_between,
    convert,
    exp2,
    full,
    log2,
    lowest_bit,
    maximum,
    minimum,
    part_sum,
    quotient,
    reciprocal,
    rescaled,
    row_index,
    row_max,
    row_sum,
    spread,
    unforeseen,
    where,
    wide_product,
)
from .memory import Alignment, SharedMemory, aligned, allocate, clear, fetch, fetched, get, has_bits, load, put, save
from .product import dot
from .ring import (
    Ring,
    acquire,
    expect,
    fill,
    following,
    open_ring,
    release,
    send,
    sent,
    share_with_tma,
    slot,
    tell,
    told,
    wait,
)
from .simulator import DeadlockError, RaceError, simulate
from .warpgroup import finished, operand
from .world import SIMULATED, device, primitive

__all__ = [
    "ONE", "SIMULATED", "WARPGROUP", "WARPGROUP_ROWS", "Alignment", "Axis", "DeadlockError", "Layout",
    "RaceError", "Ring", "SharedMemory", "acquire", "aligned", "allocate", "ballot", "bfloat16", "clear",
    "col_index", "cols_between", "convert", "copying", "device", "dot", "exp2", "expect", "fetch", "fetched",
    "fill", "finished", "following", "full", "get", "give_registers", "has_bits", "let_kernel_after_start",
    "load", "log2", "lowest_bit", "maximum", "minimum", "mma", "open_ring", "operand", "part_sum", "primitive",
    "put", "quotient", "reciprocal", "release", "rescaled", "row_index", "row_max", "row_sum", "save", "send",
    "sent", "share_with_tma", "simt", "simulate", "slot", "spread", "sync_warp", "sync_warpgroup",
    "sync_warpgroups", "take_registers", "tell", "told", "unforeseen", "wait", "wait_for_kernel_before",
    "warpgroup_index", "wgmma", "where", "wide_product",
]  # fmt: skip
