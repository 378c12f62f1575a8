"""Products of tiles on the CPU's vector units.

A BLAS is as fast, but it starts its own threads, and their number is a setting of the user's whole process. A product
is computed in blocks of ROWS rows and VECTORS vectors of columns, whose accumulators stay in registers: for each k one
element of every row of a is multiplied by the vectors of row k of b.
"""

from itertools import product as pairs_of

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..functions.compiled.linked import linked
from .target import FEATURES, VECTOR_BYTES

ROWS, VECTORS = (8, 2) if "avx512f" in FEATURES else (6, 2)  # the accumulators take most registers
FEW_ROWS, FEW_VECTORS = (4, 4) if "avx512f" in FEATURES else (2, 4)  # for products with few rows
ROW_VECTORS = 4 if "avx512f" in FEATURES else 8  # for those with one: 64 float32
FEW_DOTS = 4 if VECTOR_BYTES > 16 else 2  # rows
DOTS = 8  # rows of b at once: 4 take 1.4 times as long; 16 that are pages apart would not stay in the L1 cache
AHEAD = 16  # rows of b to prefetch: reading from memory takes 15 to 25 % less time, equally with 8 to 32
INT, LONG = ir.IntType(32), ir.IntType(64)
NUMBERS = {
    types.float32: (ir.FloatType(), 4, "f32"), types.float64: (ir.DoubleType(), 8, "f64"),
    types.uint16: (ir.IntType(16), 2, "i16"), types.uint32: (INT, 4, "i32"),  # bits of bfloat16, of one or two
}  # fmt: skip


class Vectors:
    """LLVM IR for vectors of a dtype; with `cols`, loads and stores are masked to the first `cols` elements."""

    def __init__(self, builder, dtype, cols=None, width=None):
        self.b, (self.element, self.itemsize, self.name) = builder, NUMBERS[dtype]
        self.width = width or VECTOR_BYTES // self.itemsize
        self.type, self.name = ir.VectorType(self.element, self.width), f"v{self.width}{self.name}"
        self.zero, self.align = ir.Constant(self.type, None), ir.Constant(INT, self.itemsize)
        self.mask = None
        if cols is not None:
            lanes = ir.Constant(ir.VectorType(LONG, self.width), list(range(self.width)))
            self.mask = builder.icmp_signed("<", lanes, self.splat(cols))

    def splat(self, x):
        """x in every element."""
        some = ir.Constant(ir.VectorType(x.type, self.width), ir.Undefined)
        first = self.b.insert_element(some, x, ir.Constant(INT, 0))
        return self.b.shuffle_vector(first, some, ir.Constant(ir.VectorType(INT, self.width), [0] * self.width))

    def call(self, name, result, *operands):
        function = ir.FunctionType(result, [x.type for x in operands])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, function, name), operands)

    def multiply_add(self, x, y, z):
        return self.call(f"llvm.fmuladd.{self.name}", self.type, x, y, z)

    def add_square(self, x, y, z):
        difference = self.b.fsub(x, y)
        return self.multiply_add(difference, difference, z)

    def add_pairs(self, x, y):
        """Sums of neighbours: of the elements of x, then of those of y."""
        return self.b.fadd(self.pick(x, y, range(0, 2 * self.width, 2)), self.pick(x, y, range(1, 2 * self.width, 2)))

    def add_up(self, totals):
        """The sums of vectors, of which there are as many as a vector has elements."""
        while len(totals) > 1:
            totals = [self.add_pairs(x, y) for x, y in zip(totals[::2], totals[1::2])]
        return totals[0]

    def pick(self, x, y, places):
        """The elements of x, and of y after them, at these places."""
        return self.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(INT, len(places)), list(places)))

    def load(self, place):
        place = self.b.bitcast(place, self.type.as_pointer())
        if self.mask is None:
            return self.b.load(place, align=self.itemsize)
        return self.call(f"llvm.masked.load.{self.name}.p0", self.type, place, self.align, self.mask, self.zero)

    def rounded(self, x):
        """A vector of another dtype, in this one; uint16 are bfloat16."""
        if x.type == self.type:
            return x
        if x.type.element == ir.IntType(16):
            words = ir.VectorType(INT, self.width)
            return self.b.bitcast(self.b.shl(self.b.zext(x, words), words([16] * self.width)), self.type)
        return (self.b.fpext if self.itemsize == 8 else self.b.fptrunc)(x, self.type)

    def prefetch(self, place):
        """Prefetch into the L1 cache; an invalid address does no harm."""
        place = self.b.bitcast(place, ir.IntType(8).as_pointer())
        self.call("llvm.prefetch.p0", ir.VoidType(), place, INT(0), INT(3), INT(1))

    def store(self, value, place):
        place = self.b.bitcast(place, self.type.as_pointer())
        if self.mask is None:
            self.b.store(value, place, align=self.itemsize)
        else:
            self.call(f"llvm.masked.store.{self.name}.p0", ir.VoidType(), value, place, self.align, self.mask)


