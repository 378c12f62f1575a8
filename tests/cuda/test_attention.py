"""What CuPy arrays bring with them: streams, graphs, memory pools, devices, sizes. Results as such: see test_api.py."""

import gc
import os

import numpy as np
import pytest

pytest.importorskip("cupy")

import cupy

import numbattn as na
from numbattn.call.problem import DTYPES

from ..accuracy import assert_equal, check, random, to_numpy
from ..tools.graphs import capture, own_stream

pytestmark = pytest.mark.gpu

B, H, HEADS_K, M, N, D = 2, 4, 2, 150, 270, 40
HALF = DTYPES[:2]
OPTIONS = {
    "plain": lambda rng: {},
    "dropout": lambda rng: {"causal": True, "dropout": na.Dropout(0.3, seed=5)},
    "bands": lambda rng: {"mask": na.Lengths(rng.integers(1, N + 1, (B, 1))) & na.Window(100, 9, offset=30)},
    "dense": lambda rng: {"mask": na.Dense(rng.random((B, 1, M, N)) < 0.5)},
    "bits": lambda rng: {"mask": na.Bits.pack(rng.random((1, H, M, N)) < 0.5) & na.Causal()},
    "blocks": lambda rng: {"mask": na.BlockSparse(rng.random((1, H, 5, 6)) < 0.5, (32, 48)), "causal": True},
    "tail": lambda rng: {"mask": na.Tail(rng.random((B, 1, M, M)) < 0.5)},
}


@pytest.fixture(params=OPTIONS)
def options(request, rng):
    """Options of a call; the arrays in masks are CuPy's."""
    found = OPTIONS[request.param](rng)
    return {name: x._like(cupy.empty(0)) if name == "mask" else x for name, x in found.items()}


def inputs(rng, dtype=np.float32):
    """q, k, v and do: grouped heads, v the same for all of the batch."""
    shapes = (B, H, M, D), (B, HEADS_K, N, D), (1, HEADS_K, N, D), (B, H, M, D)
    return [cupy.asarray(random(rng, shape, dtype)) for shape in shapes]


def run(q, k, v, do, **options):
    """o, lse, dq, dk, dv"""
    o, saved = na.attention_forward(q, k, v, **options)
    return o, saved.lse, *na.attention_backward(do, saved, deterministic=True)


def assert_all_equal(got, want):
    for one, other in zip(got, want):
        assert_equal(one, other)


# ------------------------------------------------------------------------------------------------------------ results
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("d", "e"), [(8, 8), (40, 24), (64, 64), (80, 96), (128, 128), (192, 128), (256, 256)])
def test_head_dims(rng, d, e, dtype):
    q, k, v = (random(rng, shape, dtype) for shape in ((2, 150, d), (1, 200, d), (1, 200, e)))
    check(q, k, v, rng, cupy, causal=True, dropout=na.Dropout(0.2, seed=5))


@pytest.mark.parametrize(("d", "e", "name"), [(300, 8, "head_dim"), (8, 300, "head_dim_v")])
def test_tangents_end_at_256(d, e, name):
    q, k, v = cupy.zeros((5, d)), cupy.zeros((7, d)), cupy.zeros((7, e))
    with pytest.raises(ValueError, match=f"{name}: got 300, at most 256"):
        na.attention_jvp(q, k, v, q, None, None)


