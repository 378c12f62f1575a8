"""Operations on tiles, except products and exponentials: memory, visibility, dropout.

S, P, dP and dS are transposed: a row is a key, a column a query. m, l and lse are then vectors along the tile's
contiguous axis, and every loop over a tile is vectorised.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable
from numba.np.arrayobj import populate_array

from .. import dropout
from ..functions.compiled.exponentials import bits_of, float_of
from ..functions.compiled.linked import LINKED, linked
from .selection import select
from .target import FEATURES

# inlined, or small tiles would mostly spend time on copies of arguments
OPTIONS = {**LINKED, "forceinline": True, "fastmath": {"contract"}, "error_model": "numpy"}
inline = register_jitable(**OPTIONS)
inline_in_place = register_jitable(**OPTIONS, inline="always")  # for all arguments of a call, which take 0.1 us to pass
inline_view = register_jitable(**OPTIONS, _nrt=True)  # returns a view, which Numba refuses without reference counts
for function in dropout.wide_product, dropout.philox_round:
    linked(function)
philox4x32 = linked(dropout.philox4x32)
EMPTY, PARTIAL, FULL = 0, 1, 2
OF_SUMS, FLOAT16, BFLOAT16, INT8, FLOAT8 = range(5)  # numbers of K and V: of the dtype of sums, or narrower
INT64 = ir.IntType(64)
LINE = 64  # bytes of the caches
WHOLE, FUNCTION, RECORD, QUERY, KEY, BATCH, HEAD = range(7, 14)  # numbers of a grid: see arguments.MaskArrays
HAS_FLOAT16 = "f16c" in FEATURES


# ------------------------------------------------------------------------------------------------------------- memory
def view_of(layout):
    @intrinsic
    def view(typingctx, address, rows, cols, stride, dtype):
        """The array at an address; its rows are contiguous and `stride` elements apart."""
        out, itemsize = types.Array(dtype.dtype, 2, layout), ir.Constant(INT64, dtype.dtype.bitwidth // 8)

        def generate(context, builder, signature, args):
            address, rows, cols, stride, _ = args
            return array_at(context, builder, out, address, (rows, cols), (builder.mul(stride, itemsize), itemsize))

        return out(types.intp, types.intp, types.intp, types.intp, dtype), generate

    return view


strided_view, contiguous_view = view_of("A"), view_of("C")  # loops over the columns of the latter are vectorised


@intrinsic
def any_view(typingctx, address, rows, cols, row_stride, col_stride, dtype):
    """The array at an address, of any strides, in bytes."""
    out = types.Array(dtype.dtype, 2, "A")

    def generate(context, builder, signature, args):
        address, rows, cols, row_stride, col_stride, _ = args
        return array_at(context, builder, out, address, (rows, cols), (row_stride, col_stride))

    return out(types.intp, types.intp, types.intp, types.intp, types.intp, dtype), generate


def array_at(context, builder, kind, address, shape, strides):
    """An array of a Numba type."""
    element = context.get_data_type(kind.dtype)
    array, pointer = context.make_array(kind)(context, builder), builder.inttoptr(address, element.as_pointer())
    itemsize = context.get_constant(types.intp, context.get_abi_sizeof(element))
    populate_array(array, pointer, shape, strides, itemsize, meminfo=None)
    return array._getvalue()


@intrinsic
def address_of(typingctx, array):
    def generate(context, builder, signature, args):
        return builder.ptrtoint(context.make_array(array)(context, builder, args[0]).data, INT64)

    return types.intp(array), generate


@inline_view
def matrix(x, batch, head, dtype):
    """The matrix of (batch, head) of an input; it has no rows where none is given."""
    return strided_view(x.address + x.offsets[batch, head] if x.rows else 0, x.rows, x.cols, x.stride, dtype)


@inline_view
def matrix_along(x, t, batch, head, dtype):
    """The matrix of (batch, head) of the tangent in direction t of an input, likewise."""
    return strided_view(x.address + x.offsets[t, batch, head] if x.rows else 0, x.rows, x.cols, x.stride, dtype)


@inline_view
def rows_of(x, batch, head, first, end, buffer, dtype):
    """Rows [first, end) of K or V of (batch, head): in place or, if they have another dtype or are in several pages,
    gathered in the buffer."""
    if x.kind == OF_SUMS and first // x.page_size == (end - 1) // x.page_size:
        address, stride = address_of_row(x, x.place, batch, head, first), x.place.row_stride // buffer.itemsize
        return strided_view(address, end - first, x.cols, stride, dtype)
    out, row = contiguous_view(address_of(buffer), end - first, x.cols, x.cols, dtype), first
    while row < end:
        page_end = min((row // x.page_size + 1) * x.page_size, end)
        address = address_of_row(x, x.place, batch, head, row)
        of_scale = address_of_row(x, x.scales, batch, head, row) if x.kind >= INT8 else address
        gather(out[row - first : page_end - first], x, address, of_scale)
        row = page_end
    return strided_view(address_of(buffer), end - first, x.cols, x.cols, dtype)


@inline
def address_of_row(x, place, batch, head, row):
    """The address of a token, or of its scale."""
    page = x.table[batch, row // x.page_size] * place.page_stride
    return place.address + place.offsets[batch, head] + page + row % x.page_size * place.row_stride


@inline
def gather(out, x, address, of_scale):
    """Gather the rows from `address` on, widened; those of 8 bits times their scales, which start at `of_scale`."""
    cols, real = x.cols, out.dtype.type
    for row in range(out.shape[0]):
        wide = out[row]
        if x.kind < INT8:
            widen(wide, address, x.kind)
        else:
            scale = real(contiguous_view(of_scale, 1, 1, 1, np.float32)[0, 0])
            if x.kind == INT8:
                numbers = contiguous_view(address, 1, cols, cols, np.int8)[0]
                for col in range(cols):
                    wide[col] = scale * real(numbers[col])
            else:
                bits = contiguous_view(address, 1, cols, cols, np.uint8)[0]
                for col in range(cols):
                    wide[col] = scale * real(float_of_float8(bits[col]))
        address, of_scale = address + x.place.row_stride, of_scale + x.scales.row_stride


@inline_view
def tile(buffer, rows, cols):
    """A contiguous tile in a buffer."""
    return contiguous_view(address_of(buffer), rows, cols, cols, buffer.dtype)


@intrinsic
def fetch_line(typingctx, address):
    """Prefetch the cache line of an address; an invalid one does no harm."""

    def generate(context, builder, signature, args):
        pointer, int32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, int32, int32, int32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(args[0], pointer), int32(0), int32(3), int32(1)])
        return context.get_dummy_value()

    return types.void(types.intp), generate


@inline
def prefetch(x):
    """Prefetch the rows of a matrix, which are contiguous."""
    for row in range(x.shape[0]):
        address = address_of(x) + row * x.strides[0]
        for at in range(0, x.shape[1] * x.itemsize, LINE):
            fetch_line(address + at)


@intrinsic
def is_set(typingctx, flag):
    """Whether flag[0], which another thread may set at any time, is not 0."""

    def generate(context, builder, signature, args):
        place = context.make_array(flag)(context, builder, args[0]).data
        value = builder.load_atomic(place, "monotonic", align=flag.dtype.bitwidth // 8)
        return builder.icmp_unsigned("!=", value, value.type(0))

    return types.boolean(flag), generate


@intrinsic
def add_one(typingctx, counters, index):
    """Atomically add 1 to counters[index], and return the result: each thread gets another number."""

    def generate(context, builder, signature, args):
        place = builder.gep(context.make_array(counters)(context, builder, args[0]).data, [args[1]])
        one = ir.Constant(INT64, 1)
        return builder.add(builder.atomic_rmw("add", place, one, "acq_rel"), one)

    return types.int64(counters, types.intp), generate


@intrinsic
def call_at(typingctx, address, arguments):
    """Call the cfunc at an address, of integers."""

    def generate(context, builder, signature, args):
        words = [context.cast(builder, word, kind, types.int64)
                 for word, kind in zip(cgutils.unpack_tuple(builder, args[1]), arguments)]  # fmt: skip
        kind = ir.FunctionType(ir.VoidType(), [INT64] * len(words))
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), words)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), generate


@inline
def fill(x, value):
    """x = value, for a vector."""
    for i in range(x.size):
        x[i] = value


@inline
def min_of(x):
    least = x[0]
    for i in range(1, x.size):
        least = min(least, x[i])
    return least


@inline
def max_of(x):
    most = x[0]
    for i in range(1, x.size):
        most = max(most, x[i])
    return most


@inline
def clear(x):
    """x = 0, for a matrix."""
    for row in range(x.shape[0]):
        fill(x[row], 0)


@inline
def scaled(out, x, factor):
    """out = factor x"""
    for row in range(x.shape[0]):
        for col in range(x.shape[1]):
            out[row, col] = factor * x[row, col]


# ---------------------------------------------------------------------------------------------------------- 8, 16 bits
@inline
def float_of_bfloat16(bits):
    """The float32 of a bfloat16 in a uint16."""
    return float_of(np.int32(np.int32(bits) << np.int32(16)))


@inline
def float_of_float16(bits):
    """The float32 of a float16 in a uint16."""
    return converted_float16(bits) if HAS_FLOAT16 else shifted_float16(bits)


@intrinsic
def converted_float16(typingctx, bits):
    """The float32 of a float16, by the CPU's instruction."""

    def generate(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@inline
def shifted_float16(bits):
    """The float32 of a float16, by its bits: its exponent is less by 112; in inf and NaN all bits of it are set."""
    bits = np.int32(bits)
    magnitude = np.int32((bits & np.int32(0x7FFF)) << np.int32(13))
    is_finite = bits & np.int32(0x7C00) != np.int32(0x7C00)
    x = float_of(np.int32(magnitude | np.int32(0 if is_finite else 0x7F800000))) * np.float32(2.0**112)
    return -x if bits & np.int32(0x8000) else x


@inline
def float_of_float8(bits):
    """The float32 of a float8_e4m3fn in a uint8: its exponent is less by 120; it has NaN and no infinity."""
    bits = np.int32(bits)
    magnitude = np.int32(bits & np.int32(0x7F))
    normal = float_of(np.int32((magnitude << np.int32(20)) + np.int32(120 << 23)))
    x = normal if magnitude >= np.int32(8) else np.float32(magnitude) * np.float32(2.0**-9)
    x = x if magnitude != np.int32(0x7F) else np.float32(np.nan)
    return -x if bits & np.int32(0x80) else x


@inline
def widen(out, address, kind):
    """out = the numbers from an address on, of one of the first three kinds."""
    if kind == OF_SUMS:
        numbers = contiguous_view(address, 1, out.size, out.size, out.dtype)[0]
        for i in range(out.size):
            out[i] = numbers[i]
    else:
        bits = contiguous_view(address, 1, out.size, out.size, np.uint16)[0]
        if kind == FLOAT16:
            for i in range(out.size):
                out[i] = float_of_float16(bits[i])
        else:
            for i in range(out.size):
                out[i] = float_of_bfloat16(bits[i])


@inline
def narrow(address, x, kind):
    """The numbers from an address on = x, rounded to the nearest; float16 is for CPUs that have it."""
    if kind == OF_SUMS:
        numbers = contiguous_view(address, 1, x.size, x.size, x.dtype)[0]
        for i in range(x.size):
            numbers[i] = x[i]
    else:
        bits = contiguous_view(address, 1, x.size, x.size, np.uint16)[0]
        if kind == FLOAT16:
            for i in range(x.size):
                bits[i] = float16_of(np.float32(x[i]))
        else:
            for i in range(x.size):
                bits[i] = bfloat16_of(np.float32(x[i]))


@intrinsic
def float16_of(typingctx, x):
    """The float16 in a uint16 nearest to a float32, by the CPU's instruction."""

    def generate(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@inline
def bfloat16_of(x):
    """The bfloat16 in a uint16 nearest to a float32, the even one of two."""
    bits = np.uint32(bits_of(x))
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))  # which would make a number of a NaN
    return np.uint16((rounded if x == x else bits | np.uint32(0x400000)) >> np.uint32(16))


