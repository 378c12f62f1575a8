"""Keys and values in a cache: the places of tokens in pages, numbers of fewer bits than q, and scales of those of 8.

S = Q K^T is multiplied by the scale of each key, and P, after its rows have been summed, by that of each value. In int8
each token has a scale; in float8 each head has one, so that O is multiplied instead of P.
"""

from typing import Any, NamedTuple

import numpy as np

from ...tile import (
    WARP,
    Alignment,
    aligned,
    allocate,
    copy_async,
    device,
    get,
    rows_of_pages,
    simt,
    thread_index,
)
from ...words.signatures import array_type
from .layouts import DTYPES

EIGHT_BITS = {"int8": np.dtype(np.int8), "float8_e4m3fn": np.dtype(np.uint8)}  # the dtypes of the arrays that hold them


class CacheSteps(NamedTuple):
    """Device functions. `cache` is the tuple of a cache's other arrays: the table, the scales of k, those of v."""

    dtype: Any  # of the arrays k and v
    widened: Any  # the dtype in which their tiles in shared memory are multiplied, None if it is the same
    rows_of: Any  # (matrices, cache, work, keys, alignment) -> the first keys of a head of a sequence, as a matrix
    load_k: Any  # (cache, work, keys, n0): start to copy the scales of a tile of keys to the warp's place for them
    load_v: Any
    of_keys: Any  # (S, cache, work) -> S times the scales of the keys
    of_values: Any  # (P, cache, work) -> P times the scales of the values
    of_sums: Any  # (O, cache, work) -> O times the remaining factors
    types: list  # of the tuple


def cached(shared, dtype, held, layout, page_size, warps):
    """The CacheSteps of k and v, which have the dtype of q, or the one named `held`. layout: of S, a tile for each
    warp."""
    first, tokens_of = int(bool(page_size)), tokens_step(page_size)
    tables = [array_type(np.int32, 2)] * first

    @device
    def rows_of(matrices, cache, work, keys, alignment):
        return tokens_of(matrices, cache, work.batch, work.head_k, keys, alignment)

    if held not in EIGHT_BITS:
        about = (dtype, None) if held is None else (DTYPES[held], dtype)
        return CacheSteps(*about, rows_of, *[no_scales] * 2, *[unscaled] * 3, tables)
    if held == "int8":
        more = 64 if dtype == np.float16 else 1                 # P times a small scale would be subnormal
        load_k, of_keys = scale_of_tokens(shared, layout, warps, rows_of, first, 1)
        load_v, of_values = scale_of_tokens(shared, layout, warps, rows_of, first + 1, more)
        functions = load_k, load_v, of_keys, of_values, times(1 / more) if more > 1 else unscaled
        scales = [array_type(np.float32, 4)] * 2
    else:
        functions = no_scales, no_scales, scale_of_head(first), unscaled, scale_of_head(first + 1)
        scales = [array_type(np.float32, 1)] * 2
    return CacheSteps(EIGHT_BITS[held], dtype, rows_of, *functions, [*tables, *scales])


def tokens_step(page_size):
    """The device function (matrices, tables, batch, head, count, alignment) -> the first tokens of a head of a
    sequence, as a matrix. page_size: 0 without pages; else the table is the first of `tables`."""
    PAGE_SIZE = page_size

    @device
    def of_sequence(matrices, tables, batch, head, count, alignment):
        return aligned(matrices[batch, head][:count], alignment)

    @device
    def of_pages(matrices, tables, batch, head, count, alignment):
        return rows_of_pages(matrices[:, head], tables[0][batch], count, alignment, PAGE_SIZE)

    return of_pages if page_size else of_sequence


@device
def no_scales(cache, work, keys, n0):
    pass


@device
def unscaled(X, cache, work):
    return X


def times(number):
    NUMBER = np.float32(number)

    @device
    def scaled(X, cache, work):
        return X * NUMBER

    return scaled


def scale_of_tokens(shared, layout, warps, rows_of, at, more):
    """Device functions `load` and `scaled` for the scales of tokens, `cache[at]`, a column for each head, times `more`.
    """
    PLACE, AT, MORE = shared.tile(1, layout.cols.size, np.float32, stages=warps), at, np.float32(more)
    COLUMN, OF_KEYS, ONES = simt(layout.cols.size, 1, WARP, 1, 1), layout.col_vector(), Alignment(0)

    @device
    def load(cache, work, keys, n0):
        copy_async(allocate(PLACE, thread_index() // WARP).T, rows_of(cache[AT], cache, work, keys, ONES), COLUMN, n0)

    @device
    def scaled(X, cache, work):
        return X * (get(allocate(PLACE, thread_index() // WARP), OF_KEYS) * MORE)

    return load, scaled


def scale_of_head(at):
    AT = at

    @device
    def scaled(X, cache, work):
        return X * cache[AT][work.head_k]

    return scaled
