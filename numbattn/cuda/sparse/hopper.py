"""Products with block-sparse matrices of float16 and bfloat16 on Hopper: persistent kernels with TMA and wgmma.

In each block of threads one thread of the last warpgroup is the producer: it draws tiles and loads their operands. The
other warpgroups are the consumers, each with 64 rows of a tile.
"""


import numpy as np

from ..kernel import TensorMap, kernel_factory
from ..kernels.shared.schedule import finish, next_number, split
from ..kernels.shared.warps import warp_specialised
from ..tile import (
    WARPGROUP,
    Alignment,
    Pipeline,
    SharedMemory,
    acquire,
    advance,
    aligned,
    allocate,
    block_index,
    commit,
    device,
    dot,
    fence_async_proxy,
    full,
    grid_size,
    index,
    opaque,
    prefetch_tensor_map,
    put,
    read,
    release,
    save,
    shape,
    stage,
    sync_warp,
    sync_warpgroup,
    thread_index,
    tma_load,
    tma_load_part,
    tma_store,
    tma_store_wait,
    wait,
    warpgroup_index,
    wgmma,
    wgmma_wait,
)
from ..tile.alignment import VECTOR_BYTES
from ..views import without_memory
from .any import SparseKernel, chunks, panels, rows_of_part

ROWS, CHUNK = 64, 64  # of a consumer; of the depth, in a stage
SIZES = {64, 128}  # of blocks
REGISTERS = {1: (40, 232), 2: (40, 232), 3: (32, 160), 4: (32, 112)}  # {consumers: of a thread: producer's, consumer's}
MOST_CONSUMERS, SHARED_BYTES = 4, 227 << 10
OF_A_PRODUCT = {64: (4, 2, 1), 128: (3, 2, 1)}  # consumers, by the width of blocks: with 4 of 128 it takes 5 % longer
TILES_AHEAD, NO_TILE, ZERO = 2, -1, np.float32(0)
VECTORS = Alignment(VECTOR_BYTES)
COUNTERS = without_memory((2,), np.dtype(np.uint32))


