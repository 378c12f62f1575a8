"""Pieces of a product by mma.sync: what one instruction adds to, and how the lanes of a warp load its operands."""

from .conversion import emit_pair
from .emit import F32, F64, I32, asm, size_of, thread_index, vector_of


class Pieces:
    """An accumulator as pieces of 16x8 that one instruction adds to: four registers (0, 1), (8, 9) rows apart.

    A piece is named by the slot of its first row and by its first column. With a layout by_fours it has every second
    column of 16.
    """

    def __init__(self, layout, registers):
        self.layout, self.registers = layout, registers
        self.row_slots = range(0, len(registers), 2)

    def get(self, r, col):
        pair = self.pair(col)
        return [*self.registers[r][pair], *self.registers[r + 1][pair]]

    def put(self, r, col, values):
        pair = self.pair(col)
        self.registers[r][pair], self.registers[r + 1][pair] = values[:2], values[2:]

    def pair(self, col):
        """The slots of a piece's two columns."""
        c, apart = self.layout.cols.offsets.index(col), 2 if self.layout.cols.run == 4 else 1
        return slice(c, c + apart + 1, apart)

    def left_operand(self, b, dtype, r, k):
        """Registers as a left operand of 16x16, whichever of the 16 columns from k on a lane holds: the sums of one
        product are the left operand of the next."""
        slot = k // 4
        fours = [row[slot : slot + 4] for row in self.registers[r : r + 2]]
        pairs = [four[i : i + 2] for i in (0, 2) for four in fours]
        return [emit_pair(b, dtype, pair) if pair[0].type == F32 else packed(b, pair) for pair in pairs]


def packed(b, pair):
    """Two 16-bit registers as one."""
    return b.bitcast(vector_of(b, pair), I32)


def warp_row(b, layout):
    """The first row of this thread's warp."""
    _, (shift, bits, rows) = layout.rows.fields
    return b.mul(bits_of_lane(b, shift, bits), I32(rows))


def warp_col(b, layout):
    """The first column of this thread's warp."""
    _, (shift, bits, cols) = layout.cols.fields
    return b.mul(bits_of_lane(b, shift, bits), I32(cols))


def bits_of_lane(b, shift, bits):
    return bits_of(b, thread_index(b), shift, bits)


def bits_of(b, number, shift, bits):
    return b.and_(b.lshr(number, I32(shift)), I32((1 << bits) - 1))


def ldmatrix(b, pointer, offset, transposed=False):
    """Load four 8x8 matrices of 16-bit elements, lanes 8i... giving the rows of matrix i: four registers of two
    elements.

    They are `offset` elements after the pointers: added here, or every sum would stay in a register across a loop.
    """
    form, nbytes = ".trans" if transposed else "", offset * size_of(pointer.type.pointee)
    text = f"ldmatrix.sync.aligned.m8n8.x4{form}.shared.b16 {{$0, $1, $2, $3}}, [$4+{nbytes}];"
    return asm(b, text, [I32] * 4, b.ptrtoint(pointer, I32), effect=True)


def matrix_lane(b, line, first, second):
    """Where a lane points to for ldmatrix: the lower three bits say which line of a matrix, the others which matrix.

    `line` is the step in memory from line to line, `first` that from matrix 0 to 1, `second` that from 0 to 2.
    """
    steps = zip(((0, 3), (3, 1), (4, 1)), (line, first, second))
    at = [b.mul(bits_of_lane(b, *bits), I32(step)) for bits, step in steps]
    return b.add(b.add(at[0], at[1]), at[2])


def mma_sync(b, shape, kind, d, a, c):
    """d + a @ c: 16x16 by 16x8 elements if `shape` is m16n8k16."""
    total = {F32: "f32", F64: "f64"}[d[0].type]
    names = iter(range(len(d) + len(a) + len(c) + len(d)))
    vectors = ("{" + ", ".join(f"${next(names)}" for _ in part) + "}" for part in (d, a, c, d))
    text = f"mma.sync.aligned.{shape}.row.col.{total}.{kind}.{kind}.{total} {', '.join(vectors)};"
    return asm(b, text, [x.type for x in d], *a, *c, *d)
