"""Places in the memory that the threads of a block share, handed out before a kernel is made."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .alignment import VECTOR_BYTES
from .boxes import ALIGNMENT as BOX_ALIGNMENT
from .boxes import Boxes, Place
from .fragment import ANY, BYTES, HALF_FLOATS, TRUTHS, check_dtype, constant


@constant
@dataclass(frozen=True)
class SharedTile(Place):
    """The place of a row-major tile.

    Rows are 16 bytes longer than they look, so a column of 16-byte vectors touches every bank.
    """

    widened: Any = None  # the dtype to which products widen elements
    whole: int = 0  # columns of the whole tile if this is a part of one, else 0

    def __str__(self):
        widened = f", widened to {self.widened}" if self.widened is not None else ""
        return super().__str__() + widened + f", of {self.whole} columns" * bool(self.whole)

    @property
    def factor(self):
        return self.dtype if self.widened is None else self.widened

    @property
    def pitch(self):
        cols = self.whole or self.cols
        return cols + self.vector if self.rows > 1 else cols

    @property
    def nbytes(self):
        """Bytes of one stage."""
        if not self.cols:
            return 0
        return -(-self.rows * self.pitch * self.dtype.itemsize // VECTOR_BYTES) * VECTOR_BYTES

    def place(self, row, col):
        """Elements in memory from the first one to the one at (row, col)."""
        return row * self.pitch + col

    def steps(self):
        """Distance in memory, in elements, from one row of the shape to the next, and from one column to the next."""
        return (1, self.pitch) if self.transposed else (self.pitch, 1)


class SharedMemory:
    """Hands out places in a kernel's shared memory, before the kernel is made.

    >>> shared = SharedMemory()
    >>> print(shared.tile(4, 8, np.float16), "and", shared.boxes(8, 64, np.float16), "of", shared.nbytes)
    float16 4x8 at 0 and float16 boxes 8x64 at 1024 of 2048
    """

    def __init__(self):
        self.nbytes = 0

    def tile(self, rows, cols, dtype, stages=1, at=None, widened=None):
        """The place of a tile, or of several, after all others or where the tile `at` is.

        widened: to what `dot` widens int8, or uint8, which is float8_e4m3fn: float16, bfloat16 or float32; or float16
        and bfloat16: float32.
        """
        check_dtype("tile", np.dtype(dtype), ANY - TRUTHS)
        if widened is not None:
            check_dtype("what a tile is widened to", widened := np.dtype(widened), HALF_FLOATS | {"float32"})
            check_dtype("widened tile", np.dtype(dtype), BYTES if widened.itemsize == 2 else BYTES | HALF_FLOATS)
        offset = self.nbytes if at is None else at.offset
        tile = SharedTile(rows, cols, np.dtype(dtype), offset, stages, widened=widened)
        self.nbytes = max(self.nbytes, tile.end)
        return tile

    def boxes(self, rows, cols, dtype, stages=1, room=0, at=None):
        """The place of a tile of boxes, or of several, after all others or where the boxes `at` are, each with room for
        `room` columns."""
        offset = self.reserve(0, BOX_ALIGNMENT) if at is None else at.offset
        plan = Boxes(rows, cols, np.dtype(dtype), offset, stages, room=room)
        self.nbytes = max(self.nbytes, plan.end)
        return plan

    def reserve(self, nbytes, align=VECTOR_BYTES):
        """The offset of new bytes after all others."""
        start = -(-self.nbytes // align) * align
        self.nbytes = start + nbytes
        return start