def test_cpu_and_gpu_agree(rng, options):
    arrays = inputs(rng)
    on_cpu = {name: x._like(np.empty(0)) if name == "mask" else x for name, x in options.items()}
    for got, want in zip(run(*arrays, **options), run(*map(to_numpy, arrays), **on_cpu)):
        np.testing.assert_allclose(to_numpy(got), want, rtol=1e-5, atol=1e-5 * np.abs(want[np.isfinite(want)]).max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_equal_bit_for_bit(rng, dtype):
    arrays = inputs(rng, dtype)
    first = run(*arrays, causal=True)
    for _ in range(20):
        assert_all_equal(run(*arrays, causal=True), first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_is_written(rng, dtype, options):
    """Memory that is not cleared, out included, is full of NaN."""
    *qkv, do = inputs(rng, dtype)
    want = run(*qkv, do, **options)
    poison = [cupy.asarray(np.full(x.shape, np.nan, x.dtype)) for _ in range(3) for x in want]
    out = cupy.asarray(np.full((B, M, H, D), np.nan, dtype)).swapaxes(1, 2)
    del poison
    got = run(*qkv, do, out=out, **options)
    assert got[0] is out
    assert_all_equal(got, want)


def test_numpy_arrays_in_masks(rng, options):
    arrays = inputs(rng)
    want = run(*arrays, **options)
    if "mask" in options:
        options["mask"] = options["mask"]._like(np.empty(0))
    assert_all_equal(run(*arrays, **options), want)


def test_lengths_out_of_range_are_clamped(rng):
    arrays = inputs(rng)
    keys, queries = rng.integers(-N, 2 * N, (B, 1)), rng.integers(-M, 2 * M, (B, H))
    want = run(*arrays, mask=na.Lengths(keys.clip(0, N), queries.clip(0, M)))
    assert_all_equal(run(*arrays, mask=na.Lengths(cupy.asarray(keys), cupy.asarray(queries))), want)


def test_out_must_not_overlap_an_input(rng):
    qo = cupy.asarray(random(rng, (M, 2, D), np.float32))
    k = cupy.asarray(random(rng, (N, D), np.float32))
    with pytest.raises(ValueError, match="out: overlaps q"):
        na.attention(qo[:-1, 0], k, k, out=qo[1:, 0])
    want = na.attention(qo[:, 0], k, k)     # side by side in one array is no overlap
    assert_equal(na.attention(qo[:, 0], k, k, out=qo[:, 1]), want)


def test_libraries_do_not_mix(rng):
    q, k, v, _ = inputs(rng)
    with pytest.raises(TypeError, match=r"q is a numpy.ndarray, k is a cupy.ndarray, v is a cupy.ndarray"):
        na.attention(q.get(), k, v)
    with pytest.raises(TypeError, match=r"q is a cupy.ndarray, out is a numpy.ndarray"):
        na.attention(q, k, v, out=q.get())
    with pytest.raises(TypeError, match=r"Lengths keys: got a cupy.ndarray with inputs of numpy"):
        na.attention(q.get(), k.get(), v.get(), mask=na.Lengths(cupy.ones((B, 1), int)))


# -------------------------------------------------------------------------------------------------- streams and graphs
def test_work_is_queued_on_the_current_stream(rng, options):
    q, *others = inputs(rng)
    values = q.copy()
    want = run(q, *others, **options)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        for _ in range(2):  # what takes its time when first used has been used when it matters
            q.fill(np.nan)
            zeros = cupy.zeros(1 << 26, np.float32)
            for _ in range(200):
                cupy.sin(zeros, out=zeros)
            cupy.add(values, zeros[0], out=q)
            got = run(q, *others, **options)
            q.fill(np.nan)
        assert_all_equal(got, want)


@pytest.mark.parametrize(("d", "e"), [(64, 64), (128, 128), (100, 64), (64, 128)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(rng, d, e, deterministic):
    """Several tiles on either side: whole ones, those with edges, and some that nobody sees."""
    q, k, v = (random(rng, shape, HALF[1]) for shape in ((2, 4, 700, d), (2, 2, 900, d), (2, 2, 900, e)))
    lengths = na.Lengths(cupy.array([[900, 300, 64, 1]] * 2), cupy.array([[700, 130, 700, 0]] * 2))
    for options in ({}, {"causal": True}, {"mask": na.Window(200, 50)}, {"mask": lengths}):
        check(q, k, v, rng, cupy, deterministic=deterministic, **options)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_again_and_again(rng, d, dtype, causal):
    """Bit for bit, if that is asked for; else dq differs in last bits."""
    q, k, v, do = (cupy.asarray(random(rng, (2, 8, 1500, d), dtype)) for _ in range(4))
    o, saved = na.attention_forward(q, k, v, causal=causal)
    want = na.attention_backward(do, saved, deterministic=True)
    for _ in range(30):
        assert_all_equal(na.attention_backward(do, saved, deterministic=True), want)
    for _ in range(30):
        for got, one in zip(na.attention_backward(do, saved), want):
            got, one = got.astype(np.float32), one.astype(np.float32)
            assert abs(got - one).max() <= 2e-2 * abs(one).max()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_call_sees_what_the_call_before_has_written(rng, dtype):
    """On Hopper a kernel starts while the one before still runs."""
    q, k, v = (cupy.asarray(random(rng, (4, 8, 1000, 64), dtype)) for _ in range(3))
    waited = chained = q
    for _ in range(10):
        waited = na.attention(waited, k, v, causal=True)
        cupy.cuda.get_current_stream().synchronize()
    for _ in range(10):
        chained = na.attention(chained, k, v, causal=True)
    assert_equal(chained, waited)


def test_graphs(rng, options):
    """A captured call is repeated with what its inputs are then, whatever is allocated in between.

    Whatever waits for the device, or copies from it, cannot be captured.
    """
    arrays = inputs(rng)
    with own_stream():
        run(*arrays, **options)     # compiles
        results, graph = capture(lambda: run(*arrays, **options))
        for _ in range(3):
            for x, new in zip(arrays, inputs(rng)):
                x[...] = new
            want = run(*arrays, **options)
            for _ in range(3):      # who took memory that is the graph's would see NaN, or leave it there
                others = [cupy.full_like(x, np.nan) for x in (*arrays, *results) for _ in range(3)]
                others += [cupy.full(B, np.nan) for _ in range(100)]    # as large as a mask's
            graph.launch()
            assert_all_equal(results, want)
            assert all(np.isnan(to_numpy(x)).all() for x in others)
            del others, want


@pytest.mark.parametrize("size", [16, 64])
def test_graphs_of_blocks_chosen_on_the_device(rng, size):
    """Made of what the indices are then; what is out of range is dropped."""
    q, k, v, do = (cupy.asarray(random(rng, (2, 4, 700, 64), np.float16)) for _ in range(4))
    count = -(-700 // size)
    indices = cupy.asarray(rng.integers(-2, count + 2, (2, 4, count, 5), np.int32))
    counts = cupy.asarray(rng.integers(0, 9, (4, count)))

    def step():
        mask = na.BlockSparse.from_indices(indices, counts, shape=(700, 700), block_size=(size, size))
        o, saved = na.attention_forward(q, k, v, mask=mask)
        return mask, o, *na.attention_backward(do, saved)

    with own_stream():
        step()
        (mask, *results), graph = capture(step)
        indices[...] = cupy.roll(indices, 1, axis=2)
        graph.launch()
        chosen = indices[..., None] == cupy.arange(count)
        chosen = (chosen & (cupy.arange(5) < counts[..., None])[..., None]).any(axis=-2)
        assert_all_equal([mask.blocks], [chosen])
        _, saved = na.attention_forward(q, k, v, mask=na.Dense(mask.dense(700, 700)))
        for got, want in zip(results, (saved.o, *na.attention_backward(do, saved))):
            got, want = got.astype(np.float32), want.astype(np.float32)
            assert abs(got - want).max() <= 2e-2 * abs(want).max()


def test_graphs_keep_what_nobody_sees(rng):
    """`attention` returns no lse: the graph alone holds the memory that it is written to."""
    q, k, v, _ = inputs(rng)
    with own_stream():
        want = na.attention(q, k, v)
        o, graph = capture(lambda: na.attention(q, k, v))
        others = [cupy.full((B, H, M), np.nan, np.float32) for _ in range(100)]
        graph.launch()
        assert_equal(o, want)
        assert all(np.isnan(to_numpy(x)).all() for x in others)


# ------------------------------------------------------------------------------------------------- memory and devices
def test_memory_comes_from_the_pool_and_goes_back(rng, options):
    arrays, pool = inputs(rng), cupy.get_default_memory_pool()
    for _ in range(3):
        run(*arrays, **options)
    taken = []
    for calls in (1, 1000):
        for _ in range(calls):
            run(*arrays, **options)
        cupy.cuda.Device().synchronize()
        gc.collect()
        free, _ = cupy.cuda.runtime.memGetInfo()
        taken.append((pool.used_bytes(), pool.total_bytes(), free if alone() else None))
    assert taken[0] == taken[1]


def alone():
    """Whether no other process of these tests uses the device."""
    return os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1"


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "do", "dlse"])
def test_arrays_of_another_device(name):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one device")
    arrays = {other: cupy.zeros((5, 8)) for other in ("q", "k", "v", "out", "do")} | {"dlse": cupy.zeros(5)}
    with cupy.cuda.Device(1):
        arrays[name] = cupy.zeros(arrays[name].shape)

    def both(do, dlse, **arrays):
        _, saved = na.attention_forward(**arrays)
        na.attention_backward(do, saved, dlse=dlse)

    with pytest.raises(ValueError, match=f"{name}: got an array of device 1, expected device 0"):
        both(**arrays)


# -------------------------------------------------------------------------------------------------------------- sizes
@pytest.mark.parametrize("lead", [(70000, 1), (70000,), (300, 1, 250)])
def test_many_small_matrices(rng, lead):
    """More than the 65535 blocks that fit the other axes of a CUDA grid."""
    shapes = (*lead, 2, 8), (*lead, 3, 8), (*lead, 3, 8)
    check(*(random(rng, shape, np.float32) for shape in shapes), rng, cupy, causal=True)


def test_more_than_2_31_elements(rng):
    rows = 17_000_000
    if cupy.cuda.runtime.memGetInfo()[0] < 40 << 30:
        pytest.skip("takes 40 GB of memory")
    few, k, v = (cupy.asarray(random(rng, shape, np.float16)) for shape in ((2, 1000, 128), (16, 128), (16, 128)))
    q = cupy.empty((rows, 128), np.float16)
    q.reshape(-1, 1000, 128)[...] = few[0]
    q[-1000:] = few[1]
    assert q.size > 2**31
    o, _, dq, _, _ = run(q, k, v, q)
    for part, x in ((slice(1000), few[0]), (slice(-2000, -1000), few[0]), (slice(-1000, None), few[1])):
        o_alone, _, dq_alone, _, _ = run(x, k, v, x)
        np.testing.assert_allclose(to_numpy(o[part]), to_numpy(o_alone), atol=2e-3)
        np.testing.assert_allclose(to_numpy(dq[part]), to_numpy(dq_alone), rtol=1e-2, atol=1e-2)


# ---------------------------------------------------------------------------------------------------------- cuda.jit
def test_kernels_are_ordinary_kernels_of_numba(rng):
    """What a factory returns runs with cuda.jit, too."""
    from numba import cuda

    from numbattn.base.origin import Origin
    from numbattn.cuda.kernels.any.forward import forward
    from numbattn.cuda.kernels.shared.dropout import Drops
    from numbattn.cuda.kernels.shared.visibility import MaskArgs
    from numbattn.cuda.kernels.tables import Tiles

    source = forward(
        dtype="float32", out_dtypes=("float32",), head_dim=32, head_dim_v=32,
        tiles=Tiles("fma", 32, 32, 128, 8), mask=(), score=(), dropout=False, nbytes=16,
    )  # fmt: skip
    q, k, v = (cupy.asarray(random(rng, (16, 3, 100, 32), np.float32)) for _ in range(3))
    o, (lse, low) = cupy.full_like(q, cupy.nan), cupy.full((2, *q.shape[:3]), cupy.nan, np.float32)
    causal = MaskArgs(*map(np.int32, (-100, 0, 100, 100)))
    origin = Origin(*map(np.int32, Origin()))
    numbers = np.int32(1), np.float32(32**-0.5 * np.log2(np.e)), np.float32(1)
    blocks = 16 * 3 * -(-100 // 32)
    kernel = cuda.jit(source.function)
    kernel[blocks, source.threads, 0, source.shared](
        q, k, v, o, (), lse, low, causal, (), Drops(np.uint32(0), *[np.uint64(0)] * 3, np.int32(0), origin), *numbers
    )
    want, saved = na.attention_forward(q, k, v, causal=True)
    np.testing.assert_allclose(to_numpy(o), to_numpy(want), atol=1e-5)
    np.testing.assert_allclose(to_numpy(lse), to_numpy(saved.lse), atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- decoding
def decoding(rng, batch=3, heads=8, heads_k=2, m=1, n=5000, d=128, dtype=HALF[0]):
    shapes = (batch, heads, m, d), (batch, heads_k, n, d), (batch, heads_k, n, d)
    return [cupy.asarray(random(rng, shape, dtype)) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "d"), [(1, 64), (4, 128), (16, 128), (3, 256)])
def test_few_queries(rng, m, d, dtype):
    """Of several chunks, by the lengths of sequences."""
    q, k, v = decoding(rng, m=m, d=d, dtype=dtype)
    lengths = cupy.asarray([[5000], [17], [2049]], np.int32)
    mask = na.Lengths(lengths) & na.Causal(offset=lengths - m)
    o, saved = na.attention_forward(q, k, v, mask=mask)
    wide, wide_saved = na.attention_forward(*(x.astype(np.float64) for x in (q, k, v)), mask=mask)
    assert float(abs(o.astype(np.float64) - wide).max()) < {2: 2e-2, 4: 1e-4, 8: 1e-12}[dtype.itemsize]
    assert float(abs(saved.lse - wide_saved.lse).max()) < {2: 1e-4, 4: 1e-4, 8: 1e-12}[dtype.itemsize]


def test_a_sequence_alone_and_in_a_batch(rng):
    q, k, v = decoding(rng, batch=64, heads=32)
    lengths = cupy.asarray(rng.integers(0, 5001, (64, 1)), np.int32)
    o = na.attention(q, k, v, mask=na.Lengths(lengths))
    for b in (0, 31, 63):
        n, one = int(lengths[b, 0]), slice(b, b + 1)
        alone = na.attention(q[one], k[one, :, :n], v[one, :, :n]) if n else cupy.zeros_like(q[one])
        assert_equal(o[one], alone)


def test_one_graph_serves_while_a_cache_grows(rng):
    q, k, v = decoding(rng, m=2, n=600)
    cache = na.KVCache.zeros(3, 2, 3000, 128, like=q)
    cache.append(k, v)
    new, out = [x[:, :, :2].copy() for x in (k, v)], cupy.empty_like(q)

    def step():
        cache.append(*new)
        na.attention(q, cache, causal=True, out=out)

    with own_stream() as stream:
        step()
        _, graph = capture(step)
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
    n = 600 + 2 * 4
    assert cache.lengths.get().tolist() == [n] * 3
    assert_equal(out, na.attention(q, cache.k[:, :, :n], cache.v[:, :, :n], causal=True))


@pytest.mark.parametrize("page_size", [7, 16, 64, 256])
def test_pages_make_no_difference(rng, page_size):
    """Not to a bit."""
    q, k, v = decoding(rng, m=3, n=2500)
    contiguous, paged = (na.KVCache.zeros(3, 2, 2500, 128, like=q, page_size=size) for size in (None, page_size))
    paged.table[...] = cupy.asarray(rng.permutation(paged.table.size).reshape(paged.table.shape))
    for cache in (contiguous, paged):
        cache.append(k, v)
    paged.table[:, -(-2500 // page_size) :] = 2147480000
    assert_equal(na.attention(q, paged, causal=True), na.attention(q, contiguous, causal=True))


def test_ragged_queries(rng):
    """Offsets on the GPU; one token, none, and a few."""
    q, k, v = decoding(rng, n=300)
    cache = na.KVCache.zeros(3, 2, 300, 128, like=q, page_size=16)
    cache.append(k, v)
    offsets = np.array([0, 1, 1, 6])
    packed = cupy.asarray(rng.standard_normal((q.shape[1], 6, 128), np.float32)).astype(q.dtype)
    mask = na.Segments(cupy.asarray(offsets), max_queries=5) & na.Causal()
    o, saved = na.attention_forward(packed, cache, mask=mask)
    for b in (0, 2):
        own = slice(offsets[b], offsets[b + 1])
        want, lse = na.attention_forward(packed[None, :, own], k[b : b + 1], v[b : b + 1], causal=True)
        assert float(abs(o[:, own].astype(np.float64) - want[0].astype(np.float64)).max()) < 1e-2
        assert float(abs(saved.lse[:, own] - lse.lse[0]).max()) < 1e-4
