"""Kinds of parts of a score, as kernels know them, each in a file of its own.

As everywhere here tiles are transposed: a row is a key, a column a query.
"""

from typing import Any, NamedTuple

import numpy as np

from ...base.values import rounded
from ..arguments import compact
from ..tile import any_view, inline_view


class CPUScoreKind(NamedTuple):
    """A kind of part of a score."""

    of: type  # in numbattn.scores
    lower: Any  # (part, problem, order) -> LoweredStep, its array, what has to live as long. order: of the highest
    # derivative of functions that is wanted
    apply: Any  # device function (S, slopes, row, batch, head, m0, n0): apply the part to S in place. slopes: a tile of
    # its derivatives, if they are not 1 and wanted, and one of the second derivatives; else nothing
    collect: Any = None  # device function (dx, dS, row, batch, head, m0, n0): adds a tile of dS to the gradient of the
    # part's array, each number of which serves many elements
    sums: Any = None  # for functions: (part, dtype) -> the CFunction that adds to the gradients of its arrays


class LoweredStep(NamedTuple):
    """A part as kernels take it, without addresses of arrays: calls that differ in these alone share a Record."""

    shape: tuple  # of an array (..., rows, columns)
    strides: tuple
    offset: Any = 0  # an int, or int64 (batch, heads) as bytes; None if it is aligned by tile
    numbers: tuple = (0, 0)  # two integers of the kind's own
    cap: float = 0.0
    keeps: bool = False  # whether S before it is kept, for derivatives by arrays
    sums: int = 0  # the address of the CFunction of CPUScoreKind.sums


class Row(NamedTuple):
    """A part in kernels, for one (batch, head)."""

    address: Any  # of a matrix
    rows: Any
    cols: Any
    row_stride: Any
    col_stride: Any
    offset: Any  # the own key of query 0
    one: Any  # the two integers of its own
    other: Any
    cap: Any
    origin: Any  # that functions count from


@inline_view
def matrix_at(row, dtype):
    return any_view(row.address, row.rows, row.cols, row.row_stride, row.col_stride, dtype)


def matrix_of(part):
    """The array of a part, (..., rows, columns)."""
    x = part._array
    if part._own_axes == 2:
        return x.reshape((1,) * (2 - x.ndim) + x.shape)
    return x[..., None, :] if part._own_axes else x[..., None, None]


def aligned(x):
    return x if x.flags.aligned else np.require(x, requirements="A")


def lower_distance(part, problem, numbers=(0, 0)):
    """The lowered part that depends on distances, and its array, in the dtype of sums. numbers: of the kind's own."""
    x = matrix_of(part)
    *lead, _ = compact(x).shape  # a table keeps its columns, whatever memory they share
    x = aligned(rounded(x[tuple(map(slice, lead))], problem.sum_dtype))
    offset = part._whole_offset(problem.seqlen_q, problem.seqlen_k)
    if isinstance(offset, np.ndarray):
        offset = np.broadcast_to(offset, problem.batch).astype(np.int64).tobytes()
    return LoweredStep(x.shape, x.strides, offset, numbers), x, None