# --------------------------------------------------------------------------------------------------------- visibility
@inline
def band_of(mask, batch, head):
    """lo, hi, queries and keys of the band of (batch, head)."""
    if mask.bands.size == 0:
        return mask.band
    lo, hi, queries, keys = mask.bands[batch, head]
    return lo, hi, queries, keys


@inline_view
def intervals_of(mask, batch, head):
    """First and end of the keys that each query of (batch, head) sees, (2, seqlen_q), and those of each gap; or an
    empty array."""
    x = mask.intervals
    return contiguous_view(x.address + x.offsets[batch, head] if x.rows else 0, x.rows, x.cols, x.cols, np.int64)


@inline
def visible_keys(band, intervals, m0, m_end, first, end):
    """The keys visible to queries [m0, m_end): those of [first, end) that the band and the intervals show.

    If there are none, end <= first.
    """
    lo, hi, queries, keys = band
    m_end = min(m_end, queries)
    if m0 >= m_end:
        return first, first
    first, end = max(m0 + lo, first), min(m_end + hi, keys, end)
    if intervals.size:
        first = max(first, min_of(intervals[0, m0:m_end]))
        end = min(end, max_of(intervals[1, m0:m_end]))
    return first, end


@inline
def keys_seen(mask, batch, head, m0, m_end, first, end):
    """Band and intervals of (batch, head), and the keys of [first, end) that are visible to queries [m0, m_end)."""
    band, intervals = band_of(mask, batch, head), intervals_of(mask, batch, head)
    first, end = visible_keys(band, intervals, m0, m_end, first, end)
    return band, intervals, first, end


