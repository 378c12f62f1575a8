"""Products of tiles on the CPU's vector units.

A BLAS is as fast, but it starts threads of its own, and their number is a setting of the whole process, which is the
user's. A product is computed in blocks of ROWS rows and VECTORS vectors of columns, whose accumulators stay in
registers: for each k one element of every row of a is multiplied by the vectors of row k of b.
"""

import llvmlite.binding
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

FEATURES = llvmlite.binding.get_host_cpu_features()
VECTOR_BYTES = 64 if FEATURES.get("avx512f") else 32 if FEATURES.get("avx") else 16
ROWS, VECTORS = (8, 2) if FEATURES.get("avx512f") else (6, 2)  # the accumulators take all registers but a few
INT, LONG = ir.IntType(32), ir.IntType(64)
FLOATS = {types.float32: (ir.FloatType(), 4, "f32"), types.float64: (ir.DoubleType(), 8, "f64")}


class Vectors:
    """LLVM IR for vectors of a dtype; with `cols`, loads and stores are masked to the first `cols` elements."""

    def __init__(self, builder, dtype, cols=None):
        self.b, (self.element, self.itemsize, self.name) = builder, FLOATS[dtype]
        self.width = VECTOR_BYTES // self.itemsize
        self.type, self.name = ir.VectorType(self.element, self.width), f"v{self.width}{self.name}"
        self.zero, self.align = ir.Constant(self.type, [0.0] * self.width), ir.Constant(INT, self.itemsize)
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

    def load(self, place):
        place = self.b.bitcast(place, self.type.as_pointer())
        if self.mask is None:
            return self.b.load(place, align=self.itemsize)
        return self.call(f"llvm.masked.load.{self.name}.p0", self.type, place, self.align, self.mask, self.zero)

    def store(self, value, place):
        place = self.b.bitcast(place, self.type.as_pointer())
        if self.mask is None:
            self.b.store(value, place, align=self.itemsize)
        else:
            self.call(f"llvm.masked.store.{self.name}.p0", ir.VoidType(), value, place, self.align, self.mask)


class Matrix:
    """LLVM IR for the elements of an array of two axes."""

    def __init__(self, context, builder, kind, value):
        self.b, array = builder, context.make_array(kind)(context, builder, value)
        self.data = array.data
        self.shape, self.strides = (cgutils.unpack_tuple(builder, x) for x in (array.shape, array.strides))

    def element(self, row, col):
        at = self.b.bitcast(self.data, ir.IntType(8).as_pointer())
        for index, stride in zip((row, col), self.strides):
            at = self.b.gep(at, [self.b.mul(index, stride)])
        return self.b.bitcast(at, self.data.type)


def block_product(transposed, vectors, masked):
    """The intrinsic (out, a, b, alpha, add, row, col): out = alpha a b, plus out if `add`, for the block at (row, col).

    transposed: a is given as its transpose. masked: columns may end within a vector. Rows of b and out are contiguous.
    Rows beyond the last one are clamped to it: the same values are stored several times.
    """

    @intrinsic
    def block(typingctx, out, a, b, alpha, add, row, col):
        def generate(context, builder, signature, args):
            mOut, mA, mB = (Matrix(context, builder, kind, x) for kind, x in zip(signature.args, args[:3]))
            alpha, add, row, col = args[3:]
            (height, width), (depth, _) = mOut.shape, mB.shape
            unit = Vectors(builder, out.dtype, builder.sub(width, col) if masked else None)
            last, cols = builder.sub(height, LONG(1)), [builder.add(col, LONG(v * unit.width)) for v in range(vectors)]
            rows = [builder.add(row, LONG(r)) for r in range(ROWS)]
            rows = [builder.select(builder.icmp_signed("<", r, last), r, last) for r in rows]
            places = [(r, c) for r in rows for c in cols]
            sums = {place: cgutils.alloca_once_value(builder, unit.zero) for place in places}
            with cgutils.for_range(builder, depth) as loop:
                lefts = {r: mA.element(*((loop.index, r) if transposed else (r, loop.index))) for r in rows}
                lefts = {r: unit.splat(builder.load(at)) for r, at in lefts.items()}
                rights = {c: unit.load(mB.element(loop.index, c)) for c in cols}
                for (r, c), total in sums.items():
                    builder.store(unit.multiply_add(lefts[r], rights[c], builder.load(total)), total)
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


def product_of(transposed, name):
    blocks, edge = block_product(transposed, VECTORS, masked=False), block_product(transposed, 1, masked=True)

    def product(out, a, b, alpha, add):
        rows, cols = out.shape
        width = VECTOR_BYTES // out.itemsize
        whole = cols // (VECTORS * width) * (VECTORS * width)
        for col in range(0, whole, VECTORS * width):
            for row in range(0, rows, ROWS):
                blocks(out, a, b, alpha, add, row, col)
        for col in range(whole, cols, width):
            for row in range(0, rows, ROWS):
                edge(out, a, b, alpha, add, row, col)

    # Numba names symbols by qualified name, types, and a count of its own, which differs between processes: of two
    # functions of one name and types, a kernel from the disk cache might be linked with the wrong one
    product.__qualname__ = name
    return njit(product)


product = product_of(transposed=False, name="product")  # out = alpha a b, plus out if `add`
product_tn = product_of(transposed=True, name="product_tn")  # out = alpha a^T b, plus out if `add`
