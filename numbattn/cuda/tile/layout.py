"""Layouts: which thread holds which elements of a tile, in which register. Pure Python, the same in both worlds."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from ...base.forks import cached_property

WARP_BITS = 5
WARP = 1 << WARP_BITS  # threads
WARPGROUP_BITS = 7
WARPGROUP = 1 << WARPGROUP_BITS
WARPGROUP_ROWS = 64  # of a warpgroup's sums


@dataclass(frozen=True)
class Axis:
    """One axis of a tile: slot s of thread t is at position base(t) + offsets[s].

    Attributes
    ----------
    size : int
        Number of positions.
    fields : tuple of (shift, bits, weight)
        base(t) is the sum of ((t >> shift) & (2**bits - 1)) * weight.
    offsets : tuple of int
        One offset for each slot, relative to the base. No offset has a bit in common with a base.
    fold : int
        Number of positions, a power of two, after which indices start again from 0, see `Layout.folded`; 0: never.

    >>> axis = Axis(8, fields=((0, 2, 2),), offsets=(0, 1))
    >>> [[axis.base(thread) + offset for offset in axis.offsets] for thread in range(4)]
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    """

    size: int
    fields: tuple = ()
    offsets: tuple = (0,)
    fold: int = 0

    def base(self, thread):
        """The first position of a thread. Operators only: serves ints, NumPy arrays and LLVM values alike."""
        total = 0
        for shift, bits, weight in self.fields:
            total = total + ((thread >> shift) & ((1 << bits) - 1)) * weight
        return total

    def __hash__(self):
        return self._hash

    @cached_property
    def _hash(self):
        return hash((self.size, self.fields, self.offsets))

    @cached_property
    def slots(self):
        return len(self.offsets)

    @cached_property
    def thread_bits(self):
        """The bits of the thread number that this axis depends on."""
        return frozenset(shift + i for shift, bits, _ in self.fields for i in range(bits))

    @property
    def run(self):
        """The number of slots with adjacent positions."""
        return next((slot for slot in range(1, self.slots) if self.offsets[slot] != slot), self.slots)

    @property
    def period(self):
        """The distance from one run to the next."""
        return self.offsets[self.run] if self.run < self.slots else self.size

    def runs(self, width):
        """The slots in groups of adjacent positions, aligned to their length, a power of two up to `width`."""
        groups, slot = [], 0
        while slot < self.slots:
            n = width
            while n > 1 and not self._is_run(self.offsets[slot : slot + n], n):
                n //= 2
            groups.append(tuple(range(slot, slot + n)))
            slot += n
        return groups

    def _is_run(self, offsets, n):
        return (
            offsets == tuple(range(offsets[0], offsets[0] + n))
            and offsets[0] % n == 0
            and all(weight % n == 0 for _, _, weight in self.fields)
        )

    def half(self):
        """The axis of either half, with half of every thread's slots."""
        size, slots = self.size // 2, self.slots // 2
        left, right = self.offsets[:slots], self.offsets[slots:]
        if not left or right != tuple(offset + size for offset in left):
            raise TypeError(f"the halves of {self} lie in different registers")
        return Axis(size, self.fields, left)

    def position_bits(self):
        """The bits that occur in positions."""
        found = 0
        for part in [weight << i for _, bits, weight in self.fields for i in range(bits)] + list(self.offsets):
            found |= part
        return found

    def without(self, mask):
        """The axis of the positions p & ~mask: one slot for all the slots that coincide."""
        if not mask:
            return self
        fields = tuple(
            (shift + i, 1, weight << i)
            for shift, bits, weight in self.fields
            for i in range(bits)
            if not (weight << i) & mask
        )
        return Axis(self.size, fields, tuple(dict.fromkeys(offset & ~mask for offset in self.offsets)))


    @cached_property
    def within(self):
        """The axis of the positions p % fold."""
        return self._picked(0, self.fold) if self.fold else self

    @cached_property
    def outside(self):
        """The axis of the positions p // fold."""
        return self._picked(log2(self.fold), self.size)

    def _picked(self, low, end):
        """The axis of the bits of positions from number `low` on, up to positions less than `end`."""
        bits = [(shift + i, 1, weight << i) for shift, bits, weight in self.fields for i in range(bits)]
        fields = tuple((shift, 1, weight >> low) for shift, _, weight in bits if weight >> low and weight < end)
        return Axis(self.size, fields, tuple(offset % end >> low for offset in self.offsets))


