"""What may happen around a call on a GPU: memory that runs out, freed arrays, threads, captures, processes, signals."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

pytest.importorskip("cupy")

import cupy

import numbattn as na

from ..accuracy import assert_equal, random, to_numpy
from ..tools.graphs import capture, own_stream

pytestmark = pytest.mark.gpu

SHAPE = 2, 4, 300, 64
DTYPES = pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=["warpgroups", "warps"])


def inputs(rng, dtype=np.float16, shape=SHAPE):
    """q, k, v and do."""
    return [cupy.asarray(random(rng, shape, dtype)) for _ in range(4)]


def results(q, k, v, do):
    """o and the gradients."""
    o, backprop = na.attention_vjp(q, k, v, causal=True)
    return o, *backprop(do, deterministic=True)


def assert_all_equal(got, want):
    for one, other in zip(got, want, strict=True):
        assert_equal(one, other)


# -------------------------------------------------------------------------------------------------------------- memory
@DTYPES
@pytest.mark.parametrize("room", range(4), ids="for {} arrays".format)
def test_out_of_memory_in_the_middle(rng, dtype, room):
    """The error is CuPy's; what was taken is given back, and the next call is right."""
    pool = cupy.cuda.MemoryPool()                               # in that of all tests something may hold a large block
    with cupy.cuda.using_allocator(pool.malloc):
        arrays = inputs(rng, dtype, (8, 16, 1024, 128))
        want = [to_numpy(x) for x in results(*arrays)]
        cupy.cuda.Device().synchronize()
        gc.collect()
        pool.free_all_blocks()
        before = pool.used_bytes()
        pool.set_limit(size=before + room * arrays[0].nbytes + arrays[0].nbytes // 2)
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            results(*arrays)
        assert pool.used_bytes() == before
        pool.set_limit(size=0)
        assert_all_equal(results(*arrays), want)


@DTYPES
def test_arrays_freed_in_flight(rng, dtype):
    """Nobody has to hold the inputs until the GPU has read them."""
    arrays = inputs(rng, dtype)
    want = [to_numpy(x) for x in results(*arrays)]
    for _ in range(20):
        got = results(*(x.copy() for x in arrays))
        others = [cupy.full(SHAPE, cupy.nan, dtype) for _ in range(8)]  # take what was freed
        assert_all_equal(got, want)
        del got, others


@DTYPES
def test_an_asynchronous_allocator(rng, dtype):
    arrays = inputs(rng, dtype)
    want = [to_numpy(x) for x in results(*arrays)]
    with cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc):
        for _ in range(5):
            assert_all_equal(results(*(x.copy() for x in arrays)), want)


@DTYPES
def test_many_fresh_arrays(rng, dtype):
    """At addresses that no call has seen: nothing is kept of them but some numbers."""
    q, k, v, do = inputs(rng, dtype, (1, 2, 64, 64))
    want, buffer = na.attention(q, k, v), cupy.empty((3, 4096, *q.shape), dtype)
    buffer[...] = cupy.stack([q, k, v])[:, None]
    used = cupy.get_default_memory_pool().used_bytes()
    wrong = cupy.zeros((), np.int64)
    for i in range(buffer.shape[1]):
        wrong += (na.attention(*buffer[:, i]) != want).any()
    assert int(wrong) == 0
    del wrong
    assert cupy.get_default_memory_pool().used_bytes() == used


# -------------------------------------------------------------------------------------------------- threads and streams
@DTYPES
def test_threads_with_a_stream_each(rng, dtype):
    arrays = inputs(rng, dtype)
    want, failed = [to_numpy(x) for x in results(*arrays)], []
    cupy.cuda.Device().synchronize()

    def work():
        try:
            with cupy.cuda.Stream(non_blocking=True) as stream:
                for _ in range(30):
                    got = results(*arrays)
                    stream.synchronize()
                    assert_all_equal(got, want)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@DTYPES
def test_the_default_stream_of_each_thread(rng, dtype):
    arrays = inputs(rng, dtype)
    want = [to_numpy(x) for x in results(*arrays)]
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream.ptds:
        got = results(*arrays)
        cupy.cuda.Stream.ptds.synchronize()
        assert_all_equal(got, want)


def test_capture_of_a_kernel_that_is_not_built(rng, tmp_path, monkeypatch):
    """It is built meanwhile; the capture goes on."""
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path))
    q, k, v, _ = inputs(rng, np.float32, (1, 3, 77, 24))
    mask = na.Bits(cupy.asarray(rng.integers(1, 2**32, (1, 3, 77, 3), np.uint32)))
    with own_stream() as stream:
        cupy.empty(q.shape, q.dtype)    # in the pool: none is to be taken from the device while capturing
        o, graph = capture(lambda: na.attention(q, k, v, mask=mask, dropout=na.Dropout(0.3, seed=1)))
        graph.launch()
        stream.synchronize()
        assert_equal(o, na.attention(q, k, v, mask=mask, dropout=na.Dropout(0.3, seed=1)))


# ------------------------------------------------------------------------------------------------ processes and signals
PRINT_SUMS = """
    import cupy, numpy as np, numbattn as na
    x = cupy.asarray(np.random.default_rng(0).standard_normal((4, 2, 100, 64)).astype(np.float16))
    o, backprop = na.attention_vjp(*x[:3], causal=True)
    print(*(float(abs(y).sum()) for y in (o, *backprop(x[3]))))
"""


def process(code, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env=os.environ | environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_processes_at_once_on_an_empty_cache(tmp_path):
    processes = [process(PRINT_SUMS, NUMBATTN_CACHE_DIR=str(tmp_path)) for _ in range(8)]
    said = [each.communicate(timeout=300) for each in processes]
    assert all(not error for _, error in said), said
    assert len({out for out, _ in said}) == 1
    assert len(said[0][0].split()) == 4


@pytest.mark.skipif(os.name == "nt", reason="os.kill ends the process there")
def test_an_interrupted_process_goes_on():
    """KeyboardInterrupt at any moment of a call leaves the next ones right."""
    run = process("""
        import os, signal, threading, time
        import cupy, numpy as np, numbattn as na
        x = cupy.asarray(np.random.default_rng(0).standard_normal((3, 2, 100, 64)).astype(np.float16))
        want = na.attention(*x)
        for i in range(20):
            try:
                threading.Timer(0.01 + 0.0003 * i, os.kill, (os.getpid(), signal.SIGINT)).start()
                while True:
                    na.attention(*x)
            except KeyboardInterrupt:
                assert (na.attention(*x) == want).all()
        print("right")
    """)
    out, error = run.communicate(timeout=300)
    assert (out, run.returncode) == ("right\n", 0), error


def test_signals_are_python_s():
    """Nothing here installs a handler."""
    before = signal.getsignal(signal.SIGINT)
    na.attention(*cupy.zeros((3, 4, 4)))
    assert signal.getsignal(signal.SIGINT) is before
