"""Addresses, threads, caches: what a user notices only when it fails."""

import itertools
import os
import subprocess
import sys
import threading

import numba
import numpy as np
import pytest
from threadpoolctl import threadpool_info

import numbattn as na
from numbattn.cpu import launch
from numbattn.problem import describe


def blas_threads():
    return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]



@pytest.mark.parametrize("shape", [(30, 8), (6, 30, 8), (2, 30, 8), (4, 6, 30, 8), (4, 1, 30, 8), (1, 3, 30, 8)])
def test_heads_of(rng, shape):
    """Entry (b, h) is the address of the matrix that NumPy's broadcasting and head groups give."""
    problem, _ = describe(np.zeros((4, 6, 5, 8)), *np.zeros((2, 4, 6, 30, 8)))
    x = rng.standard_normal((*shape[:-1], 11))[..., :8]
    heads = launch.heads_of(x, problem)
    assert (heads.rows, heads.cols, heads.stride) == (30, 8, 11)
    x4 = x.reshape((1,) * (4 - x.ndim) + shape)
    broadcast = np.broadcast_to(np.repeat(x4, 6 // x4.shape[1], axis=1), (4, 6, 30, 8))
    for b, h in itertools.product(range(4), range(6)):
        first = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_double * 8).from_address(int(heads.at[b, h])))
        np.testing.assert_array_equal(first, broadcast[b, h, 0])


def test_readable_copies_only_what_blas_cannot_read(rng):
    x = rng.standard_normal((2, 3, 10, 8)).astype(np.float32)
    swapped, repeated = x.swapaxes(1, 2).copy().swapaxes(1, 2), np.broadcast_to(x, (4, *x.shape))
    for view in (x, swapped, repeated, x[:, ::-1], x[..., ::2, :5]):
        assert launch.readable(view, np.float32) is view
    for view in (x[..., ::2], x[..., ::-1, :], x[..., ::-1], x.swapaxes(-1, -2), np.broadcast_to(x[:, :, :1], x.shape)):
        copy = launch.readable(view, np.float32)
        assert not np.shares_memory(copy, view)
        np.testing.assert_array_equal(copy, view)
    assert launch.readable(x.astype(np.float16), np.float32).dtype == np.float32


@pytest.mark.parametrize("blocks", [0, 1, 2, 7, 1000])
def test_every_block_runs_once(blocks):
    done = []
    launch.launch(lambda first, last: done.extend(range(first, last)), blocks)
    assert sorted(done) == list(range(blocks))


def test_an_error_in_a_thread_reaches_the_caller():
    def fail(first, last):
        raise ZeroDivisionError(first)

    before = blas_threads()
    with pytest.raises(ZeroDivisionError):
        launch.launch(fail, 100)
    assert blas_threads() == before


def test_blas_has_one_thread_inside_and_its_own_number_outside():
    launch.launch(lambda first, last: None, 1)  # BLAS is loaded and known
    before, inside = blas_threads(), []
    launch.launch(lambda first, last: inside.extend(blas_threads()), 1)
    assert set(inside) == {1}
    assert blas_threads() == before


def test_calls_from_many_threads(rng):
    q, k, v = rng.standard_normal((3, 3, 4, 300, 16))
    want = na.attention(q, k, v, causal=True)
    before, wrong = blas_threads(), []

    def call():
        for _ in range(5):
            wrong.append(not np.array_equal(na.attention(q, k, v, causal=True), want))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [False] * 20
    assert blas_threads() == before


def test_results_do_not_depend_on_the_number_of_threads(rng):
    q, k, v, do = rng.standard_normal((4, 1, 1, 1100, 16)).astype(np.float32)

    def results():
        o, saved = na.attention_forward(q, k, v, causal=True)
        return o, saved.lse, *na.attention_backward(do, saved)

    many, before = results(), numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        one = results()
    finally:
        numba.set_num_threads(before)
    for a, b in zip(many, one):
        np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_can_call(tmp_path):
    """Its parent's threads are not there."""
    code = """
import os, warnings
import numpy as np, numbattn as na
warnings.simplefilter("ignore")
x = np.random.default_rng(0).standard_normal((3, 2, 4, 300, 8))
want = na.attention(*x)
child = os.fork()
if child == 0:
    os._exit(not np.array_equal(na.attention(*x), want))
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


CALL = """
import sys, numpy as np, numbattn as na
na.attention(*np.zeros((3, 4, 4)))
from numbattn.cpu.forward import forward_kernel
print(sum(forward_kernel().stats.cache_hits.values()), sum(forward_kernel().stats.cache_misses.values()))
"""


def call(cache_dir):
    environment = {**os.environ, "NUMBATTN_CACHE_DIR": str(cache_dir)}
    command = [sys.executable, "-c", CALL]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_the_second_process_compiles_nothing(tmp_path):
    assert call(tmp_path) == "0 1\n"
    assert call(tmp_path) == "1 0\n"


def test_an_unwritable_cache_is_no_cache(tmp_path):
    place = tmp_path / "file"
    place.write_text("not a folder")
    assert call(place) == "0 1\n"
    assert call(place) == "0 1\n"
    assert place.read_text() == "not a folder"
