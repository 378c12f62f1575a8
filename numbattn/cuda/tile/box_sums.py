"""Sums over the pairs of tokens of two boxes of a grid that are at the same offset, by a warp. See `box_sums`.

As in `diagonal_sums` tensor cores add up blocks of 8x8, here those of a class of pairs of rows, see
numbattn.grids.offsets. Within a block rows are then rotated until pairs at a cyclic offset are in one column, which
eight lanes add up.
"""

from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from ...grids.offsets import AT_ONCE, classes_of, fields_of, groups_of, numbers_of, sums_of
from ..compiler import types
from .conversion import HALVES
from .diagonals import BLOCK, SIZE, Lane, check_halves, identity_of, moved, of_column
from .emit import F32, I32
from .fragment import Fragment, FragmentType, constant
from .fragment import fragment as pack
from .layout import ONE, WARP, Axis, Layout
from .pieces import bits_of, ldmatrix, mma_sync
from .simulator import thread_index as my_index
from .world import primitive

NOTHING = F32(0.0)


@constant
@dataclass(frozen=True)
class BoxGroup:
    """A group of the sums for boxes of these sizes.

    >>> BoxGroup((8, 8), 0).layout.cols.size, BoxGroup((4, 4, 4), 0).layout.cols.size
    (64, 128)
    """

    sizes: tuple
    number: int

    @property
    def layout(self):
        count = sums_of(self.sizes)
        return Layout(ONE, Axis(count, ((0, 5, 1),), tuple(range(0, count, WARP))), WARP)


@primitive
def box_sums(tile, group):
    """Row vector of the sums of a BoxGroup, in its layout: of tile[i, j] for tokens i of one box and j of another one.
    The tile is 64x64 16-bit floats in boxes; all lanes of a warp call this.

    >>> BOX, ROWS = SharedMemory().boxes(64, 64, np.float16), simt(64, 64, 32, 16, 4)
    >>> FIRST = BoxGroup((8, 8), 0)
    >>> def kernel(x, y):
    ...     put(allocate(BOX), load(x, ROWS, 0))
    ...     sync_warp()
    ...     save(y, box_sums(allocate(BOX), FIRST), 0)
    >>> run(kernel, np.ones((64, 64), np.float16), np.zeros((1, 64)))[0, :8]   # the same row, and columns 0, 2, 4, 6, 1
    array([64., 48., 32., 16., 56., 40., 24.,  8.])
    """
    check_halves("box_sums", tile.plan)
    values, (_, (mine,)) = tile.read(slice(None), slice(None)), group.layout.positions(my_index() % WARP)
    every = groups_of(group.sizes) * sums_of(group.sizes)
    sums = np.bincount(numbers_of(group.sizes).ravel(), values.ravel().astype(np.float64), every)
    return Fragment(group.layout, sums.astype(np.float32).reshape(-1, sums_of(group.sizes))[None, group.number, mine])


@box_sums.lowering
def box_sums(tile, group):
    check_halves("box_sums", tile.plan)
    about = group.value
    out = FragmentType(about.layout, types.float32)

    def generate(b, pointer, _):
        rows, tokens = fields_of(about.sizes)
        classes = [*classes_of(rows).values()][about.number * AT_ONCE :][:AT_ONCE]
        lane = Lane(b)
        block_sums, by_offset = ClassSums(b, lane, tile, pointer), ByOffset(b, lane, tokens)
        blocks = [sums for at in range(0, len(classes), 2) for sums in block_sums(*classes[at : at + 2])]
        return pack(b, out, [by_offset(blocks + [[NOTHING] * 2] * (AT_ONCE - len(blocks)))])

    return out(tile, group), generate


class ClassSums:
    """Sums of the blocks of two classes, two registers each."""

    def __init__(self, b, lane, tile, pointer):
        self.b, self.lane, self.pointer, self.kind = b, lane, pointer, HALVES[tile.dtype]
        self.identity = [identity_of(b, lane, tile.dtype)] * 2
        self.row = b.mul(lane.line, I32(SIZE + BLOCK))          # chunks of a row are in the order of their number ^ row

    def __call__(self, first, second=()):
        sums, pairs = [NOTHING] * 4, [*zip_longest(first, second), (None, None)]
        for at in range(0, len(pairs) - 1, 2):
            blocks = [block for pair in pairs[at : at + 2] for block in pair]
            loaded = ldmatrix(self.b, self.place_of(blocks), 0)
            left = [x if block else I32(0) for x, block in zip(loaded, blocks)]
            sums = mma_sync(self.b, "m16n8k16", self.kind, sums, left, self.identity)
        return sums[:2], sums[2:]

    def place_of(self, blocks):
        """Where a lane's row of one of four blocks starts."""
        b = self.b
        starts = [I32(row * BLOCK * SIZE + col * BLOCK) for row, col in (block or (0, 0) for block in blocks)]
        lower, upper = (b.select(self.lane.is_set[3], second, first) for first, second in (starts[:2], starts[2:]))
        return b.gep(self.pointer, [b.xor(self.row, b.select(self.lane.is_set[4], upper, lower))])


class ByOffset:
    """Sums of the pairs of tokens in blocks of a group's classes by their offsets; tokens: the fields of these."""

    def __init__(self, b, lane, tokens):
        self.b, self.lane = b, lane
        self.lanes, self.wraps, self.kinds = [], [], 1 << len(tokens)
        for low in (0, 1):                                      # of the cyclic offset
            offset, at, wraps = b.or_(lane.col, I32(low)), I32(0), I32(0)
            for number, field in enumerate(tokens):
                total = b.add(*(bits_of(b, x, field.shift, field.bits) for x in (offset, lane.row)))
                at = b.or_(at, b.shl(b.and_(total, I32((1 << field.bits) - 1)), I32(field.shift)))
                wraps = b.or_(wraps, b.shl(b.lshr(total, I32(field.bits)), I32(number)))
            self.lanes.append(b.or_(b.and_(lane.bits(0, 5), I32(28)), b.lshr(at, I32(1))))
            self.wraps.append([b.icmp_unsigned("==", wraps, I32(kind)) for kind in range(self.kinds)])

    def __call__(self, blocks):
        """blocks: of all classes. For each kind of what wraps around, the sum that is this lane's."""
        values = [self.by_wraps(low, x) for block in blocks
                  for low, x in enumerate(moved(self.b, self.lane, block, self.lanes))]  # fmt: skip
        return of_column(self.b, self.lane, values)

    def by_wraps(self, low, x):
        return [self.b.select(is_this, x, NOTHING) for is_this in self.wraps[low]]