def stages_of(nbytes, stage):
    """As many stages as there is room for."""
    return min((SHARED_BYTES - 2048 - nbytes) // stage, 8)


@kernel_factory
def product(dtype, depth, width, transposed, consumers):
    """The SparseKernel of Y = X W, or X W^T, for blocks of this depth and width. Tiles of Y, 64 rows of a block column
    for each consumer, are drawn one after another, all block columns of some rows before the next rows, which keeps
    these in the L2 cache. The arrays are those of `any.product`.
    """
    TILE_M, CONSUMERS, SUMS = ROWS * consumers, consumers, wgmma(width)
    CHUNKS, TRANSPOSED, shared = depth // CHUNK, transposed, SharedMemory()
    Y_PLACE = shared.boxes(ROWS, width, dtype, consumers)
    stages = stages_of(shared.nbytes, (TILE_M + width) * CHUNK * dtype.itemsize)
    X_PLACE = shared.boxes(ROWS, CHUNK, dtype, stages * consumers)
    W_PLACE = shared.boxes(*((width, CHUNK) if transposed else (CHUNK, width)), dtype, stages)
    X_PIPELINE = Pipeline.within(shared, X_PLACE, readers=1)
    W_PIPELINE = Pipeline.within(shared, W_PLACE, readers=consumers)
    TILE_PIPELINE = Pipeline.within(shared, shared.tile(1, 4, np.int32, TILES_AHEAD), readers=consumers)

    @device
    def load_tile(X, W, mX, mW, entries, first, end, m0):
        """Load all operands of a tile of Y."""
        for entry in range(first, end):
            column, block = index(entries[entry, 0]) * CHUNKS, index(entries[entry, 1])
            for chunk in range(CHUNKS):
                acquire(W)
                tma_load(W, mW, block, chunk, 0)
                W = advance(W, 1)
                consumer = index(0)
                while consumer < CONSUMERS:
                    acquire(X)
                    tma_load(X, mX, 0, column + chunk, m0 + consumer * ROWS)
                    X, consumer = advance(X, 1), opaque(consumer + 1)
        return X, W

    @device
    def produce(mX, mW, mY, starts, entries, rows, counters):
        X, W, T = stage(X_PIPELINE, 0), stage(W_PIPELINE, 0), stage(TILE_PIPELINE, 0)
        prefetch_tensor_map(mX)
        prefetch_tensor_map(mW)
        prefetch_tensor_map(mY)
        (after_last,) = shape(starts)
        columns, number = after_last - 1, block_index()
        while number < (rows + TILE_M - 1) // TILE_M * columns:
            following = next_number(counters, grid_size())
            m_block, column = split(number, columns)
            first, end = index(starts[column]), index(starts[column + 1])
            acquire(T)
            commit(T, (m_block * TILE_M, column, (end - first) * CHUNKS, 0))
            X, W = load_tile(X, W, mX, mW, entries, first, end, m_block * TILE_M)
            T, number = advance(T, 1), following
        finish(counters, grid_size())
        acquire(T)
        commit(T, (0, NO_TILE, 0, 0))

    @device
    def multiply(C, X, W):
        """Start C += X W."""
        wait(X)
        wait(W)
        return dot(C, X.tile, W.tile.T if TRANSPOSED else W.tile)

    @device
    def sums_of(X, W, steps):
        C = multiply(full(SUMS, ZERO), X, W)
        for _ in range(1, steps):
            next_X, next_W = advance(X, CONSUMERS), advance(W, 1)
            C = wgmma_wait(multiply(C, next_X, next_W), 1)      # this one is in flight, the previous one is over
            release(X)
            release(W)
            X, W = next_X, next_W
        C = wgmma_wait(C, 0)
        release(X)
        release(W)
        return C, advance(X, CONSUMERS), advance(W, 1)

    @device
    def store(mY, C, mine, column, row):
        """Store a tile through shared memory, by TMA."""
        if thread_index() % WARPGROUP == 0:
            tma_store_wait()                                    # the last tile has been read
        sync_warpgroup()
        put(allocate(Y_PLACE, mine), C)
        fence_async_proxy()
        sync_warpgroup()
        if thread_index() % WARPGROUP == 0:
            tma_store(mY, allocate(Y_PLACE, mine), 0, column, row)
        sync_warp()                                             # reconverge: the first thread did more

    @device
    def consume(mY):
        mine = warpgroup_index()
        X, W, T = stage(X_PIPELINE, mine), stage(W_PIPELINE, 0), stage(TILE_PIPELINE, 0)
        wait(T)
        m0, column, steps, _ = read(T)
        while column != NO_TILE:
            sync_warpgroup()                                    # all have read the tile's numbers
            release(T)
            row = m0 + ROWS * mine
            if steps > 0:
                C, X, W = sums_of(X, W, steps)
                store(mY, C, mine, column, row)
            else:
                store(mY, full(SUMS, ZERO), mine, column, row)
            T = advance(T, 1)
            wait(T)
            m0, column, steps, _ = read(T)
        if thread_index() % WARPGROUP == 0:
            tma_store_wait()

    pipelines = X_PIPELINE, W_PIPELINE, TILE_PIPELINE
    begin, take_roles = warp_specialised(pipelines, consumers, REGISTERS[consumers], consume, produce)

    def hopper_sparse_product(mX, mW, mY, starts, entries, rows, counters):
        begin()
        take_roles((mY,), ((mX, mW, mY, starts, entries, rows, counters),))

    def lay_out(gpu, x, w, y, *lists):
        matrices = panels(x, CHUNK), chunks(w, CHUNK, transposed), panels(y, width)
        maps = [TensorMap(x, place.box) for x, place in zip(matrices, (X_PLACE, W_PLACE, Y_PLACE))]
        tiles = -(-len(x) // TILE_M) * (y.shape[1] // width)
        return min(tiles, gpu.multiprocessors), (*maps, *lists, np.int32(len(x)), COUNTERS)

    return SparseKernel(hopper_sparse_product, WARPGROUP * (consumers + 1), shared.nbytes, lay_out)


@kernel_factory
def gradient(dtype, rows, cols, members):
    """The SparseKernel of dW = X^T dY for blocks of this size.

    A tile is a group of up to `members` blocks of dW in one block row: they are products of the same X, which is loaded
    once. A consumer has 64 rows of one of them. All groups of some rows of X come before the next rows, which keeps
    these in the L2 cache.

    Arrays: x, dy; the sums of each part, (parts, blocks, rows, cols); the groups, (groups, 1 + 2 members): the block
    row, and for each member the block column and the number of the block of dW, -1 if there is none.
    """
    halves, consumers = rows // ROWS, rows // ROWS * members
    HALVES, MEMBERS, SUMS, shared = halves, members, wgmma(cols), SharedMemory()
    stages = stages_of(0, (rows + members * cols) * CHUNK * dtype.itemsize)
    X_PLACE, DY_PLACE = shared.boxes(CHUNK, rows, dtype, stages), shared.boxes(CHUNK, cols, dtype, stages * members)
    X_PART = X_PLACE.parts(ROWS)
    PIPELINE = Pipeline.within(shared, X_PLACE, readers=consumers, fills=1 + members)

    @device
    def produce(mX, mDY, groups, steps, tiles):
        S, number = stage(PIPELINE, 0), block_index()
        prefetch_tensor_map(mX)
        prefetch_tensor_map(mDY)
        count, _ = shape(groups)
        while number < tiles:
            part, group = split(number, count)
            row, block_row = part * steps * CHUNK, index(groups[group, 0])
            for _ in range(steps):
                acquire(S)
                tma_load_part(S, S.tile, mX, 0, block_row, row, 0)
                member = index(0)
                while member < MEMBERS:
                    if groups[group, 2 + 2 * member] >= 0:
                        place = allocate(DY_PLACE, S.index * MEMBERS + member)
                        tma_load_part(S, place, mDY, 0, index(groups[group, 1 + 2 * member]), row, 0)
                    else:
                        commit(S)                               # there is nothing to load
                    member = opaque(member + 1)
                S, row = advance(S, 1), row + CHUNK
            number = number + grid_size()

    @device
    def multiply(C, S, member, half):
        """Start C += X^T dY."""
        wait(S)
        return dot(C, allocate(X_PART, S.index * HALVES + half).T, allocate(DY_PLACE, S.index * MEMBERS + member))

    @device
    def sums_of(S, steps, member, half):
        C = multiply(full(SUMS, ZERO), S, member, half)
        for _ in range(1, steps):
            after = advance(S, 1)
            C = wgmma_wait(multiply(C, after, member, half), 1)  # this one is in flight, the previous one is over
            release(S)
            S = after
        C = wgmma_wait(C, 0)
        release(S)
        return C, advance(S, 1)

    @device
    def skip(S, steps):
        """A consumer without a block."""
        for _ in range(steps):
            wait(S)
            sync_warpgroup()                                    # nobody waits for this stage any more
            release(S)
            S = advance(S, 1)
        return S

    @device
    def consume(mParts, groups, steps, tiles):
        S, number = stage(PIPELINE, 0), block_index()
        count, _ = shape(groups)
        member, half = split(warpgroup_index(), HALVES)
        while number < tiles:
            part, group = split(number, count)
            block = index(groups[group, 2 + 2 * member])
            if block >= 0:
                C, S = sums_of(S, steps, member, half)
                save(aligned(mParts[part, block], VECTORS), C, half * ROWS)
            else:
                S = skip(S, steps)
            number = number + grid_size()

    begin, take_roles = warp_specialised((PIPELINE,), consumers, REGISTERS[consumers], consume, produce)

    def hopper_sparse_gradient(mX, mDY, mParts, groups, steps):
        begin()
        (parts, _, _, _), (count, _) = shape(mParts), shape(groups)
        take_roles((mParts, groups, steps, parts * count), ((mX, mDY, groups, steps, parts * count),))

    def lay_out(gpu, x, dy, sums, groups):
        maps = TensorMap(panels(x, rows), X_PLACE.box), TensorMap(panels(dy, cols), DY_PLACE.box)
        count, steps = len(sums), rows_of_part(len(x), len(sums), CHUNK) // CHUNK
        return min(count * len(groups), gpu.multiprocessors), (*maps, sums, groups, np.int32(steps))

    return SparseKernel(hopper_sparse_gradient, WARPGROUP * (consumers + 1), shared.nbytes, lay_out)
