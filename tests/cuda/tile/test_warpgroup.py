"""Products of a warpgroup, which run on until `wgmma_wait`."""

import numpy as np
import pytest

from numbattn.cuda.tile import (
    WARPGROUP,
    DeadlockError,
    Pipeline,
    RaceError,
    SharedMemory,
    acquire,
    advance,
    allocate,
    bfloat16,
    columns,
    convert,
    copy_layout,
    device,
    dot,
    fence_async_proxy,
    full,
    get,
    index,
    init_pipelines,
    load,
    operand,
    positive_operand,
    put,
    release,
    save,
    simulate,
    stage,
    sync_threads,
    sync_warp,
    sync_warpgroup,
    thread_index,
    tma_load,
    wait,
    wgmma,
    wgmma_wait,
    where,
)
from tests.tools.launch import MISUSED, launch, poisoned, simulated_only, tensor_map

SEEDS = [None, *(pytest.param(seed, marks=simulated_only) for seed in (1, 2))]


def numbers(rng, shape, dtype):
    x = rng.standard_normal(shape).astype(dtype)
    return x.astype(np.float32), x.view(np.uint16) if dtype == bfloat16 else x


@device
def as_it_lies(tile, matrix):
    return tile


@device
def turned(tile, matrix):
    return tile.T


def in_registers(plan):
    LAYOUT = wgmma(plan.cols)

    @device
    def in_registers(tile, matrix):
        return operand(convert(load(matrix, LAYOUT, 0), np.float32), plan)

    return in_registers


@pytest.mark.parametrize(("x_form", "y_form", "dtype", "depth", "cols"), [
    (as_it_lies, as_it_lies, np.float16, 64, 128), (as_it_lies, turned, bfloat16, 64, 128),
    (turned, as_it_lies, bfloat16, 64, 128), (turned, turned, np.float16, 64, 128),
    (in_registers, as_it_lies, bfloat16, 64, 128), (in_registers, as_it_lies, np.float16, 64, 128),
    (as_it_lies, turned, np.float16, 128, 80), (turned, turned, bfloat16, 128, 80),     # boxes are 64 columns wide
    (in_registers, turned, bfloat16, 128, 80), (in_registers, turned, np.float16, 128, 80),
])  # fmt: skip
def test_products(rng, x_form, y_form, dtype, depth, cols):
    SUM, x_shape, y_shape = wgmma(cols), (64, depth), (depth, cols)
    shared = SharedMemory()
    X = shared.boxes(*(x_shape[::-1] if x_form is turned else x_shape), dtype)
    Y = shared.boxes(*(y_shape[::-1] if y_form is turned else y_shape), dtype)
    PUT_X, PUT_Y = (copy_layout(tile.rows, tile.cols, WARPGROUP, 8) for tile in (X, Y))
    left, right = in_registers(X) if x_form is in_registers else x_form, y_form

    def multiply(x, y, z):
        """z = 2 x y + z"""
        sX, sY = allocate(X), allocate(Y)
        put(sX, load(x, PUT_X, 0))
        put(sY, load(y, PUT_Y, 0))
        fence_async_proxy()
        sync_warpgroup()
        once = wgmma_wait(dot(SUM, left(sX, x), right(sY, y)), 0)
        Z = dot(load(z, SUM, 0), left(sX, x), right(sY, y))
        save(z, once + wgmma_wait(Z, 0), 0)

    (x, x_given), (y, y_given) = (numbers(rng, (tile.rows, tile.cols), dtype) for tile in (X, Y))
    z = rng.standard_normal((64, cols)).astype(np.float32)
    want = z + 2 * (x.T if x_form is turned else x) @ (y.T if y_form is turned else y)
    launch(multiply, (1, 1, 1), WARPGROUP, shared.nbytes, x_given, y_given, z, cc=(9, 0, "a"))
    np.testing.assert_allclose(z, want, atol=5e-5)


@pytest.mark.parametrize("is_turned", [False, True])
def test_products_of_parts_of_a_box(rng, is_turned):
    """Where a part starts, only threads know: x times each part of y, or of its transpose."""
    shared = SharedMemory()
    X, Y, COPY, SUM = shared.boxes(64, 64, np.float16), shared.boxes(64, 64, np.float16), wgmma(64), wgmma(32)

    def multiply(x, y, z):
        put(allocate(X), load(x, COPY, 0))
        put(allocate(Y), load(y, COPY, 0))
        fence_async_proxy()
        sync_warpgroup()
        total = full(COPY, np.float32(0))
        if is_turned:
            for part in range(2):
                X_PART, Y_PART = columns(allocate(X), part, 2), columns(allocate(Y), part, 2)
                total = wgmma_wait(dot(total, X_PART, Y_PART.T), 0)
            save(z, total, 0)
        else:
            for part in range(2):
                save(z[:, 32 * part :], wgmma_wait(dot(SUM, allocate(X), columns(allocate(Y), part, 2)), 0), 0)

    (x, x_given), (y, y_given) = (numbers(rng, (64, 64), np.float16) for _ in range(2))
    z = poisoned((64, 64))
    launch(multiply, (1, 1, 1), WARPGROUP, shared.nbytes, x_given, y_given, z, cc=(9, 0, "a"))
    np.testing.assert_allclose(z, x @ (y.T if is_turned else y), atol=5e-5)


