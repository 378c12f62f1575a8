"""Small kernels, as factories, for the tests of building and launching."""

from llvmlite import ir
from numba import cuda
from numba.cuda import types
from numba.cuda.extending import intrinsic

from numbattn.cuda.build import Source, TensorMapArgument
from numbattn.cuda.tile import launch_dependents, wait_on_dependencies

VECTOR = types.Array(types.float32, 1, "A")
MATRIX = types.Array(types.float32, 2, "A")
NUMBERS = types.int32, types.uint32, types.int64, types.uint64, types.float32, types.float64


@cuda.jit(device=True, forceinline=True)
def twice(x):
    return x + x


def scale(times=1):
    def kernel(x, y, a):
        """y = 2 times a x"""
        i = cuda.grid(1)
        if i < x.shape[0]:
            y[i] = times * twice(a * x[i])

    return Source(kernel, types.void(VECTOR, VECTOR, types.float32), threads=64)


def numbers():
    def kernel(out, row, matrix, a, b, c, d, e, f):
        """Each argument as a float64, then a row of a matrix."""
        if cuda.threadIdx.x == 0:
            out[0], out[1], out[2], out[3], out[4], out[5] = a, b, c, d, e, f
            for j in range(matrix.shape[1]):
                out[6 + j] = matrix[row, j]

    out = types.Array(types.float64, 1, "A")
    return Source(kernel, types.void(out, types.int64, MATRIX, *NUMBERS), threads=32)


def reverse(size):
    def kernel(x, y):
        """y is x backwards, by way of dynamic shared memory."""
        tile = cuda.shared.array(0, types.float32)
        for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
            tile[i] = x[i]
        cuda.syncthreads()
        for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
            y[i] = tile[size - 1 - i]

    return Source(kernel, types.void(VECTOR, VECTOR), threads=256, shared=4 * size)


def pick(size):
    def kernel(y, j):
        """An array with run-time indices has to lie in local memory."""
        tile = cuda.local.array(size, types.float32)
        for i in range(size):
            tile[(i * j) % size] = i
        y[0] = tile[j % size]

    return Source(kernel, types.void(VECTOR, types.int32), threads=32)


LOAD_BOX = """{
.reg .pred done;
mbarrier.init.shared::cta.b64 [$1], 1;
fence.proxy.async.shared::cta;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $3;
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$2, {$4, $5}], [$1];
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 done, [$1], 0;
@!done bra WAIT;
}"""


@intrinsic
def load_box(typingctx, tile, barrier, tensor_map, size, column, row):
    """Fill `tile` with one box, and wait for it."""
    int32, int64 = ir.IntType(32), ir.IntType(64)

    def shared_address(context, builder, kind, array):
        pointer = builder.ptrtoint(context.make_array(kind)(context, builder, array).data, int64)
        convert = ir.FunctionType(int64, [int64])
        return builder.trunc(builder.asm(convert, "cvta.to.shared.u64 $0, $1;", "=l,l", [pointer], False), int32)

    def codegen(context, builder, signature, args):
        addresses = [shared_address(context, builder, kind, array) for kind, array in zip(signature.args, args[:2])]
        run = ir.FunctionType(ir.VoidType(), [int32, int32, int64, int32, int32, int32])
        builder.asm(run, LOAD_BOX, "r,r,l,r,r,r,~{memory}", [*addresses, *args[2:]], True)
        return context.get_dummy_value()

    return types.void(tile, barrier, types.uint64, types.int32, types.int32, types.int32), codegen


def box(rows, columns):
    def kernel(y, tensor_map, row, column):
        """y is the box of a matrix at (row, column)."""
        tile = cuda.shared.array((rows, columns), types.float32, alignment=128)
        barrier = cuda.shared.array(1, types.uint64)
        if cuda.threadIdx.x == 0:
            load_box(tile, barrier, tensor_map, types.int32(4 * rows * columns), column, row)
        cuda.syncthreads()
        for i in range(cuda.threadIdx.x, rows * columns, cuda.blockDim.x):
            y[i // columns, i % columns] = tile[i // columns, i % columns]

    signature = types.void(MATRIX, types.uint64, types.int32, types.int32)
    return Source(kernel, signature, threads=32, tensor_maps=(TensorMapArgument(1, (rows, columns), swizzle=0),))


def shift():
    def kernel(x, y):
        """y[i] = x[i + 1] + 1, by blocks that start while those that make x still run."""
        launch_dependents()
        wait_on_dependencies()
        i = cuda.grid(1)
        y[i] = x[(i + 1) % x.size] + 1

    vector = types.Array(types.int32, 1, "A")
    return Source(kernel, types.void(vector, vector), threads=32, overlaps=True)
