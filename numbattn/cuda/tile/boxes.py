"""Tiles in shared memory as the tensor memory accelerator (TMA) writes them and wgmma reads them.

A tile is cut into boxes of 128-byte rows, one box after the other. Within 8 rows the 16-byte chunks of a row are
swizzled: chunk c of row r is in the place of chunk c ^ (r % 8), so that ldmatrix and cp.async have no bank conflicts
either. Padded rows do not start at multiples of 128 bytes: for them cp.async asks the L2 cache for half as much again
(H200), which makes a loop that loads a tile in each iteration a tenth slower.
"""

from dataclasses import dataclass, replace

import numpy as np

from .alignment import VECTOR_BYTES
from .conversion import halves_of, left_pairs
from .emit import I32, VOID, Index, asm, base, thread_index
from .fragment import LLVM, constant, element_type

ROW_BYTES, CHUNK_BYTES, PERIOD = 128, VECTOR_BYTES, 8  # of a box; rows after which the swizzle repeats
ALIGNMENT = ROW_BYTES * PERIOD


@dataclass(frozen=True)
class Place:
    """The place in a block's shared memory of a tile, or of several, one after the other: stages."""

    rows: int
    cols: int
    dtype: np.dtype
    offset: int  # in bytes
    stages: int = 1
    transposed: bool = False

    kind = ""  # its name in messages

    def __str__(self):
        return f"{self.dtype} {self.kind}{self.rows}x{self.cols}{'.T' * self.transposed} at {self.offset}"

    @property
    def shape(self):
        return (self.cols, self.rows) if self.transposed else (self.rows, self.cols)

    @property
    def size(self):
        """Bytes of all elements, without padding."""
        return self.rows * self.cols * self.dtype.itemsize

    @property
    def stride(self):
        """Bytes from one stage to the next."""
        return self.nbytes

    @property
    def end(self):
        """Bytes of shared memory up to the end of the last stage."""
        return self.offset + self.stages * self.stride

    @property
    def vector(self):
        """Number of elements in 16 bytes."""
        return VECTOR_BYTES // self.dtype.itemsize

    @property
    def factor(self):
        """The dtype in which products use the elements."""
        return self.dtype

    @property
    def is_widened(self):
        """Whether that is another one."""
        return self.factor != self.dtype


