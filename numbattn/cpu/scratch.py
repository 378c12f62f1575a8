"""Memory of a thread, for one tile at a time."""

import math
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from .bfloat16 import padded
from .record import At, Record, data_address
from .tile import LINE

TILE_M, TILE_N = 128, 128  # queries, keys: the fastest of 64 to 256, forward and backward, causal or not

class Scratch(NamedTuple):
    """Buffers of the kernels of attention; names are those of the tiles in them."""

    S: Any  # then P
    dP: Any  # then dS, or dP - D where there are directions
    dS: Any
    tS: Any  # then P tS
    tdP: Any  # then tdS
    S2: Any  # the second derivative along a direction
    slopes: Any  # derivatives of scores, and S, with directions tS, before functions whose arrays have gradients
    bends: Any  # tangents of their slopes
    QT: Any
    tQT: Any  # of all directions
    dOT: Any
    tdOT: Any  # of all directions
    sums: Any  # where there are directions
    next_sums: Any  # of further keys, where rows are long
    vectors: Any  # one number a query
    tD: Any  # of all directions, and one more
    Z: Any  # uint8
    words: Any  # uint64
    wide: Any  # tokens of K or V that are widened, or that are in several pages
    rows: Any  # of words: the left matrix of a product of pairs
    pairs: Any  # the right one


def scratch_of(problem, tile=None, in_pairs=False, **counts):
    """The Record of a Scratch, whose addresses count from its beginning, and its bytes.

    tile: its queries and keys, if these are not TILE_M and TILE_N or fewer; in_pairs: whether operands of products are;
    counts: for how many of its unit each buffer has room, a tile, its queries' features, or its queries.
    """
    rows, keys = tile or (min(TILE_M, problem.seqlen_q), min(TILE_N, problem.seqlen_k))
    units = dict.fromkeys(Scratch._fields, rows * keys)
    units |= dict.fromkeys(("QT", "tQT"), rows * problem.head_dim)
    units |= dict.fromkeys(("dOT", "tdOT"), rows * problem.head_dim_v)
    units |= dict.fromkeys(("sums", "next_sums", "vectors", "tD"), rows)
    widens = problem.dtype.itemsize == 2 or problem.cache is not None
    units["wide"] = keys * max(problem.head_dim, problem.head_dim_v) * widens
    units["Z"], units["words"] = rows * keys * problem.dropout, 2 * (rows + 16) * problem.dropout
    if in_pairs:
        rows, keys, *features = map(padded, (rows, keys, problem.head_dim, problem.head_dim_v))
        units["QT"], units["dOT"] = (rows * width // 2 for width in features)
        units["rows"] = units["pairs"] = max(rows, keys) * max(rows, keys, *features) // 2
        counts |= {"rows": 1, "pairs": 1, "wide": 0}
    counts, dtypes = {"Z": 1, "words": 1} | counts, {"Z": np.dtype(np.uint8), "words": np.dtype(np.uint64)}
    sizes = [(units[name] * counts.get(name, 0), dtypes.get(name, problem.sum_dtype)) for name in Scratch._fields]
    return memory_of(Scratch, sizes)


def memory_of(kind, sizes):
    """The Record of a NamedTuple of this kind, of buffers with these numbers of elements and dtypes, whose addresses
    count from the beginning of one memory; and the bytes of that."""
    places, nbytes = [], 0
    for size, dtype in sizes:
        places.append(At(nbytes, (size,), dtype))
        nbytes += -(-size * dtype.itemsize // LINE) * LINE
    return Record(kind(*places)), nbytes


# ---------------------------------------------------------------------------------------------------- from call to call
KEPT, MOST = 16, 1 << 26  # pieces at most, and bytes of all
NBYTES = attrgetter("nbytes")
_kept: list[np.ndarray] = []  # taken and given in one native call each, which needs no lock; the oldest first


def take(nbytes):
    """Memory that begins with a line of the caches, whatever is in it. Of the system's each page would be cleared."""
    for _ in range(len(_kept)):
        try:
            memory = _kept.pop()
        except IndexError:  # other threads took the rest
            break
        if memory.nbytes >= nbytes:
            return memory
        _kept.insert(0, memory)
    return fresh(nbytes)


def fresh(nbytes):
    memory = np.empty(nbytes + LINE, np.uint8)
    start = -data_address(memory) % LINE
    return memory[start : start + nbytes]


def give(memory):
    """Keep memory for later calls, rather than what is older."""
    _kept.append(memory)
    while len(_kept) > KEPT or sum(map(NBYTES, _kept)) > MOST:
        with suppress(IndexError):  # other threads took the rest
            _kept.pop(0)


class Lent:
    """Arrays in such memory, until they are given back."""

    __slots__ = ("taken",)

    def __init__(self):
        self.taken = []

    def new(self, shape, dtype):
        """An array, whatever is in it."""
        nbytes = math.prod(shape) * dtype.itemsize
        self.taken.append(take(nbytes))
        return self.taken[-1][:nbytes].view(dtype).reshape(shape)

    def give_back(self):
        """At the end of a call; after an error nothing is kept, since a thread may use it yet."""
        while self.taken:
            give(self.taken.pop())