class Elements:
    """LLVM IR for the elements of an array of two axes. contiguous: whether its rows are."""

    def __init__(self, context, builder, kind, value, contiguous=True):
        self.b, array = builder, context.make_array(kind)(context, builder, value)
        self.data = array.data
        self.shape, self.strides = (cgutils.unpack_tuple(builder, x) for x in (array.shape, array.strides))
        if contiguous:
            self.strides[1] = LONG(NUMBERS[kind.dtype][1])  # a constant, which takes no register

    def element(self, row, col):
        at = self.b.bitcast(self.data, ir.IntType(8).as_pointer())
        for index, stride in zip((row, col), self.strides):
            at = self.b.gep(at, [self.b.mul(index, stride)])
        return self.b.bitcast(at, self.data.type)


def block_product(transposed, block_rows, vectors, masked, add_term):
    """The intrinsic (out, a, b, alpha, add, row, col): out = alpha a b, plus out if `add`, for the block at (row, col).

    transposed: a is given as its transpose. masked: columns may end within a vector. Rows of b and out are contiguous.
    Rows beyond the last one are clamped to it: the same values are stored several times. add_term: the method of
    Vectors that adds the product of two elements to a sum, or what stands for it.
    """

    @intrinsic
    def block(typingctx, out, a, b, alpha, add, row, col):
        def generate(context, builder, signature, args):
            mOut, mA, mB = (Elements(context, builder, kind, x, contiguous)
                            for kind, x, contiguous in zip(signature.args, args[:3], (True, False, True)))  # fmt: skip
            alpha, add, row, col = args[3:]
            (height, width), (depth, _) = mOut.shape, mB.shape
            unit = Vectors(builder, out.dtype, builder.sub(width, col) if masked else None)
            rows = clamped(builder, row, block_rows, height)
            cols = [builder.add(col, LONG(v * unit.width)) for v in range(vectors)]
            places = [(r, c) for r in rows for c in cols]
            sums = {place: cgutils.alloca_once_value(builder, unit.zero) for place in places}
            with cgutils.for_range(builder, depth) as loop:
                lefts = {r: mA.element(*((loop.index, r) if transposed else (r, loop.index))) for r in rows}
                lefts = {r: unit.splat(builder.load(at)) for r, at in lefts.items()}
                rights = {c: unit.load(mB.element(loop.index, c)) for c in cols}
                for (r, c), total in sums.items():
                    builder.store(add_term(unit, lefts[r], rights[c], builder.load(total)), total)
            alpha = unit.splat(alpha)
            for total in sums.values():
                builder.store(builder.fmul(builder.load(total), alpha), total)
            with builder.if_then(add):
                for place, total in sums.items():
                    builder.store(builder.fadd(builder.load(total), unit.load(mOut.element(*place))), total)
            for place, total in sums.items():
                unit.store(builder.load(total), mOut.element(*place))
            return context.get_dummy_value()

        return types.void(out, a, b, out.dtype, types.boolean, types.intp, types.intp), generate

    return block


def clamped(builder, first, count, end):
    """The indices from `first` on, clamped to the last one before `end`."""
    last = builder.sub(end, LONG(1))
    indices = [builder.add(first, LONG(n)) for n in range(count)]
    return [builder.select(builder.icmp_signed("<", index, last), index, last) for index in indices]


