"""From NumPy arrays to running kernels: tables of addresses, compiled code cached on disk, threads."""

import itertools
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
import scipy.linalg.cython_blas  # noqa: F401  loads the BLAS that Numba's products call
from threadpoolctl import ThreadpoolController

from ..cache import cache_dir, sources_digest


class Heads(NamedTuple):
    """Where the matrix of each (batch, head) lies: one type for all shapes, strides, broadcasts and head groups."""

    at: Any  # int64 (batch, heads), addresses
    rows: int
    cols: int
    stride: int  # elements from one row to the next


class Visibility(NamedTuple):
    """A mask's band and grids as numbers."""

    bands: Any  # int64 (batch, heads, 4): lo, hi, queries, keys
    cells: Any  # int64 (grids, batch, heads), addresses of uint8 matrices
    grids: Any  # int64 (grids, 5): rows and row stride of the cells; rows, columns and packed of a cell


class Drops(NamedTuple):
    """A Dropout as numbers; threshold 0 drops nothing."""

    threshold: Any
    offset: Any
    k0: Any
    k1: Any


def readable(x, dtype):
    """x itself if BLAS can read its matrices in `dtype`, else a copy."""
    rows, cols = x.shape[-2:]
    row, col = (stride // x.itemsize for stride in x.strides[-2:])
    fits = all(stride % x.itemsize == 0 for stride in x.strides) and x.flags.aligned
    if x.dtype == dtype and fits and (col == 1 or cols <= 1) and (row >= max(cols, 1) or rows <= 1):
        return x
    return np.ascontiguousarray(x, dtype)


def heads_of(x, problem):
    """The Heads of an array (..., heads, rows, columns), broadcast to the problem's batch axes. Keep x alive."""
    rows, cols = x.shape[-2:]
    x = x.reshape((1,) * (3 - x.ndim) + x.shape) if x.ndim < 3 else x
    axes = [np.arange(size) * stride for size, stride in zip(x.shape[:-2], x.strides)]
    axes[-1] = np.repeat(axes[-1], problem.heads // max(x.shape[-3], 1))
    at = x.__array_interface__["data"][0] + sum(np.ix_(*axes))
    at = np.broadcast_to(at, (*problem.batch[:-1], problem.heads)).reshape(problem.matrices)
    return Heads(np.ascontiguousarray(at, np.int64), rows, cols, max(x.strides[-2] // x.itemsize, cols, 1))


def visibility_of(problem, mask):
    """The Visibility of a mask, and the arrays to keep alive."""
    band = mask.band(problem.seqlen_q, problem.seqlen_k)
    bands = [np.broadcast_to(np.asarray(x, np.int64), problem.batch).reshape(problem.matrices) for x in band]
    grids = [grid._replace(cells=readable(grid.cells, np.uint8)) for grid in mask.grids()]
    heads = [heads_of(grid.cells, problem) for grid in grids]
    numbers = [(h.rows, h.stride, g.rows, g.cols, g.packed) for g, h in zip(grids, heads)]
    visibility = Visibility(
        np.stack(bands, axis=-1),
        np.array([h.at for h in heads], np.int64).reshape(len(grids), *problem.matrices),
        np.array(numbers, np.int64).reshape(len(grids), 5),
    )
    return visibility, grids


def drops_of(dropout):
    """The Drops of a Dropout or of None, and the scale of what is kept."""
    if dropout is None:
        return Drops(*[np.uint64(0)] * 4), 1.0
    return Drops(*map(np.uint64, (dropout.threshold, dropout.offset, *dropout.key))), dropout.scale


# ------------------------------------------------------------------------------------------------------------ compile
def kernel(function):
    """Compile with Numba when first called, cached on disk.

    Numba's cache looks at the file of the function only, so each state of this package's sources has its own folder.
    Where no file can be written there is no cache.
    """

    @cache
    def compiled():
        place, before = _cache_dir(), numba.config.CACHE_DIR
        if place is None:
            return numba.njit(nogil=True)(function)
        numba.config.CACHE_DIR = place
        try:
            return numba.njit(nogil=True, cache=True)(function)
        finally:
            numba.config.CACHE_DIR = before

    return compiled


def _cache_dir():
    place = cache_dir("cpu") / sources_digest("*.py", "cpu/*.py")[:16]
    try:
        place.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
    except OSError:
        return None
    return str(place)


# ------------------------------------------------------------------------------------------------------------ threads
def launch(compiled, blocks, *args):
    """Call compiled(first, last, *args) for all blocks, a few at a time, on as many threads as Numba may use."""
    if blocks == 0:
        return
    workers = min(numba.get_num_threads(), blocks)
    step = max(1, blocks // (8 * workers))
    starts = itertools.count(0, step)  # next() is atomic: who is free takes the next blocks

    def work():
        for first in starts:
            if first >= blocks:
                return
            compiled(first, min(first + step, blocks), *args)

    with _blas_on_one_thread():
        others = [_pool().submit(work) for _ in range(workers - 1)]
        work()
        for other in others:
            other.result()


@cache
def _pool():
    return ThreadPoolExecutor(max(1, numba.config.NUMBA_NUM_THREADS - 1), "numbattn")


@cache
def _blas():
    return ThreadpoolController().select(user_api="blas")




_lock, _users, _limit = threading.Lock(), 0, None


@contextmanager
def _blas_on_one_thread():
    """Each of our threads calls BLAS, which is not to start more. Calls may overlap: the last to leave restores."""
    global _users, _limit
    with _lock:
        if _users == 0:
            _limit = _blas().limit(limits=1)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _limit.restore_original_limits()


def _after_fork():
    """A child process has none of its parent's threads."""
    global _lock, _users
    _lock, _users = threading.Lock(), 0
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
