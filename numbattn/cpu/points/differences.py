"""Sums of weighted differences, computed like products of tiles, in blocks whose sums stay in registers."""

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...functions.compiled.linked import linked
from ..product import LONG, Elements, Vectors, clamped
from ..target import VECTOR_BYTES

ROWS, VECTORS = 4, 2  # of a block


def block_differences(vectors, masked):
    """The intrinsic (out, x, y, weights, row, col): out[f, i] += sum_j weights[j, i] (x[f, i] - y[j, f]), for the block
    at (row, col). masked: columns may end within a vector. Rows beyond the last one are clamped to it."""

    @intrinsic
    def block(typingctx, out, x, y, weights, row, col):
        def generate(context, builder, signature, args):
            given = zip(signature.args, args[:4])
            mOut, mX, mY, mW = (Elements(context, builder, kind, array) for kind, array in given)
            (row, col), (height, width), (depth, _) = args[4:], mOut.shape, mW.shape
            unit = Vectors(builder, out.dtype, builder.sub(width, col) if masked else None)
            rows = clamped(builder, row, ROWS, height)
            cols = [builder.add(col, LONG(v * unit.width)) for v in range(vectors)]
            places = [(r, c) for r in rows for c in cols]
            sums = {place: cgutils.alloca_once_value(builder, unit.zero) for place in places}
            points = {place: unit.load(mX.element(*place)) for place in places}
            with cgutils.for_range(builder, depth) as loop:
                others = {r: unit.splat(builder.load(mY.element(loop.index, r))) for r in rows}
                factors = {c: unit.load(mW.element(loop.index, c)) for c in cols}
                for (r, c), total in sums.items():
                    difference = builder.fsub(points[r, c], others[r])
                    builder.store(unit.multiply_add(factors[c], difference, builder.load(total)), total)
            before = {place: unit.load(mOut.element(*place)) for place in places}  # first, since rows may be clamped
            for place, total in sums.items():
                unit.store(builder.fadd(before[place], builder.load(total)), mOut.element(*place))
            return context.get_dummy_value()

        return types.void(out, x, y, weights, types.intp, types.intp), generate

    return block


whole, edge = block_differences(VECTORS, masked=False), block_differences(1, masked=True)


@linked
def add_differences(out, x, y, weights):
    """out[f, i] += sum_j weights[j, i] (x[f, i] - y[j, f])"""
    rows, cols = out.shape
    width = VECTOR_BYTES // out.itemsize
    ahead = cols // (VECTORS * width) * (VECTORS * width)
    for row in range(0, rows, ROWS):
        for col in range(0, ahead, VECTORS * width):
            whole(out, x, y, weights, row, col)
        for col in range(ahead, cols, width):
            edge(out, x, y, weights, row, col)