def product_of(transposed, name, block_rows, vectors, add_term=Vectors.multiply_add):
    blocks = block_product(transposed, block_rows, vectors, False, add_term)
    edge = block_product(transposed, block_rows, 1, True, add_term)

    def product(out, a, b, alpha, add):
        rows, cols = out.shape
        width = VECTOR_BYTES // out.itemsize
        whole = cols // (vectors * width) * (vectors * width)
        for col in range(0, whole, vectors * width):
            for row in range(0, rows, block_rows):
                blocks(out, a, b, alpha, add, row, col)
        for col in range(whole, cols, width):
            for row in range(0, rows, block_rows):
                edge(out, a, b, alpha, add, row, col)

    # Numba names symbols by qualified name, types, and a count that differs between processes: if two functions had the
    # same name and types, a kernel from the disk cache might be linked with the wrong one
    product.__qualname__ = name
    return linked(product)


product = product_of(False, "product", ROWS, VECTORS)  # out = alpha a b, plus out if `add`
product_tn = product_of(True, "product_tn", ROWS, VECTORS)  # out = alpha a^T b, plus out if `add`
product_some = product_of(False, "product_some", FEW_ROWS, FEW_VECTORS)  # `product` for few rows
product_row = product_of(False, "product_row", 1, ROW_VECTORS)  # and for one
product_tn_row = product_of(True, "product_tn_row", 1, 8)  # `product_tn` for one row of out
distances = product_of(False, "distances", ROWS, VECTORS, Vectors.add_square)  # `product`, of (a - b)**2 for a b


@linked
def product_few(out, a, b, alpha, add):
    """`product` for few rows."""
    if len(a) == 1:
        product_row(out, a, b, alpha, add)
    else:
        product_some(out, a, b, alpha, add)


def along(builder, dtype, depth, step, width=None):
    """Call step(unit, at) for each vector of a row of `depth` elements; the last one may be masked."""
    unit = Vectors(builder, dtype, width=width)
    whole = builder.and_(depth, LONG(-unit.width))
    with cgutils.for_range_slice(builder, LONG(0), whole, LONG(unit.width)) as (at, _):
        step(unit, at)
    with builder.if_then(builder.icmp_signed("<", whole, depth)):
        step(Vectors(builder, dtype, builder.sub(depth, whole), width), whole)


def block_dots(block_rows, whole=False):
    """The intrinsic (out, a, b, row, col): out = a b^T, for the block at (row, col), of as many elements as a vector.

    Vectors run along the rows of a and b, which are contiguous: if a has few rows, these are the only long axis. whole:
    b has all rows of the block, whose addresses then take few registers.
    """

    @intrinsic
    def block(typingctx, out, a, b, row, col):
        def generate(context, builder, signature, args):
            mOut, mA, mB = (Elements(context, builder, kind, x) for kind, x in zip(signature.args, args[:3]))
            (row, col), (height, width), depth = args[3:], mOut.shape, mB.shape[1]
            unit = Vectors(builder, out.dtype)
            block_cols = unit.width // block_rows
            rows = clamped(builder, row, block_rows, height)
            if whole:
                cols = [builder.add(col, LONG(n)) for n in range(block_cols)]
            else:
                cols = clamped(builder, col, block_cols, width)
            sums = {(r, c): cgutils.alloca_once_value(builder, unit.zero) for r in rows for c in cols}

            for some in (cols[n : n + DOTS] for n in range(0, block_cols, DOTS)):

                def multiply_add(unit, at, some=some):
                    for c in some:
                        unit.prefetch(mB.element(builder.add(c, LONG(AHEAD)), at))
                    lefts, rights = ({r: unit.load(m.element(r, at)) for r in x} for m, x in ((mA, rows), (mB, some)))
                    for r, c in pairs_of(rows, some):
                        total = sums[r, c]
                        builder.store(unit.multiply_add(lefts[r], rights[c], builder.load(total)), total)

                along(builder, out.dtype, depth, multiply_add)
            totals = unit.add_up([builder.load(total) for total in sums.values()])
            part = Vectors(builder, out.dtype, None if whole else builder.sub(width, col), block_cols)
            for n, r in enumerate(rows):
                own = range(n * block_cols, (n + 1) * block_cols)
                part.store(unit.pick(totals, totals, own), mOut.element(r, col))
            return context.get_dummy_value()

        return types.void(out, a, b, types.intp, types.intp), generate

    return block


