"""How a kernel file describes its kernel to the planner: what it is called with, and in which tiles. No CUDA here.

    SPEC = Spec(forward, (Matrix("q"), Matrix("k", "k"), Matrix("v", "k"), Matrix("o"), Line("lse"), MASK, DROPOUT,
                          "group_size", "scale_log2", "kept_scale"), tiles=..., parameters=...)

The arguments are in the order of the kernel's signature. A name alone is a number: one of NUMBERS, which come with each
call, one of the problem's (group_size, seqlen_q, seqlen_k), or one that the spec's `numbers` computes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

NUMBERS = (
    "lo", "hi", "queries", "keys", "lo_shift", "hi_shift",  # of the mask's band, int32
    "threshold", "offset", "key_low", "key_high",  # of dropout, uint32 and uint64
    "scale", "scale_log2", "kept_scale",  # floats of the sums' dtype
)  # fmt: skip
SIDES = NUMBERS[:4]


class Device(NamedTuple):
    """What a plan needs to know of a GPU."""

    index: int
    cc: tuple  # (major, minor)
    multiprocessors: int
    shared: int  # bytes of shared memory that a block may have


class Work(NamedTuple):
    """What a kernel has to do. All that is compiled in follows from it, and so do its tiles."""

    problem: Any
    device: Device
    mask: tuple  # kinds, see kernels.visibility
    keys: int  # the most that a query sees, as far as the band tells
    dtypes: dict  # names, of the arrays of a call by name
    nbytes: int  # rows of all its matrices are aligned to so many; 0: not even to their elements


class Matrix(NamedTuple):
    """An array (batch, heads, rows, features), of the heads of "q" or of "k"."""

    name: str
    heads: str = "q"


class Boxes(NamedTuple):
    """A Matrix that is moved in boxes: a tensor map."""

    name: str
    heads: str = "q"


class Line(NamedTuple):
    """An array (batch, heads, seqlen_q)."""

    name: str


class Role(Enum):
    MASK = "a kernels.visibility.Sight"
    DROPOUT = "a kernels.dropout.Drops"
    COUNTERS = "two counters, by which blocks share out their work: see counters.py"


MASK, DROPOUT, COUNTERS = Role


def one_tile_a_block(work, tiles, m_blocks, n_blocks):
    """Blocks of one element of the batch, where each keeps a tile of queries."""
    return work.problem.heads * m_blocks


@dataclass(frozen=True)
class Spec:
    """A kernel, and how it is called."""

    factory: Callable  # returns its build.Source
    arguments: tuple
    tiles: Callable  # (work) -> candidates, the fastest first: the first whose shared memory fits is taken
    parameters: Callable  # (work, tiles) -> what the factory is called with
    takes: Callable = lambda work: True  # whether it can do this work
    variants: Callable = lambda work: ({},)  # (work) -> more parameters, for each of several launches
    numbers: Callable = lambda work, tiles: {}  # (work, tiles) -> numbers of its own, by name
    keeps: str = "q"  # a block keeps tiles of queries, or of keys, "k", and walks over those of the other side
    blocks: Callable = one_tile_a_block
    persistent: bool = False  # blocks draw work until there is none: one a multiprocessor
    arch: str = ""  # "a": for this architecture alone

    @property
    def name(self):
        return self.factory.__name__

    def cc(self, device):
        """What it is compiled for on a Device."""
        return (*device.cc, self.arch) if self.arch else device.cc

    def fitting(self, work):
        """The first tiles whose shared memory fits; None if there are none."""
        (more, *_) = self.variants(work)
        for tiles in self.tiles(work):
            if self.factory(**self.parameters(work, tiles), **more).shared <= work.device.shared:
                return tiles
        return None