def test_parts_of_a_box_are_for_products():
    PLACE, LAYOUT = SharedMemory().boxes(64, 64, np.float16), wgmma(32)

    def kernel(x):
        put(columns(allocate(PLACE), 1, 2), load(x, LAYOUT, 0))

    with pytest.raises(MISUSED, match="put: float16 boxes 64x32 at 0 is a part of a box, which only products read"):
        launch(kernel, (1, 1, 1), WARPGROUP, 1 << 13, np.zeros((64, 32), np.float32), cc=(9, 0, "a"))


@pytest.fixture
def xy(rng):
    return (rng.standard_normal((64, 64)).astype(np.float16) for _ in range(2))


def run(kernel_of, x, y, seed=None):
    """z of the kernel that is kernel_of(begin), begin(x, y) being tiles of x and y in shared memory."""
    shared = SharedMemory()
    X, Y = (shared.boxes(64, 64, np.float16) for _ in range(2))
    LAYOUT = copy_layout(64, 64, WARPGROUP, 8)

    @device
    def begin(x, y):
        sX, sY = allocate(X), allocate(Y)
        put(sX, load(x, LAYOUT, 0))
        put(sY, load(y, LAYOUT, 0))
        fence_async_proxy()
        sync_threads()
        return sX, sY

    z = poisoned((64, 64))
    start(kernel_of(begin), WARPGROUP, shared.nbytes, x, y, z, seed=seed)
    return z


def start(kernel, threads, nbytes, *arguments, seed=None):
    if seed is None:
        launch(kernel, (1, 1, 1), threads, nbytes, *arguments, cc=(9, 0, "a"))
    else:
        simulate(kernel, (1, 1, 1), threads, nbytes, *arguments, seed=seed)


TILE, ROWS_OF_X = wgmma(64), copy_layout(64, 64, WARPGROUP, 8)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sum_goes_on_in_flight(xy, seed):
    def kernel(begin):
        def multiply(x, y, z):
            sX, sY = begin(x, y)
            Z = dot(TILE, sX, sY)
            other = dot(TILE, sX, sY.T)
            Z = dot(Z, sX, sY)
            other = wgmma_wait(other, 1)
            save(z, wgmma_wait(Z, 0) + other, 0)

        return multiply

    x, y = xy
    z, x, y = run(kernel, x, y, seed), x.astype(np.float32), y.astype(np.float32)
    np.testing.assert_allclose(z, 2 * x @ y + x @ y.T, atol=5e-5)


USES = {
    "an operator": lambda Z, tile: Z * np.float32(2),
    "an operator from the right": lambda Z, tile: full(TILE, np.float32(2)) * Z,
    "a function": lambda Z, tile: where(full(TILE, True), Z, np.float32(0)),
    "put": lambda Z, tile: put(tile, Z),
    "an operand": lambda Z, tile: operand(Z, tile.plan),
    "save": lambda Z, tile: save(np.zeros((64, 64), np.float32), Z, 0),
}


@simulated_only
@pytest.mark.parametrize("use", USES)
def test_a_sum_in_flight_is_not_used(xy, use):
    def kernel(begin):
        def multiply(x, y, z):
            sX, sY = begin(x, y)
            USES[use](dot(TILE, sX, sY), sX)

        return multiply

    with pytest.raises(RaceError, match="the sum of a product is used before `wgmma_wait`"):
        run(kernel, *xy)


@simulated_only
def test_the_last_products_have_not_finished(xy):
    def kernel(begin):
        def multiply(x, y, z):
            sX, sY = begin(x, y)
            first = dot(TILE, sX, sY)
            second = dot(TILE, sX, sY)
            save(z, wgmma_wait(first, 1), 0)
            save(z, wgmma_wait(second, 1), 0)

        return multiply

    with pytest.raises(RaceError, match="the sum of a product is used before `wgmma_wait`"):
        run(kernel, *xy)


