"""Functions of the user's own, numbattn.Where, as a test of elements.

What is compiled in is "where", then a digest that stands for the function, and its arrays, dtype:ndim.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .....scores.compiled.derivative import linked
from .....scores.compiled.errors import truth_of
from .....scores.compiled.truth import check
from .....scores.compiled.wide import seen
from ....compiler import types
from ....tile import INDEX, convert, device, holds
from ....words.signatures import array_type
from ....words.steps import LoweredGrid
from ..origin import PLACE_TYPES

FUNCTION = "where"
FARTHEST_PLACE = 2**24  # that is a float32, too: see tile.mapping
KNOWN = {}  # Frozen by its digest: what has been asked for in this process


class Function(NamedTuple):
    """A grid of states of blocks: those that are partial are as the function tells."""

    cells: Any  # uint8 (batch, heads, rows of blocks, columns of blocks)
    rows: Any
    cols: Any
    first: Any  # element of the batch of a launch
    at: Any  # the Origin from which the function counts
    seqlen_q: Any
    seqlen_k: Any
    arrays: Any


def lowered_function(grid):
    """A Grid of a Where, Lowered."""
    where = grid.function
    KNOWN[where._identity.digest] = where._identity
    kind = " ".join([FUNCTION, where._identity.digest, *(f"{x.dtype.name}:{x.ndim}" for x in where.arrays)])
    return LoweredGrid(kind, grid.rows, grid.cols, where._at)


def is_function(kind):
    return kind.startswith(FUNCTION)


def has_functions(mask):
    return any(map(is_function, mask))


def array_types(kind):
    """Of the function's arrays."""
    about = [x.split(":") for x in kind.split()[2:]]
    return tuple([array_type(dtype, int(ndim)) for dtype, ndim in about])


def function_type(kind, cells):
    """The type of a Function; cells: that of its states."""
    arrays = types.Tuple(array_types(kind))
    return types.NamedTuple([cells, INDEX, INDEX, *PLACE_TYPES, INDEX, INDEX, arrays], Function)


@lru_cache(maxsize=256)
def inlined(kind):
    """The function as a device function. A TypeError where it may fail."""
    function = KNOWN[kind.split()[1]]
    check(function, array_types(kind))
    return device(linked(function))


@device
def counting(x):
    """An index as an int64, of which the compiler sees that it is not negative."""
    return convert(convert(x, np.uint32), np.int64)


def pair_test(kind):
    """The device function (function, batch, head, i, j): whether a Function shows key j to query i."""
    of_user = inlined(kind)

    @device
    def test(function, batch, head, i, j):
        at = function.at
        batch, head = counting(at.batch + function.first + batch), counting(at.head + head)
        i, j = counting(at.query + i), counting(at.key + j)
        return truth_of(of_user(batch, head, i, j, *seen(function.arrays)))

    return test


def function_test(g, kind, layout, transposed):
    """The device function (mask, band, batch, head, m0, n0): as `element_test`, for grid number g."""
    of_user = inlined(kind)

    @device
    def of_rows(i, j, batch, head, arrays):
        return truth_of(of_user(batch, head, i, j, *seen(arrays)))

    @device
    def of_cols(j, i, batch, head, arrays):
        return truth_of(of_user(batch, head, i, j, *seen(arrays)))

    @device
    def counted(function, batch, head):
        """The first query and key, how many there are, and what all elements of a tile are given."""
        at = function.at
        given = at.batch + function.first + batch, at.head + head, function.arrays
        return at.query, at.key, at.query + function.seqlen_q, at.key + function.seqlen_k, given

    @device
    def queries_by_keys(mask, band, batch, head, m0, n0):
        i, j, i_end, j_end, given = counted(mask.grids[g], batch, head)
        return holds(of_rows, layout, i + m0, j + n0, (i_end, j_end), given)

    @device
    def keys_by_queries(mask, band, batch, head, m0, n0):
        i, j, i_end, j_end, given = counted(mask.grids[g], batch, head)
        return holds(of_cols, layout, j + n0, i + m0, (j_end, i_end), given)

    return keys_by_queries if transposed else queries_by_keys
