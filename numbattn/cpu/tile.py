"""What a tile can do: products through BLAS, exponentials, visibility, dropout.

Score tiles are transposed: keys down, queries across. What belongs to a query (its maximum, its sum, its lse) is then
a vector along the tile's contiguous axis, and every loop over a tile is a loop over vectors.
"""

import math

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic, overload, register_jitable

from .. import dropout

inline = register_jitable(fastmath={"contract"})
for function in dropout.wide_product, dropout.philox_round:
    register_jitable(function)
philox4x32 = register_jitable(dropout.philox4x32)
NONE, SOME, EVERY = 0, 1, 2


# ------------------------------------------------------------------------------------------------------------- memory
@intrinsic
def pointer(typingctx, address):
    """An address as a pointer."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@inline
def matrix(heads, b, h, dtype):
    """The matrix of (batch, head) as an array."""
    whole = carray(pointer(heads.at[b, h]), (heads.rows, heads.stride), dtype)
    return whole[:, : heads.cols]


@inline
def tile(buffer, rows, cols):
    """A contiguous tile in a buffer."""
    return buffer[: rows * cols].reshape(rows, cols)


# ----------------------------------------------------------------------------------------------------------- products
_gemm = types.ExternalFunction(  # Numba's door to the BLAS of scipy: column-major, like all BLAS
    "numba_xxgemm",
    types.intc(
        *[types.char] * 3, *[types.intp] * 3,
        types.voidptr, types.voidptr, types.intp, types.voidptr, types.intp, types.voidptr, types.voidptr, types.intp,
    ),
)
NORMAL, TRANSPOSED = ord("n"), ord("t")


@inline
def _row_stride(x):
    """In elements, as BLAS wants it where there is less than one row or column."""
    return max(x.strides[0] // x.itemsize, x.shape[1], 1)


@njit
def _product(out, a, a_form, b, b_form, inner, alpha, beta):
    size = out.itemsize
    factors = np.array([alpha, beta], out.dtype)
    _gemm(
        ord("s") if size == 4 else ord("d"), b_form, a_form,
        out.shape[1], out.shape[0], inner,
        factors.ctypes, b.ctypes, _row_stride(b), a.ctypes, _row_stride(a),
        factors[1:].ctypes, out.ctypes, _row_stride(out),
    )


@inline
def product(out, a, b, alpha, beta):
    """out = alpha a b + beta out."""
    _product(out, a, NORMAL, b, NORMAL, a.shape[1], alpha, beta)


@inline
def product_nt(out, a, b, alpha, beta):
    """out = alpha a b^T + beta out."""
    _product(out, a, NORMAL, b, TRANSPOSED, a.shape[1], alpha, beta)


@inline
def product_tn(out, a, b, alpha, beta):
    """out = alpha a^T b + beta out."""
    _product(out, a, TRANSPOSED, b, NORMAL, a.shape[0], alpha, beta)


# ------------------------------------------------------------------------------------------------------- exponentials
@intrinsic
def bits_of(typingctx, x):
    """The bits of a float as an integer."""
    out = types.int32 if x == types.float32 else types.int64
    return out(x), lambda context, builder, signature, args: builder.bitcast(args[0], ir.IntType(out.bitwidth))


@intrinsic
def float_of(typingctx, bits):
    """The float with these bits."""
    out = types.float32 if bits == types.int32 else types.float64
    to = ir.FloatType() if out == types.float32 else ir.DoubleType()
    return out(bits), lambda context, builder, signature, args: builder.bitcast(args[0], to)


def exp2(x):
    """2**x for x below 128, and 0 below the normal numbers; NaN stays NaN. Vectorised, unlike np.exp2 in Numba."""
    return np.exp2(x)


def _polynomial_exp2(dtype, integer, degree):
    """2**x = 2**n 2**f, n an integer, |f| <= 1/2: Taylor's polynomial for 2**f, n added to the exponent's bits."""
    mantissa = np.finfo(dtype).nmant
    ROUND, LOWEST, ZERO = dtype(1.5 * 2**mantissa), dtype(np.finfo(dtype).minexp), dtype(0)
    SHIFT = integer(mantissa)
    first, *rest = (dtype(math.log(2) ** k / math.factorial(k)) for k in range(degree, -1, -1))
    rest = tuple(rest)

    def exp2(x):
        shifted = x + ROUND  # n is in its last bits
        f = x - (shifted - ROUND)
        y = first
        for c in rest:
            y = y * f + c
        y = float_of(integer(bits_of(y) + (bits_of(shifted) << SHIFT)))
        return ZERO if x < LOWEST else y

    return exp2


_EXP2 = {
    types.float32: _polynomial_exp2(np.float32, np.int32, 7),
    types.float64: _polynomial_exp2(np.float64, np.int64, 13),
}


@overload(exp2, jit_options={"fastmath": {"contract"}})
def _exp2_overload(x):
    return _EXP2.get(x)


# --------------------------------------------------------------------------------------------------------- visibility
@inline
def keys_in_sight(band, i0, i1):
    """Keys [first, end): all that queries [i0, i1) see of a band lies there."""
    lo, hi, queries, keys = band
    i1 = min(i1, queries)
    if i0 >= i1:
        return 0, 0
    return max(i0 + lo, 0), min(i1 + hi, keys)


@inline
def queries_in_sight(band, j0, j1):
    """Queries [first, end): all that see keys [j0, j1) of a band lie there."""
    lo, hi, queries, keys = band
    j1 = min(j1, keys)
    if j0 >= j1:
        return 0, 0
    return max(j0 - hi, 0), min(j1 - lo, queries)


@inline
def hide_outside(S, band, i0, j0):
    """S = -inf outside of the band; S starts at query i0 and key j0."""
    lo, hi, queries, keys = band
    rows, cols = S.shape
    if i0 + cols - 1 + lo <= j0 and j0 + rows - 1 <= i0 + hi and i0 + cols <= queries and j0 + rows <= keys:
        return
    for j in range(rows):
        first = min(max(j0 + j - hi - i0, 0), cols)
        end = max(min(j0 + j - lo + 1 - i0, queries - i0, cols), first) if j0 + j < keys else first
        S[j, :first] = -np.inf
        S[j, end:] = -np.inf


@inline
def state(see, b, h, i0, i1, j0, j1):
    """Whether queries [i0, i1) see NONE, SOME or EVERY one of the keys [j0, j1), by the cells of all grids."""
    found = EVERY
    for g in range(len(see.grids)):
        height, stride, rows, cols, packed = see.grids[g]
        cells = carray(pointer(see.cells[g, b, h]), (height, stride), np.uint8)
        full = 255 if packed else 1
        some = every = total = 0
        for r in range(i0 // rows, (i1 + rows - 1) // rows):
            for c in range(j0 // cols, (j1 + cols - 1) // cols):
                some += cells[r, c] != 0
                every += cells[r, c] == full
                total += 1
        if some == 0:
            return NONE
        if every < total:
            found = SOME
    return found


@inline
def hide_cells(S, see, b, h, i0, j0):
    """S = -inf where a cell is not set."""
    for g in range(len(see.grids)):
        height, stride, rows, cols, packed = see.grids[g]
        cells = carray(pointer(see.cells[g, b, h]), (height, stride), np.uint8)
        row_of = (i0 + np.arange(S.shape[1])) // rows
        for j in range(S.shape[0]):
            c, bit = (j0 + j) // cols, (j0 + j) % cols * packed
            for i in range(S.shape[1]):
                if (cells[row_of[i], c] >> bit) & 1 == 0:
                    S[j, i] = -np.inf


# ------------------------------------------------------------------------------------------------------------ dropout
@inline
def draw(kept, drops, matrix, i0, j0):
    """kept = 1 or 0, see dropout_mask, for a tile that starts at query i0 and key j0, multiples of 16."""
    rows, cols = kept.shape
    counters = 8 * ((cols + 15) // 16)
    words = np.empty((4, counters), np.uint64)
    first = np.uint64(i0 // 2)
    for c in range(j0 // 4, j0 // 4 + 4 * ((rows + 15) // 16)):
        for t in range(counters):
            words[0, t], words[1, t], words[2, t], words[3, t] = philox4x32(
                np.uint64(c), first + np.uint64(t), np.uint64(matrix), drops.offset, drops.k0, drops.k1
            )
        for number in range(8):
            j = 16 * (c // 4) + 2 * (c % 4) + 8 * (number // 2 % 2) + number % 2 - j0
            if j >= rows:
                continue
            shift = np.uint64(16 * (number % 2))
            for block in range(counters // 8):
                start = 16 * block + 8 * (number // 4)
                for r in range(min(8, cols - start)):
                    drawn = (words[number // 2, 8 * block + r] >> shift) & np.uint64(0xFFFF)
                    kept[j, start + r] = drawn >= drops.threshold
