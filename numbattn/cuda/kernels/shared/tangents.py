"""Tiles with their tangents, X and tX.

The tangent of a product X Y is tX Y + X tY. A tangent that is not given is 0: its products are not compiled in, and the
tile itself takes its place.
"""

from typing import Any, NamedTuple

import numpy as np

from ...tile import Alignment, allocate, copy_async, device, dot, dots, full, opaque, rows_between
from .layouts import buffers, left_operand


class OperandRows(NamedTuple):
    """Some rows of a head."""

    batch: Any
    head: Any
    first: Any
    length: Any


def tiles_step(shared, dtype, threads, rows, width, has_tangent, nbytes, stages=1):
    """Device functions for an operand's tiles and their tangents: (stage, X, tX, rows, first) copies one of each, of
    these OperandRows, from arrays (batch, heads, rows, features), where tX is a tuple of one or none; (stage) -> these.
    """
    (PLACE, COPY), *others = buffers(shared, dtype, threads, rows, [width] * (1 + has_tangent), stages)
    TANGENT, HAS_TANGENT, ROWS_OF = others[0][0] if others else PLACE, has_tangent, Alignment(nbytes)

    @device
    def matrix(X, rows):
        batch, head = opaque(rows.batch), opaque(rows.head)     # else addresses are kept in registers across a loop
        return rows_between(X, batch, head, rows.first, rows.first + rows.length, ROWS_OF)

    @device
    def copy(stage, X, tX, rows, first):
        copy_async(allocate(PLACE, stage), matrix(X, rows), COPY, first)
        if HAS_TANGENT:
            copy_async(allocate(TANGENT, stage), matrix(tX[0], rows), COPY, first)

    @device
    def tiles(stage):
        return allocate(PLACE, stage), allocate(TANGENT, stage)

    return copy, tiles


def products_step(layout, ACC, dtype, has_tx, has_ty):
    """The device function (x, tx, y, ty) -> X Y^T and its tangent, tX Y^T + X tY^T."""
    ZERO, HAS_TX, HAS_TY = ACC(0), has_tx, has_ty
    READS_ONCE = layout.unit != "mma" or dtype != np.float32    # splitting float32 takes registers

    @device
    def products(x, tx, y, ty):
        zeros = full(layout, ZERO)
        if not HAS_TX:
            Z, tZ = dot(zeros, x, y.T), zeros
        elif READS_ONCE:
            Z, tZ = dots((zeros, zeros), (x, tx), y.T)
        else:
            Z, tZ = dot(zeros, x, y.T), dot(zeros, tx, y.T)
        if HAS_TY:
            tZ = dot(tZ, x, ty.T)
        return Z, tZ

    return products


def add_tangent_step(layout, shared, ACC, dtype, has_ty):
    """The device function (sums, X, tX, y, ty) -> sums + tX Y + X tY, for fragments of this layout."""
    HAS_TY, left_dtype = has_ty, dtype if layout.unit == "mma" else ACC
    left = left_operand(layout, shared, left_dtype) if has_ty else None
    left_tangent = left_operand(layout, shared, left_dtype)

    @device
    def add(sums, X, tX, y, ty):
        sums = dot(sums, left_tangent(tX), y)
        if HAS_TY:
            sums = dot(sums, left(X), ty)
        return sums

    return add
