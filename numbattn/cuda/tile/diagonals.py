"""Sums along the diagonals of a tile in shared memory, by a warp. See `diagonal_sums`.

Tensor cores add up the blocks of 8x8 on each diagonal of blocks, in float32. A diagonal of elements leaves a block at
its right edge and goes on in the next block's first column: so it takes the upper triangle of one sum and the lower one
of the next. Once rows are rotated it is a column, which eight lanes add up.
"""

from itertools import pairwise

import numpy as np

from ..compiler import TypingError, types
from .boxes import PERIOD, Boxes
from .conversion import HALVES
from .emit import F32, I32, asm, shuffle_xor, thread_index
from .fragment import HALF_FLOATS, Fragment, FragmentType, name_of
from .fragment import fragment as pack
from .layout import ONE, WARP, Axis, Layout
from .pieces import bits_of, ldmatrix, mma_sync
from .simulator import thread_index as my_index
from .world import primitive

SIZE, BLOCK = 64, 8
BLOCKS, AT_ONCE = SIZE // BLOCK, 4  # diagonals of blocks at once, which have a diagonal for each lane
DIAGONALS = Layout(ONE, Axis(2 * SIZE, ((0, 2, 2), (2, 1, 1), (3, 2, BLOCK)), tuple(range(0, 2 * SIZE, WARP))), WARP)
ONES = {"float16": 0x3C00, "bfloat16": 0x3F80}


@primitive
def diagonal_sums(tile):
    """Row vector of 128, in the layout DIAGONALS: number k is the sum of all tile[i, j] with j - i = k - 64. The tile
    is 64x64 16-bit floats in boxes; all lanes of a warp call this.

    >>> BOX, ROWS = SharedMemory().boxes(64, 64, np.float16), simt(64, 64, 32, 16, 4)
    >>> def kernel(x, y):
    ...     put(allocate(BOX), load(x, ROWS, 0))
    ...     sync_warp()
    ...     save(y, diagonal_sums(allocate(BOX)), 0)
    >>> run(kernel, np.eye(64, k=-1, dtype=np.float16), np.zeros((1, 128)))[0, 62:66]
    array([ 0., 63.,  0.,  0.])
    """
    check_halves("diagonal_sums", tile.plan)
    values, (_, (mine,)) = tile.read(slice(None), slice(None)), DIAGONALS.positions(my_index() % WARP)
    return Fragment(DIAGONALS, np.array([[values.trace(k - SIZE, dtype=np.float32) for k in mine]]))


@diagonal_sums.lowering
def diagonal_sums(tile):
    check_halves("diagonal_sums", tile.plan)
    out = FragmentType(DIAGONALS, types.float32)

    def generate(b, pointer):
        lane = Lane(b)
        block_sums, along_diagonals = BlockSums(b, lane, tile, pointer), AlongDiagonals(b, lane)
        found, after = [], [F32(0.0)] * 2                       # beyond the last diagonal of blocks
        for first in range(BLOCKS - AT_ONCE, -BLOCKS - 1, -AT_ONCE):
            blocks = [*block_sums(first), *block_sums(first + 2), after]
            found.insert(0, along_diagonals(blocks))
            after = blocks[0]
        return pack(b, out, [found])

    return out(tile), generate


def check_halves(word, plan):
    is_box = isinstance(plan, Boxes) and not plan.transposed and name_of(plan.dtype) in HALF_FLOATS
    if not is_box or plan.shape != (SIZE, SIZE):
        raise TypingError(f"{word}: got {plan}, expected boxes of {SIZE}x{SIZE} float16 or bfloat16")


class Lane:
    """A lane, opaque to the optimiser: what follows from its number is found anew for each tile, or a loop over tiles
    would keep it in registers, of which helpers have few."""

    def __init__(self, b):
        self.b, self.thread = b, asm(b, "mov.u32 $0, $1;", I32, thread_index(b), effect=True)
        self.row, self.col = self.bits(2, 3), b.mul(self.bits(0, 2), I32(2))    # of its two elements of a block of sums
        self.line = self.bits(0, 3)                             # of a block that it says for ldmatrix where it is
        self.is_set = {bit: b.icmp_unsigned("!=", self.bits(bit, 1), I32(0)) for bit in (2, 3, 4)}

    def bits(self, shift, count):
        return bits_of(self.b, self.thread, shift, count)


