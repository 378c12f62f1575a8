"""The tile language: attention on the registers of a GPU, written like the paper.

A kernel is a Python function over tiles. `load`, `put`, `get`, `save` move them, `dot` multiplies them, operators and
the functions of `math` do the rest; all unrolling happens inside. Layouts and places in shared memory are made while
the kernel is being made, and captured. Every word has two meanings, see `world`; `simulate` runs a kernel on the plain
one.
"""

from .barrier import sync_warp
from .fragment import bfloat16
from .layout import ONE, Axis, Layout, copying, mma, simt
from .math import (
    col_index,
    convert,
    exp2,
    full,
    log2,
    maximum,
    minimum,
    part_sum,
    quotient,
    reciprocal,
    row_index,
    row_max,
    row_sum,
    spread,
    where,
)
from .memory import Alignment, SharedMemory, aligned, allocate, fetch, fetched, gather, get, load, put, save
from .product import dot
from .simulator import DeadlockError, RaceError, simulate
from .world import SIMULATED, device, primitive

__all__ = [
    "ONE", "SIMULATED", "Alignment", "Axis", "DeadlockError", "Layout", "RaceError", "SharedMemory", "aligned",
    "allocate", "bfloat16", "col_index", "convert", "copying", "device", "dot", "exp2", "fetch", "fetched", "full",
    "gather", "get", "load", "log2", "maximum", "minimum", "mma", "part_sum", "primitive", "put", "quotient",
    "reciprocal", "row_index", "row_max", "row_sum", "save", "simt", "simulate", "spread", "sync_warp", "where",
]  # fmt: skip