ONE = Axis(1)  # an axis that broadcasts: row vectors have cols=ONE, column vectors rows=ONE


@dataclass(frozen=True)
class Layout:
    """How a tile is dealt out to `threads` threads: each holds rows.slots x cols.slots elements.

    `unit` says what multiplies into such a tile: "fma", CUDA cores; "mma", the tensor cores for each warp; or "wgmma",
    the tensor cores for a warpgroup, whose threads are counted from 0 in each warpgroup of the block.

    >>> print(TILE, TILE.row_vector().shape, TILE.col_vector().shape, TILE.row_parts().shape)
    fma 2x4 in 1x1 registers (2, 1) (1, 4) (2, 4)
    """

    rows: Axis
    cols: Axis
    threads: int
    unit: str = "fma"

    def __hash__(self):
        return self._hash

    @cached_property
    def _hash(self):
        return hash((self.rows, self.cols, self.threads))

    def __str__(self):
        return f"{self.unit} {self.rows.size}x{self.cols.size} in {self.rows.slots}x{self.cols.slots} registers"

    @property
    def shape(self):
        return self.rows.size, self.cols.size

    @cached_property
    def slots(self):
        return self.rows.slots, self.cols.slots

    @cache  # noqa: B019, layouts are few
    def positions(self, thread):
        """Rows and columns of a thread's registers, as indices of a tile."""
        rows, cols = (axis.base(thread) + np.array(axis.offsets, int) for axis in (self.rows, self.cols))
        return rows[:, None], cols[None, :]

    @cache  # noqa: B019
    def is_first_holder(self, thread):
        """Whether no thread before this one holds the same elements."""
        return not any(thread >> bit & 1 for bit in self.idle_bits())

    def folded(self, queries):
        """The layout whose rows are those of several tiles, one below the other, `queries` rows each, a power of two:
        `row_index` counts within each, `fold_index` says which.

        >>> layout = simt(8, 4, 8, 1, 4).folded(4)
        >>> [(layout.rows.within.base(thread), layout.rows.outside.base(thread)) for thread in range(8)]
        [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (3, 1)]
        """
        return replace(self, rows=replace(self.rows, fold=queries))

    @cached_property
    def indices(self):
        """The layout whose row positions are those of `row_index`."""
        return replace(self, rows=self.rows.within) if self.rows.fold else self

    @cache  # noqa: B019
    def row_vector(self):
        """The layout of one value per row, held by every thread that has a part of the row."""
        return Layout(self.rows, ONE, self.threads)

    @cache  # noqa: B019
    def col_vector(self):
        """The layout of one value per column."""
        return Layout(ONE, self.cols, self.threads)

    @cache  # noqa: B019
    def row_parts(self):
        """The layout of one value per row and thread: sums of each thread, which are still to be added up."""
        bits = self.row_lane_bits()
        parts = Axis(1 << len(bits), tuple((bit, 1, 1 << i) for i, bit in enumerate(bits)))
        return Layout(self.rows, parts, self.threads)

    @cached_property
    def holders(self):
        """The number of threads needed so that each element is held by one."""
        return 1 << max(self.rows.thread_bits | self.cols.thread_bits, default=-1) + 1

    @cached_property
    def has_whole_rows(self):
        """Whether each row belongs to a single warp."""
        return max(self.cols.thread_bits, default=0) < WARP_BITS

    @cache  # noqa: B019
    def row_lane_bits(self):
        """The bits of the thread number in which the threads that share a row differ."""
        if self.rows.thread_bits & self.cols.thread_bits or not self.has_whole_rows:
            raise TypeError(f"a row of {self} is not held by one warp")
        return sorted(self.cols.thread_bits)

    def neighbours_lane(self):
        """The difference between the numbers of two lanes that hold rows i and i + 1 for even i; None if no two do."""
        lanes = (1 << shift for shift, bits, weight in self.rows.fields if weight == 1 and bits and shift < WARP_BITS)
        return next(lanes, None)

    def idle_bits(self):
        """The bits of the thread number that nothing depends on: threads that differ only in them hold copies."""
        return sorted(set(range(log2(self.threads))) - self.rows.thread_bits - self.cols.thread_bits)

    @cache  # noqa: B019
    def by_fours(self):
        """The layout in which groups of four lanes hold four neighbouring columns each, not twice two: see `dot`.

        >>> mma(16, 32, 32).by_fours().cols
        Axis(size=32, fields=((0, 2, 4),), offsets=(0, 1, 2, 3, 16, 17, 18, 19), fold=0)
        """
        return replace(self, cols=deal(self.cols.size, 0, 4, 4))

    def without(self, rows=0, cols=0):
        """The layout of a coarser tile: the elements of this one at (i & ~rows, j & ~cols). See `spread`."""
        return Layout(self.rows.without(rows), self.cols.without(cols), self.threads)