def identity_of(b, lane, dtype):
    """A lane's two elements of the unit matrix."""
    row, col, one = lane.row, lane.col, ONES[name_of(dtype)]
    even = b.select(b.icmp_unsigned("==", row, col), I32(one), I32(0))
    return b.select(b.icmp_unsigned("==", row, b.add(col, I32(1))), I32(one << 16), even)


class BlockSums:
    """Sums of the blocks on diagonals of blocks; block (i, i + n) is on number n."""

    def __init__(self, b, lane, tile, pointer):
        self.b, self.kind, self.line = b, HALVES[tile.dtype], lane.line
        self.identity = identity_of(b, lane, tile.dtype)
        right, below = (lane.bits(bit, 1) for bit in (3, 4))      # of the four blocks that are loaded at once
        self.along = b.add(right, below)
        self.start = b.gep(pointer, [b.mul(b.add(b.mul(below, I32(BLOCK)), self.line), I32(SIZE))])

    def __call__(self, first):
        """Those of numbers `first` and first + 1, two registers each."""
        b, sums = self.b, [F32(0.0)] * 4
        for i in range(0, BLOCKS, 2):
            inside = [0 <= i + first + right + below < BLOCKS for below in (0, 1) for right in (0, 1)]
            if any(inside):
                blocks = ldmatrix(b, self.row_of_block(i + first), i * BLOCK * SIZE)
                left = [block if is_inside else I32(0) for block, is_inside in zip(blocks, inside)]
                sums = mma_sync(b, "m16n8k16", self.kind, sums, left, [self.identity] * 2)
        return sums[:2], sums[2:]

    def row_of_block(self, number):
        """Where a lane's row of a block starts; number: of the first block, counted in its row of blocks."""
        b = self.b
        chunk = b.xor(b.add(self.along, I32(number % PERIOD)), self.line)
        return b.gep(self.start, [b.mul(b.and_(chunk, I32(PERIOD - 1)), I32(BLOCK))])


class AlongDiagonals:
    """Sums along 32 diagonals, one for each lane, of the sums on five neighbouring diagonals of blocks."""

    def __init__(self, b, lane):
        self.b, self.lane = b, lane
        self.is_upper = [b.icmp_unsigned(">=", b.add(lane.col, I32(i)), lane.row) for i in (0, 1)]
        number, halves = lane.bits(0, 5), [b.lshr(b.add(lane.row, I32(i)), I32(1)) for i in (0, 1)]
        self.lanes = [b.or_(b.and_(number, I32(28)), b.and_(b.add(number, half), I32(3))) for half in halves]

    def __call__(self, blocks):
        values = [self.rotated(*two) for two in pairwise(blocks)]
        (found,) = of_column(self.b, self.lane, [[x] for pair in values for x in pair])
        return found

    def rotated(self, block, after):
        """What belongs to the eight diagonals that start in a block, with element (row, row + k) in column k."""
        pair = [self.b.select(*three) for three in zip(self.is_upper, block, after)]
        return moved(self.b, self.lane, pair, self.lanes)


def moved(b, lane, pair, lanes):
    """A lane's even and odd column of what two other lanes of its row hold in theirs: in odd rows those of each other.
    """
    pair = [b.select(lane.is_set[2], *two) for two in (pair[::-1], pair)]
    text = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
    return [asm(b, text, F32, *two, effect=True) for two in zip(pair, lanes)]


def of_column(b, lane, values):
    """The sums over the eight rows of one of eight lists of values: the row's number says which."""
    for bit in (4, 3, 2):
        half = len(values) // 2
        values = [[exchanged(b, lane, bit, *two) for two in zip(*both)] for both in zip(values, values[half:])]
    (found,) = values
    return found


def exchanged(b, lane, bit, lower, upper):
    """The sum over two lanes of one of two values, the upper one where this bit of the lane is set."""
    kept, given = b.select(lane.is_set[bit], upper, lower), b.select(lane.is_set[bit], lower, upper)
    return b.fadd(kept, shuffle_xor(b, given, 1 << bit))
