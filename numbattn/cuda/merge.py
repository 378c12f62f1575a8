"""Merge parts of an attention, in the dtype of sums or, in the end, in another one: one pass over memory each."""

from functools import cache, partial
from typing import Any

import numpy as np

from .kernel import launch
from .kernels.shared.schedule import split
from .kernels.shared.softmax import LN_2
from .tile import (
    Alignment,
    aligned,
    block_index,
    copy_layout,
    exp2,
    load,
    log2,
    maximum,
    save,
    shape,
    sync_threads,
    where,
)
from .tile.alignment import alignment_of
from .words.numbers import LOG2_E

THREADS, ROWS = 128, 16  # of a block


def merge_into(out: Any, o: Any, lse: Any, part: Any, part_lse: Any) -> None:
    """As `numbattn.merging.merge_into`. Arrays are contiguous except for their rows; o is finite where lse is -inf."""
    run(merge_kernel, out, (o, part), lse, part_lse)


def sum_into(out: Any, *terms: Any) -> None:
    """As `numbattn.merging.sum_into`, of one or two. Arrays are contiguous except for their rows."""
    run(partial(sum_kernel, len(terms)), out, terms)


def run(kernel_of: Any, out: Any, terms: tuple[Any, ...], *vectors: Any) -> None:
    """Launch a kernel over the same rows of matrices and of vectors, for all heads and elements of the batch."""
    rows, features = out.shape[-2:]
    if out.size:
        nbytes = min(map(alignment_of, (out, *terms)))
        kernel = kernel_of(features, terms[0].dtype, nbytes)
        out, *terms = (x.reshape(-1, rows, features) for x in (out, *terms))
        vectors = [x.reshape(-1, rows) for x in vectors]
        launch(kernel, (-(-rows // ROWS) * len(out), 1, 1), THREADS, 0, out, tuple(terms), *vectors)


def tile_of(features, dtype):
    """The layout of a block's rows."""
    vector = 16 // dtype.itemsize
    return copy_layout(ROWS, -(-features // vector) * vector, THREADS, vector)


@cache
def merge_kernel(features, dtype, nbytes):
    ACC, TILE, ROWS_OF = dtype.type, tile_of(features, dtype), Alignment(nbytes)
    VECTOR, INFINITE, LOG2E, LN2 = TILE.row_vector(), ACC(np.inf), ACC(LOG2_E), ACC(LN_2)

    def kernel(mOut, mTerms, mLse, mPartLse):
        _, seqlen_q, _ = shape(mOut)
        number, tile = split(block_index(), (seqlen_q + ROWS - 1) // ROWS)
        row = tile * ROWS
        lse, part_lse = load(mLse[number], VECTOR, row), load(mPartLse[number], VECTOR, row)
        highest = maximum(lse, part_lse)
        m = where(highest == -INFINITE, 0, highest)  # finite where both are empty, since (-inf) - (-inf) is NaN
        weight, part_weight = exp2((lse - m) * LOG2E), exp2((part_lse - m) * LOG2E)
        l = weight + part_weight
        O = load(aligned(mTerms[0][number], ROWS_OF), TILE, row) * weight
        O = O + load(aligned(mTerms[1][number], ROWS_OF), TILE, row) * part_weight
        save(aligned(mOut[number], ROWS_OF), O * (1 / where(l == 0, 1, l)), row)
        sync_threads()  # all of a row have read its lse
        save(mLse[number], where(highest == INFINITE, highest, m + log2(l) * LN2), row)

    return kernel


@cache
def sum_kernel(terms, features, dtype, nbytes):
    TILE, ROWS_OF, TWO = tile_of(features, dtype), Alignment(nbytes), terms == 2

    def kernel(mOut, mTerms):
        _, seqlen, _ = shape(mOut)
        number, tile = split(block_index(), (seqlen + ROWS - 1) // ROWS)
        row = tile * ROWS
        X = load(aligned(mTerms[0][number], ROWS_OF), TILE, row)
        if TWO:
            X = X + load(aligned(mTerms[1][number], ROWS_OF), TILE, row)
        save(aligned(mOut[number], ROWS_OF), X, row)

    return kernel
