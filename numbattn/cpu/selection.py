"""Selection of a tile's elements by bits, a vector of queries at a time.

In a mask without structure, every other branch for an element would be mispredicted.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..functions.compiled.linked import linked
from .product import Elements, Vectors, clamped
from .target import VECTOR_BYTES

BYTE = ir.IntType(8)


def vector_selection(masked):
    """The intrinsic (S, cells, bits, key, query, row, col): S[key, query + n] = -inf where cells[row + n, col] has none
    of the bits, for the queries of a vector. masked: it may go beyond the last query. Rows of S are contiguous."""

    @intrinsic
    def vector(typingctx, S, cells, bits, key, query, row, col):
        def generate(context, builder, signature, args):
            mS, mCells = (Elements(context, builder, kind, x, contiguous)
                          for kind, x, contiguous in zip(signature.args, args[:2], (True, False)))  # fmt: skip
            bits, key, query, row, col = args[2:]
            unit = Vectors(builder, S.dtype, builder.sub(mS.shape[1], query) if masked else None)
            found = ir.Constant(ir.VectorType(BYTE, unit.width), ir.Undefined)
            for n, r in enumerate(clamped(builder, row, unit.width, mCells.shape[0])):
                found = builder.insert_element(found, builder.load(mCells.element(r, col)), ir.IntType(32)(n))
            shown = builder.icmp_unsigned("!=", builder.and_(found, unit.splat(bits)), found.type([0] * unit.width))
            hidden = ir.Constant(unit.type, [float("-inf")] * unit.width)
            place = mS.element(key, query)
            unit.store(builder.select(shown, unit.load(place), hidden), place)
            return context.get_dummy_value()

        return types.void(S, cells, types.uint8, *[types.intp] * 4), generate

    return vector


whole, edge = vector_selection(masked=False), vector_selection(masked=True)


@linked
def select(S, cells, cols, packed, m0, n0):
    """S = -inf where a cell, of one query and `cols` keys, is not set; packed: where its bit of the key is not.

    S starts at query m0 and key n0.
    """
    width = VECTOR_BYTES // S.itemsize
    for i in range(0, S.shape[1], width):
        for j in range(S.shape[0]):
            col, bit = (n0 + j) // cols, (n0 + j) % cols
            bits = 1 << bit if packed else 255
            if i + width <= S.shape[1]:
                whole(S, cells, bits, j, i, m0 + i, col)
            else:
                edge(S, cells, bits, j, i, m0 + i, col)