def overwriter(wait_for):
    """A tile is overwritten while `later` products may still read it; the last one reads another tile."""

    def kernel(begin):
        def multiply(x, y, z):
            sX, sY = begin(x, y)
            Z = dot(TILE, sX, sY)
            other = dot(TILE, sY, sY)
            if wait_for == "both":
                other = wgmma_wait(other, 0)
            elif wait_for == "the first":
                Z = wgmma_wait(Z, 1)
            elif wait_for == "all but the last":
                other = wgmma_wait(other, 1)
            put(sX, load(x, TILE, 0))

        return multiply

    return kernel


@simulated_only
@pytest.mark.parametrize("seed", SEEDS)
def test_operands_are_read_until_a_product_has_finished(xy, seed):
    x, y = xy
    run(overwriter("both"), x, y, seed)
    run(overwriter("the first"), x, y, seed)
    run(overwriter("all but the last"), x, y, seed)
    with pytest.raises(RaceError, match=r"thread \d+ overwrites what a product of warpgroup 0 reads"):
        run(overwriter("nothing"), x, y, seed)


@simulated_only
def test_a_warpgroup_multiplies_as_a_whole(xy):
    def kernel(begin):
        def multiply(x, y, z):
            sX, sY = begin(x, y)
            if thread_index() < 96:
                wgmma_wait(dot(TILE, sX, sY), 0)

        return multiply

    with pytest.raises(DeadlockError, match="threads 0-95 wait for a product of warpgroup 0"):
        run(kernel, *xy)


@simulated_only
def test_a_product_is_no_barrier(xy):
    """Threads meet for it, which orders nothing that they do to shared memory."""

    def kernel(begin):
        def multiply(x, y, z):
            sX, sY = begin(x, y)
            save(z, get(sX, ROWS_OF_X), 0)
            wgmma_wait(dot(TILE, sY, sY), 0)
            put(sX, load(x, TILE, 0))

        return multiply

    with pytest.raises(RaceError, match=r"thread \d+ overwrites what thread \d+ reads"):
        run(kernel, *xy)


@simulated_only
@pytest.mark.parametrize("missing", ["fence_async_proxy", "sync_warpgroup"])
def test_what_a_product_reads_has_been_shared(xy, missing):
    shared = SharedMemory()
    X = shared.boxes(64, 64, np.float16)

    def multiply(x):
        sX = allocate(X)
        put(sX, load(x, TILE, 0))
        if missing != "fence_async_proxy":
            fence_async_proxy()
        if missing != "sync_warpgroup":
            sync_warpgroup()
        wgmma_wait(dot(TILE, sX, sX.T), 0)

    with pytest.raises(RaceError, match="with no fence_async_proxy" if missing == "fence_async_proxy" else "reads"):
        simulate(multiply, (1, 1, 1), WARPGROUP, shared.nbytes, next(xy))


@simulated_only
def test_all_threads_know_what_a_product_reads(xy):
    """The last one to come for it, which has written it, is not enough."""
    shared = SharedMemory()
    X, LAYOUT = shared.boxes(64, 64, np.float16), copy_layout(64, 64, 32, 8)

    def multiply(x):
        if thread_index() >= 96:
            put(allocate(X), load(x, LAYOUT, 0))
            fence_async_proxy()
            sync_warp()
        wgmma_wait(dot(TILE, operand(full(TILE, np.float32(1)), X), allocate(X)), 0)

    with pytest.raises(RaceError, match=r"thread \d reads what thread \d+ wrote"):
        simulate(multiply, (1, 1, 1), WARPGROUP, shared.nbytes, next(xy))