@inline_in_place
def hide(S, mask, at, n0, state):
    """S = -inf where it is hidden from the queries of a tile, `at`; S starts at key n0."""
    mask_band(S, at.band, at.m0, n0)
    mask_intervals(S, at.intervals, at.m0, n0)
    if state == PARTIAL:
        mask_cells(S, mask, at.batch, at.head, at.m0, n0)


@inline
def mask_band(S, band, m0, n0):
    """S = -inf outside of the band; S starts at query m0 and key n0."""
    lo, hi, queries, keys = band
    rows, cols = S.shape
    if m0 + cols - 1 + lo <= n0 and n0 + rows - 1 <= m0 + hi and m0 + cols <= queries and n0 + rows <= keys:
        return
    for j in range(rows):
        first = min(max(n0 + j - hi - m0, 0), cols)
        end = max(min(n0 + j - lo + 1 - m0, queries - m0, cols), first) if n0 + j < keys else first
        fill(S[j, :first], -np.inf)
        fill(S[j, end:], -np.inf)


@inline
def mask_intervals(S, intervals, m0, n0):
    """S = -inf outside of each query's interval."""
    rows, cols = S.shape
    if intervals.size == 0:
        return
    first, end = intervals[0, m0 : m0 + cols], intervals[1, m0 : m0 + cols]
    if max_of(first) > n0 or n0 + rows > min_of(end):
        for j in range(rows):
            for i in range(cols):
                S[j, i] = S[j, i] if first[i] <= n0 + j < end[i] else S.dtype.type(-np.inf)
    for g in range(2, intervals.shape[0], 2):
        first, end = intervals[g, m0 : m0 + cols], intervals[g + 1, m0 : m0 + cols]
        for j in range(max(min_of(first) - n0, 0), min(max_of(end) - n0, rows)):
            for i in range(cols):
                S[j, i] = S.dtype.type(-np.inf) if first[i] <= n0 + j < end[i] else S[j, i]