@constant
@dataclass(frozen=True)
class Boxes(Place):
    """The place of a tile of boxes; each stage has room for a tile of `room` columns."""

    room: int = 0
    within: bool = False  # whether it is a part of a box, which only products read
    above: int = 0  # rows of whole boxes, if it has some of their rows, else 0

    kind = "boxes "

    def of_columns(self, cols):
        """The place of tiles with this number of columns that may be stored here instead."""
        return replace(self, cols=cols, room=max(self.cols, self.room))

    def of_stages(self, stages):
        """The place with this number of stages, of several tiles each: only for counting the stages that are filled."""
        return replace(self, stages=stages)

    def part(self, first, cols):
        """The place of `cols` columns of each stage from column `first` on, a multiple of a box's width."""
        offset = self.offset + first // self.width * self.box_bytes
        return replace(self, cols=cols, offset=offset, room=max(self.cols, self.room))

    def parts(self, cols):
        """The tile's parts of `cols` columns: part p of stage s is stage s * (parts of a stage) + p."""
        return replace(self, cols=cols, stages=self.stages * (self.cols // cols), room=0)

    def some_rows(self, first, rows):
        """The place of `rows` rows of each stage from row `first` on, multiples of the swizzle's period."""
        return replace(self, rows=rows, offset=self.offset + first * ROW_BYTES, above=self.above or self.rows)

    @property
    def stride(self):
        return -(-max(self.cols, self.room) // self.width) * self.box_bytes

    @property
    def width(self):
        """Number of columns of a box."""
        return ROW_BYTES // self.dtype.itemsize

    @property
    def box_rows(self):
        return self.above or self.rows

    @property
    def box_bytes(self):
        return self.box_rows * ROW_BYTES

    @property
    def box(self):
        """Shape of a box of a tensor map of (batch, heads, rows, columns)."""
        return 1, 1, self.rows, self.width

    @property
    def nbytes(self):
        """Bytes of one stage."""
        return -(-self.cols // self.width) * self.box_bytes

    @property
    def loaded(self):
        """Bytes that TMA loads."""
        return self.nbytes // self.box_rows * self.rows

    def place(self, row, col):
        """Elements in memory from the first one to the one at (row, col). Operators only, see Axis.base."""
        chunk_bits = (PERIOD - 1) * self.vector
        box = (col >> self.width.bit_length() - 1) * (self.box_rows * self.width)
        return box + row * self.width + ((col & self.width - 1) ^ (row * self.vector & chunk_bits))

    def across(self, place, cols):
        """The place `cols` columns on from one whose column has none of the bits of `cols`."""
        box, within = divmod(cols, self.width)
        return (place ^ within) + box * (self.box_rows * self.width)


def fits_pages(rows, page_size):
    """Whether `tma_load_pages` can load tiles of this number of rows."""
    return page_size % PERIOD == 0 and (rows % page_size == 0 or page_size % rows == 0)


# ---------------------------------------------------------------------------------------------------------- LLVM
def box_runs(b, plan, layout):
    row0, col0 = Index(b, base(b, layout.rows)), Index(b, base(b, layout.cols))
    for r, down in enumerate(layout.rows.offsets):
        for run in layout.cols.runs(plan.vector):
            yield (r,), run, plan.place(row0 + down, col0 + layout.cols.offsets[run[0]]).value


def box_places(b, plan, layout, pointer):
    """As `shared_memory.shared_places`: rows that are a period apart, and boxes, are one addition away."""
    row0, col0, starts = Index(b, base(b, layout.rows)), Index(b, base(b, layout.cols)), {}

    def found(down, across):
        turn = down % PERIOD, across % plan.width
        if turn not in starts:
            starts[turn] = b.gep(pointer, [plan.place(row0 + turn[0], col0 + turn[1]).value])
        return starts[turn], (across // plan.width * plan.box_rows + down - turn[0]) * plan.width

    return found


def put_matrices(b, plan, layout, pointer, rows):
    """Put a warpgroup's sums into boxes: by 16x16, four 8x8 matrices at a time, each lane with a row of one. All places
    follow from the first one, so that a loop keeps one address in registers."""
    lane = Index(b, b.and_(thread_index(b), I32(31)))
    first = Index(b, base(b, replace(layout.rows, fields=layout.rows.fields[1:])))  # of the warp
    row, right = first + (lane & 7) + (lane & 8), (lane >> 4) * 8
    start = plan.place(row, right)
    for c in range(0, layout.cols.slots, 4):
        pairs = left_pairs(b, element_type(plan.dtype), [row[c : c + 4] for row in rows])
        place = plan.across(start, layout.cols.offsets[c])
        at = b.ptrtoint(b.gep(pointer, [place.value]), I32)
        text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
        asm(b, text, VOID, at, *pairs, effect=True)


def get_matrices(b, plan, layout, pointer):
    """Get a warpgroup's share of boxes of 2-byte elements, as stored or transposed: by 16x16, four matrices of 8x8 at
    a time, each lane with a row in memory of one of them."""
    lane = Index(b, b.and_(thread_index(b), I32(31)))
    first = Index(b, base(b, replace(layout.rows, fields=layout.rows.fields[1:])))  # of the warp
    dtype, form = LLVM[element_type(plan.dtype)], ".trans" if plan.transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{form}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    tile = [[], []]
    for c in range(0, layout.cols.slots, 4):
        left = layout.cols.offsets[c]
        if plan.transposed:
            place = plan.place((lane & 7) + (lane >> 4) * 8 + left, first + (lane & 8))
        else:
            place = plan.place(first + (lane & 7) + (lane & 8), (lane >> 4) * 8 + left)
        found = asm(b, text, [I32] * 4, b.ptrtoint(b.gep(pointer, [place.value]), I32), effect=True)
        for matrix, pair in enumerate(found):
            tile[matrix % 2] += [half if half.type == dtype else b.bitcast(half, dtype) for half in halves_of(b, pair)]
    return tile