@simulated_only
def test_all_threads_multiply_the_same(xy):
    shared = SharedMemory()
    X = shared.boxes(64, 64, np.float16, stages=2)

    def multiply(x):
        for i in range(2):
            put(allocate(X, i), load(x, TILE, 0))
        fence_async_proxy()
        sync_warpgroup()
        wgmma_wait(dot(TILE, operand(full(TILE, np.float32(1)), X), allocate(X, thread_index() // 64)), 0)

    with pytest.raises(ValueError, match="the threads of a warpgroup multiply different tiles"):
        simulate(multiply, (1, 1, 1), WARPGROUP, shared.nbytes, next(xy))


def multiplier(without=""):
    """z = the sum of products of tiles from a pipeline, each in flight while the next tile is waited for."""
    shared = SharedMemory()
    PIPELINE = Pipeline.within(shared, shared.boxes(64, 64, np.float16, stages=2), readers=1)
    waits, finishes = without != "wait", without != "wgmma_wait"

    def multiply(mX, z, count):
        init_pipelines(PIPELINE)
        sync_threads()
        X, n = stage(PIPELINE, 0), index(0)
        if thread_index() == WARPGROUP:
            while n < count:
                acquire(X)
                tma_load(X, mX, 0, 0, 64 * n)
                X = advance(X, 1)
                n = n + 1
        elif thread_index() < WARPGROUP:
            Z = full(TILE, np.float32(0))
            while n < count:
                if waits:
                    wait(X)
                Z = dot(Z, X.tile, X.tile.T)
                if finishes:
                    Z = wgmma_wait(Z, 0)
                release(X)
                X = advance(X, 1)
                n = n + 1
            save(z, wgmma_wait(Z, 0), 0)

    return multiply, shared.nbytes


@pytest.fixture
def ring_arguments(rng):
    x = rng.standard_normal((1, 1, 250, 64)).astype(np.float16)
    return tensor_map(x, (1, 1, 64, 64)), poisoned((64, 64)), np.int32(4), x


@simulated_only
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("without", "text"), [("wait", "reads"), ("wgmma_wait", "a product of warpgroup 0 reads")])
def test_what_a_ring_of_operands_needs(ring_arguments, without, text, seed):
    kernel, nbytes = multiplier(without)
    with pytest.raises(RaceError, match=text):
        start(kernel, 2 * WARPGROUP, nbytes, *ring_arguments[:3], seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_ring_of_operands(ring_arguments, seed):
    """All warps have read a stage once one of them knows that the product has finished: then it is released."""
    kernel, nbytes = multiplier()
    start(kernel, 2 * WARPGROUP, nbytes, *ring_arguments[:3], seed=seed)
    _, z, _, x = ring_arguments
    tiles = np.zeros((256, 64), np.float32)
    tiles[:250] = x[0, 0]
    want = sum(tile @ tile.T for tile in tiles.reshape(4, 64, 64))
    np.testing.assert_allclose(z, want, atol=1e-3)


def test_a_product_of_no_columns_is_one_that_is_waited_for():
    """A wait counts products: that before it is there, and may be read."""
    shared, SUMS, NOTHING, COPY = SharedMemory(), wgmma(64), wgmma(0), copy_layout(64, 64, WARPGROUP, 8)
    X, Y = shared.boxes(64, 64, np.float16), shared.boxes(64, 0, np.float16)

    def kernel(x, z):
        put(allocate(X), load(x, COPY, 0))
        fence_async_proxy()
        sync_warpgroup()
        S = dot(SUMS, allocate(X), allocate(X).T)
        O = dot(full(NOTHING, np.float32(0)), operand(full(SUMS, np.float32(1)), Y), allocate(Y))
        S = wgmma_wait(S, 1)
        save(z, S, 0)
        save(z, wgmma_wait(O, 0), 0)

    x, z = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float16), poisoned((64, 64))
    launch(kernel, (1, 1, 1), WARPGROUP, shared.nbytes, x, z, cc=(9, 0, "a"))
    np.testing.assert_allclose(z, x.astype(np.float32) @ x.astype(np.float32).T, atol=1e-3)


def test_a_positive_operand():
    shared, SUMS, COPY = SharedMemory(), wgmma(64), copy_layout(64, 64, WARPGROUP, 8)
    X = shared.boxes(64, 64, np.float16)

    def kernel(x, one, z):
        put(allocate(X), load(one, COPY, 0))
        fence_async_proxy()
        sync_warpgroup()
        left = positive_operand(load(x, SUMS, 0), X)
        save(z, wgmma_wait(dot(SUMS, left, allocate(X)), 0), 0)

    x = np.arange(-2048, 2048, dtype=np.float32).reshape(64, 64)
    z = poisoned((64, 64))
    launch(kernel, (1, 1, 1), WARPGROUP, shared.nbytes, x, np.eye(64, dtype=np.float16), z, cc=(9, 0, "a"))
    np.testing.assert_array_equal(z, np.maximum(x, 0))


FAULTS = {
    "sync.aligned {later.literal_value};": "sync.aligned {later.literal_value + 1};",
    'asm(b, "wgmma.fence.sync.aligned;", VOID, effect=True)': "pass",
    'asm(b, "wgmma.commit_group.sync.aligned;", VOID, effect=True)': "pass",
    "{int(sums[0] is not None)}": "1",
    "depth if cols else 0": "depth",
    "== bool(k_axis)": "!= bool(k_axis)",
    "k // 4 + i": "k // 8 + i",
    "nbytes = k * ROW_BYTES": "nbytes = k * CHUNK_BYTES",
    "box * plan.box_bytes + col": "col",
    "lead = plan.box_bytes if": "lead = CHUNK_BYTES if",
    "(*upper[c : c + 2], *lower[c : c + 2])": "(*lower[c : c + 2], *upper[c : c + 2])",
    "over = _products().phases - later": "over = _products().phases",
    "    shared_memory().note_end(unit, over)\n": "",
    "shared.merge_waits(self.threads)": "super().meet(shared)",
    "(work, products.threads)": "(work,)",
    "products.of != (acc.layout, tile, y)": "False",
}