def log2(n):
    bits = n.bit_length() - 1
    if n != 1 << bits:
        raise ValueError(f"a power of two is needed, got {n}")
    return bits


def deal(size, shift, hands, run):
    """An axis dealt out in runs to `hands` hands in turn; bits `shift`... of the thread number are the hand.

    Without positions nobody gets any: words do nothing with a tile of no columns.
    """
    hands = max(min(hands, size // run), 1)
    bits = log2(hands)
    if size % (hands * run):
        raise ValueError(f"{size} is no multiple of {hands} runs of {run}")
    starts = range(0, size, hands * run)
    return Axis(size, ((shift, bits, run),), tuple(start + i for start in starts for i in range(run)))


def simt(rows, cols, threads, lanes_per_row, vector, row_vector=1):
    """Accumulators on CUDA cores: each row in `lanes_per_row` neighbouring lanes, in runs of `vector` columns.

    The rows are dealt out to the groups of lanes in turn, `row_vector` at a time.

    >>> layout = simt(8, 32, 32, lanes_per_row=4, vector=2)
    >>> layout.slots, layout.cols.offsets, layout.cols.base(1)
    ((1, 8), (0, 1, 8, 9, 16, 17, 24, 25), 2)
    """
    groups = threads // lanes_per_row
    row_axis = deal(rows, log2(lanes_per_row), groups, row_vector)
    return Layout(row_axis, deal(cols, 0, lanes_per_row, vector), threads)


def copy_layout(rows, cols, threads, vector):
    """For moving a row-major tile: neighbouring threads hold neighbouring runs of `vector` elements.

    >>> copy_layout(32, 64, 128, vector=4).slots
    (4, 4)
    """
    vectors = cols // vector
    per_row = min(max(vectors & -vectors, 1), threads)  # the largest power of two in it: 4 for a head_dim of 96 float16
    return simt(rows, cols, threads, per_row, vector)


def mma(rows, cols, threads, across=1):
    """Accumulators on the tensor cores, as mma.sync m16n8 and wgmma hold them: 16 rows a warp, one below the other.

    `across` warps share these rows: each gets 8 columns in turn. The groups of `across` warps have all of the rows, one
    group after the other, each as in mma(rows, cols, threads // across).

    >>> mma(64, 32, 128).slots, mma(64, 32, 128).cols.offsets
    ((2, 8), (0, 1, 8, 9, 16, 17, 24, 25))
    >>> mma(32, 32, 128, across=2).slots, mma(32, 32, 128, across=2).cols.offsets
    ((2, 4), (0, 1, 16, 17))
    """
    warps = threads // WARP // across
    row_axis = Axis(
        rows,
        ((2, 3, 1), (WARP_BITS, log2(warps), 16)),
        tuple(start + i for start in range(0, rows, 16 * warps) for i in (0, 8)),
    )
    dealt = deal(cols, WARP_BITS + log2(warps), across, 8)
    col_axis = Axis(cols, ((0, 2, 2), *dealt.fields), tuple(start + i for start in dealt.offsets[::8] for i in (0, 1)))
    return Layout(row_axis, col_axis, threads, "mma")


def wgmma(cols):
    """Accumulators of a warpgroup: 64 rows.

    >>> wgmma(32).shape, wgmma(32).unit
    ((64, 32), 'wgmma')
    """
    return replace(mma(WARPGROUP_ROWS, cols, WARPGROUP), unit="wgmma")