one_row, one_row_edge, some_rows = block_dots(1, whole=True), block_dots(1), block_dots(FEW_DOTS)


@linked
def product_nt(out, a, b):
    """out = a b^T, for few rows of a."""
    width = VECTOR_BYTES // out.itemsize
    if len(a) == 1:
        for col in range(0, len(b), width):
            if len(b) < width:
                one_row_edge(out, a, b, 0, 0)
            else:
                one_row(out, a, b, 0, min(col, len(b) - width))  # the last one computes some elements again
    else:
        for col in range(0, len(b), width // FEW_DOTS):
            for row in range(0, len(a), FEW_DOTS):
                some_rows(out, a, b, row, col)


@intrinsic
def some_row_dots(typingctx, out, a, b, row):
    """out[r] = a[r] b[r] for as many rows as a vector has elements. Rows are contiguous."""

    def generate(context, builder, signature, args):
        mA, mB = (Elements(context, builder, kind, x) for kind, x in zip(signature.args[1:], args[1:3]))
        row, (height, depth) = args[3], mA.shape
        place = builder.gep(context.make_array(out)(context, builder, args[0]).data, [row])
        unit = Vectors(builder, out.dtype)
        rows = clamped(builder, row, unit.width, height)
        sums = {r: cgutils.alloca_once_value(builder, unit.zero) for r in rows}

        def multiply_add(reader, at):
            for r, total in sums.items():
                left, right = (unit.rounded(reader.load(m.element(r, at))) for m in (mA, mB))
                builder.store(unit.multiply_add(left, right, builder.load(total)), total)

        along(builder, a.dtype, depth, multiply_add, unit.width)
        part = Vectors(builder, out.dtype, builder.sub(height, row))
        part.store(unit.add_up([builder.load(total) for total in sums.values()]), place)
        return context.get_dummy_value()

    return types.void(out, a, b, types.intp), generate


@linked
def row_dots(out, a, b):
    """out[r] = a[r] b[r]"""
    for row in range(0, len(a), VECTOR_BYTES // out.itemsize):
        some_row_dots(out, a, b, row)


@intrinsic
def dot(typingctx, x, y, length, dtype):
    """x y, for vectors at these addresses."""

    def generate(context, builder, signature, args):
        unit = Vectors(builder, dtype.dtype)
        places, total = elements_at(builder, unit, args[:2]), cgutils.alloca_once_value(builder, unit.zero)

        def multiply_add(unit, at):
            left, right = (unit.load(builder.gep(place, [at])) for place in places)
            builder.store(unit.multiply_add(left, right, builder.load(total)), total)

        along(builder, dtype.dtype, args[2], multiply_add)
        found, width = builder.load(total), unit.width
        while width > 1:
            width //= 2
            halves = (unit.pick(found, found, range(n * width, (n + 1) * width)) for n in range(2))
            found = builder.fadd(*halves)
        return builder.extract_element(found, INT(0))

    return dtype.dtype(types.intp, types.intp, types.intp, dtype), generate


@intrinsic
def add_multiple(typingctx, out, factor, x, length):
    """out += factor x, for vectors at these addresses."""

    def generate(context, builder, signature, args):
        unit = Vectors(builder, factor)
        to, source = elements_at(builder, unit, args[::2])

        def multiply_add(unit, at):
            place = builder.gep(to, [at])
            terms = unit.splat(args[1]), unit.load(builder.gep(source, [at])), unit.load(place)
            unit.store(unit.multiply_add(*terms), place)

        along(builder, factor, args[3], multiply_add)
        return context.get_dummy_value()

    return types.void(types.intp, factor, types.intp, types.intp), generate


def elements_at(builder, unit, addresses):
    return [builder.inttoptr(address, unit.element.as_pointer()) for address in addresses]