@inline
def is_in_a_gap(intervals, m0, m_end, n0, n_end):
    """Whether all keys [n0, n_end) are in a gap of the intervals of queries [m0, m_end)."""
    for g in range(2, intervals.shape[0], 2):
        some = 0
        for i in range(m0, m_end):
            first, end = max(intervals[0, i], n0), min(intervals[1, i], n_end)
            some += first < end and (first < intervals[g, i] or intervals[g + 1, i] < end)
        if some == 0:
            return True
    return False


@inline
def tile_state(mask, intervals, batch, head, m0, m_end, n0, n_end):
    """Whether the tile of queries [m0, m_end) and keys [n0, n_end) is EMPTY, by grids or gaps, PARTIAL or FULL, by all
    grids."""
    if is_in_a_gap(intervals, m0, m_end, n0, n_end):
        return EMPTY
    state = FULL
    for g in range(mask.grids.shape[0]):
        height, width, row_stride, col_stride, rows, cols, packed = mask.grids[g, :7]
        cells = any_view(mask.cells[g, batch, head], height, width, row_stride, col_stride, np.uint8)
        whole, some, every, total = mask.grids[g, WHOLE], 0, 0, 0
        for r in range(m0 // rows, (m_end + rows - 1) // rows):
            for c in range(n0 // cols, (n_end + cols - 1) // cols):
                some += cells[r, c] != 0
                every += cells[r, c] == whole if whole else cells[r, c] != 0
                total += 1
            if some > 0 and every < total:
                break                                                       # PARTIAL, whatever follows
        if some == 0:
            return EMPTY
        if every < total:
            state = PARTIAL
    return state


@inline
def mask_cells(S, mask, batch, head, m0, n0):
    """S = -inf where a cell is not set."""
    for g in range(mask.grids.shape[0]):
        height, width, row_stride, col_stride, rows, cols, packed = mask.grids[g, :7]
        if mask.grids[g, FUNCTION]:
            record, query, key = mask.grids[g, RECORD], mask.grids[g, QUERY] + m0, mask.grids[g, KEY] + n0
            matrix = mask.grids[g, BATCH] + batch, mask.grids[g, HEAD] + head
            given = address_of(S), S.shape[0], S.shape[1], *matrix, query, key, record
            call_at(mask.grids[g, FUNCTION], given)
            continue
        cells = any_view(mask.cells[g, batch, head], height, width, row_stride, col_stride, np.uint8)
        if rows == 1 and S.shape[1] > 1:
            select(S, cells, cols, packed, m0, n0)
            continue
        for j in range(S.shape[0]):
            c, bit = (n0 + j) // cols, (n0 + j) % cols * packed
            first, r = 0, m0 // rows
            while first < S.shape[1]:
                end = min((r + 1) * rows - m0, S.shape[1])
                if (cells[r, c] >> bit & 1 if packed else cells[r, c]) == 0:
                    fill(S[j, first:end], -np.inf)
                first, r = end, r + 1


# ------------------------------------------------------------------------------------------------------------ dropout
@inline
def draw(kept, words, drops, batch, head, m0, n0):
    """kept = 1 or 0, see dropout_mask, for a tile that starts at query m0 and key n0.

    16 x 16 elements are drawn at once. words: uint64, two for each query of all squares that the tile touches.
    """
    rows, cols = kept.shape
    at = drops.origin
    matrix, m0, n0 = (at.batch + batch) * at.heads + at.head + head, at.query + m0, at.key + n0
    before = m0 % 16                                                        # queries in the first squares
    counters = 8 * ((before + cols + 15) // 16)
    words = tile(words, 4, counters)
    first = np.uint64(m0 // 16 * 8)
    for c in range(n0 // 16 * 4, (n0 + rows + 15) // 16 * 4):
        for t in range(counters):
            words[0, t], words[1, t], words[2, t], words[3, t] = philox4x32(
                np.uint64(c), first + np.uint64(t), np.uint64(matrix), drops.offset, drops.key_low, drops.key_high
            )
        for number in range(8):
            j = 16 * (c // 4) + 2 * (c % 4) + 8 * (number // 2 % 2) + number % 2 - n0
            if not 0 <= j < rows:
                continue
            shift = np.uint64(16 * (number % 2))
            for block in range(counters // 8):
                start = 16 * block + 8 * (number // 4) - before
                for r in range(8):
                    i = np.uint64(start + r)                                # unsigned: below 0 is large
                    if i < np.uint64(cols):
                        drawn = (words[number // 2, 8 * block + r] >> shift) & np.uint64(0xFFFF)
                        kept[j, i] = drawn >= drops.threshold
