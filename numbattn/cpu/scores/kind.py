"""Kinds of parts of a score, as kernels know them, each in a file of its own.

As everywhere here tiles are transposed: a row is a key, a column a query.
"""

from typing import Any, NamedTuple

import numpy as np

from ..tile import any_view, inline_view


class CPUScoreKind(NamedTuple):
    """A kind of part of a score."""

    of: type  # in numbattn.scores
    lower: Any  # (part, problem, order, sums) -> LoweredStep, its array, what has to live as long. order: of the
    # highest derivative that is wanted; sums: whether gradients of arrays are
    apply: Any  # device function (S, slopes, row, batch, head, m0, n0): apply the part to S in place. slopes: a tile of
    # its derivatives, if they are not 1 and wanted, and one of the second derivatives; else nothing
    collect: Any = None  # device function (dx, dS, S, row, batch, head, m0, n0): adds a tile of dS to the gradient of
    # the part's array, each number of which serves many elements. S: before the part, if it is kept
    # A part that is linear in its array moves tangents as it moves S, with the tangent of the array. Others have these:
    lower_tangent: Any = None  # (what `Part._tangent` returns, problem, order), as `lower`
    move: Any = None  # device function (S, tS, F, row, batch, head, m0, n0): adds the tangent along arrays to tS, and
    # that of the derivative to F, a tile or nothing
    collect_along: Any = None  # device function (dx, dS, tdS, S, row, batch, head, m0, n0): adds to the tangents of the
    # gradients of its arrays; the tangent of S is in the tile after S


class LoweredStep(NamedTuple):
    """A part as kernels take it, without addresses of arrays: calls that differ in these alone share a Record."""

    shape: tuple  # of an array (..., rows, columns)
    strides: tuple
    offset: Any = 0  # an int, or int64 (batch, heads) as bytes; None if it is aligned by tile
    numbers: tuple = (0, 0)  # two integers of the kind's own
    cap: float = 0.0
    sums: int = 0  # the address of a function that adds to the gradients of its arrays


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
    sums: Any
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
