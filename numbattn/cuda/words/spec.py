"""How a kernel file describes its kernel to the planner: its arguments, tiles and grid. No CUDA here.

    SPEC = Spec(forward, (Matrix("q"), Matrix("k", "k"), Matrix("v", "k"), Matrix("o"), Statistic("lse"), MASK, SCORE,
                          DROPOUT, "group_size", "scale_log2", "kept_scale"), tiles=..., parameters=...)

The arguments are in the order of the kernel's parameters, see arguments.py; their types are its signature. A name alone
is a number: one of numbers.py, which come with each call, one of the problem's (group_size, seqlen_q, seqlen_k), or one
that the spec's `numbers` computes. Several in a tuple are one parameter, a tuple.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...call.passes import BEFORE

SHARED, BY_HEAD, OWN = "shared", "by head", "own"  # by all matrices; by all of a head; by fewer
RESERVED = 1024  # bytes of shared memory that each block takes in addition to its own
THREADS = 256  # that a multiprocessor holds, however many registers they take
EVEN = 4  # most parts, if blocks fill a GPU once or twice anyway, but not evenly
PADDED = 128  # row statistics that are copied tile by tile have a multiple of this length


class Device(NamedTuple):
    """What a plan needs to know about a GPU."""

    index: int
    cc: tuple  # (major, minor)
    multiprocessors: int
    shared: int  # bytes of shared memory that a block may have

    def holds(self, shared):
        """How many blocks of `shared` bytes each fit into the shared memory of a multiprocessor."""
        return (self.shared + RESERVED) // (shared + RESERVED)


class Work(NamedTuple):
    """The work of a kernel: its tiles and everything compiled in follow from it."""

    problem: Any
    device: Device
    mask: tuple  # kinds, see kernels.shared.visibility
    keys: int  # the most that a query sees, by the band alone
    dtypes: dict  # of the arrays of a call, by name
    nbytes: int  # alignment of the rows of all its matrices; 0: less than that of their elements
    deterministic: bool = True  # whether results have to be equal bit for bit from call to call
    score: tuple = ()  # kinds, see kernels.scores
    intervals: tuple = ()  # kinds, see kernels.any.intervals
    sink: int | None = None  # the number of the Sink whose gradient is wanted
    mask_by_head: bool = False  # whether heads of a group may see different keys
    score_gradients: str = ""  # how widely arrays whose gradients are wanted are shared: SHARED, BY_HEAD, OWN; "": none
    score_added: str = ""  # how widely the added bias is shared, if a score only adds: SHARED, BY_HEAD
    whole: bool = False  # whether lse is over the keys of the call and no others
    tscore: tuple = ()  # for each part of the score its kind with the tangent in place of its array, or ""
    segments: int = 0  # of packed arrays, and two for the tokens before and after them: see kernels.shared.segments
    cells: tuple = ()  # (rows, columns) of a block of each mask of blocks
    kind: Any = None  # the form of a kind of function of pairs of points: see points.kinds
    reads: tuple = ()  # the Reads that a kernel may add up beside other gradients
    longest: int = 0  # of packed arrays, the size of a small tile that all segments fit into, if that is known

    @property
    def resumes(self):
        """Whether O and lse over other keys are given: see kernels.shared.start."""
        return BEFORE in self.dtypes

    @property
    def is_along(self):
        """Whether tangents of gradients are computed."""
        return "tdelta" in self.dtypes

    @property
    def padded_length(self):
        """The length of statistics that kernels copy tile by tile; in packed arrays tiles end with their segment."""
        seqlen = self.problem.seqlen_q
        tiles = seqlen // PADDED + self.segments if self.segments else -(-seqlen // PADDED)
        return tiles * PADDED

    def counts(self, tiles):
        """The numbers of tiles of queries and of keys; for packed arrays, of slots: see kernels.shared.segments."""
        sizes = (self.problem.seqlen_q, tiles.tile_m), (self.problem.seqlen_k, tiles.tile_n)
        return [length // tile + self.segments if self.segments else -(-length // tile) for length, tile in sizes]


def heads_apart(sharing, work):
    """How many heads have something of their own. sharing: SHARED, BY_HEAD or "", how widely it is shared."""
    return work.problem.heads if sharing == BY_HEAD else 1


def fewest_parts(room, blocks, elements):
    """How many parts to divide elements into, with so many blocks for each part: the fewest that take the least time,
    which is the time of the longest part times the number of waves. room: for blocks at a time."""
    most = min(max(room // blocks, EVEN if blocks < 2 * room else 1), elements)
    return min(range(1, most + 1), key=lambda parts: -(-blocks * parts // room) * -(-elements // parts))


def block_per_query_tile(work, tiles, m_blocks, n_blocks):
    """Blocks for one element of the batch, one for each head and tile of queries."""
    return work.problem.heads * m_blocks


@dataclass(frozen=True)
class Spec:
    """A kernel, and how it is called."""

    factory: Callable  # returns its build.Source
    arguments: tuple
    tiles: Callable  # (work) -> rows of a table, the fastest first: the first whose shared memory fits is taken
    parameters: Callable  # (work, tiles) -> parameters of the factory
    numbers: Callable = lambda work, tiles: {}  # (work, tiles) -> numbers of its own, by name
    states: Callable = lambda work, tiles: tiles  # (work, tiles) -> the tiles that have states
    keeps: str = "q"  # a block keeps a tile of queries, or with "k" of keys, and loops over tiles of the other side
    blocks: Callable = block_per_query_tile  # (work, tiles, m_blocks, n_blocks) -> blocks for one element of the batch
    sums: Callable = lambda work: False  # (work) -> whether a block has a sum over all elements of a part of the batch
    persistent: bool = False  # blocks draw work until there is none left
    resident: Callable = lambda work, tiles: 1  # (work, tiles) -> persistent blocks per multiprocessor
    multiple: Callable = lambda work: 1  # (work) -> a factor of the number of persistent blocks
    arch: str = ""  # "a": compiled for this compute capability only, as sm_90a
    packs: bool = False  # whether its tiles can end with their segment: see kernels.shared.segments
    slices: bool = False  # whether it takes larger head_dims than others, a slice at a time: see kernels.shared.slices
    columns: Callable = lambda work: {}  # (work) -> how many columns of some matrices, by name, a launch takes
    of_slice: Callable = lambda work, number: {}  # (work, number) -> parameters of the factory for some columns only

    @property
    def name(self):
        return self.factory.__name__

    @property
    def described(self):
        """All arguments that are not names of numbers, without the tuples they are in."""
        every = (x for argument in self.arguments for x in (argument if isinstance(argument, tuple) else (argument,)))
        return [x for x in every if not isinstance(x, str)]

    def cc(self, device):
        """The compute capability that it is compiled for on a Device."""
        return (*device.cc, self.arch) if self.arch else device.cc

    def most_blocks(self, work, tiles):
        """The number of persistent blocks on a device."""
        multiple = self.multiple(work)
        return max(work.device.multiprocessors * self.resident(work, tiles) // multiple, 1) * multiple

    def parts(self, work, tiles):
        """The most parts that a batch is divided into."""
        if not self.sums(work):
            return math.inf
        (batches, _), blocks = work.problem.matrices, self.blocks(work, tiles, *work.counts(tiles))
        return fewest_parts(self.room(work, tiles), blocks, batches)

    def room(self, work, tiles):
        """How many blocks a device holds at a time."""
        source, device = self.factory(**self.parameters(work, tiles)), work.device
        return device.multiprocessors * min(max(source.blocks, THREADS // source.threads), device.holds(source.shared))

    def shared(self, work, tiles):
        """Bytes of shared memory of a block."""
        return self.factory(**self.parameters(work, tiles)).shared

    def fitting(self, work):
        """The first tiles whose shared memory fits; None if there are none."""
        for tiles in self.tiles(work):
            if self.shared(work, tiles) <= work.device.shared:
                return tiles
        return None


def everything(work):
    return True


def nothing(problem, device):
    return False


class Route(NamedTuple):
    """Kernels that together do a pass, one after the other, and the work that they are for."""

    takes: Callable  # (work of the first one) -> whether they can and should do it
    specs: tuple
    tier: str = ""  # see words.tiers; "" if they belong to none
    reads: Callable = nothing  # (problem, device) -> whether they read a cache in pages, or of 8 bits, in place
