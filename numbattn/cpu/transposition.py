"""Transposition of tiles, by squares of as many rows as a vector has elements."""

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..functions.compiled.linked import linked
from .product import LONG, Elements, Vectors, clamped
from .target import VECTOR_BYTES


def square_transposition(masked):
    """The intrinsic (out, x, factor, add, row, col): out = factor x^T, plus out if `add`, for the square of x at
    (row, col). masked: it may go beyond the last row or column. Rows of both are contiguous."""

    @intrinsic
    def square(typingctx, out, x, factor, add, row, col):
        def generate(context, builder, signature, args):
            mOut, mX = (Elements(context, builder, kind, given) for kind, given in zip(signature.args, args[:2]))
            factor, add, row, col = args[2:]
            height, width = mX.shape
            kind = "f" if isinstance(out.dtype, types.Float) else ""
            times, plus = getattr(builder, f"{kind}mul"), getattr(builder, f"{kind}add")
            unit, zero = Vectors(builder, out.dtype), LONG(0)
            cols, left = [builder.add(col, LONG(n)) for n in range(unit.width)], builder.sub(height, row)
            reader = Vectors(builder, x.dtype, builder.sub(width, col) if masked else None, unit.width)
            writers = [Vectors(builder, out.dtype, builder.select(builder.icmp_signed("<", c, width), left, zero))
                       if masked else unit for c in cols]  # fmt: skip
            lines = [reader.load(mX.element(r, col)) for r in clamped(builder, row, unit.width, height)]
            lines = [times(unit.rounded(line), unit.splat(factor)) for line in transposed(unit, lines)]
            lines = [cgutils.alloca_once_value(builder, line) for line in lines]
            places = [mOut.element(c, row) for c in cols]
            with builder.if_then(add):
                for line, place, writer in zip(lines, places, writers):
                    builder.store(plus(writer.load(place), builder.load(line)), line)
            for line, place, writer in zip(lines, places, writers):
                writer.store(builder.load(line), place)
            return context.get_dummy_value()

        return types.void(out, x, out.dtype, types.boolean, types.intp, types.intp), generate

    return square


def transposed(unit, lines):
    """The columns of the square whose rows these vectors are: squares of 2, 4, ... swap their corners."""
    size = 1
    while size < unit.width:
        first = [n + unit.width - size if n & size else n for n in range(unit.width)]
        second = [n + unit.width if n & size else n + size for n in range(unit.width)]
        pairs = {n: (lines[n & ~size], lines[n | size]) for n in range(unit.width)}
        lines = [unit.pick(*pair, second if n & size else first) for n, pair in pairs.items()]
        size *= 2
    return lines


whole, edge = square_transposition(masked=False), square_transposition(masked=True)


@linked
def transpose(out, x, factor, add):
    """out = factor x^T, plus out if `add`"""
    rows, cols = x.shape
    width = VECTOR_BYTES // out.itemsize
    for row in range(0, rows, width):
        for col in range(0, cols, width):
            if row + width <= rows and col + width <= cols:
                whole(out, x, factor, add, row, col)
            else:
                edge(out, x, factor, add, row, col)
