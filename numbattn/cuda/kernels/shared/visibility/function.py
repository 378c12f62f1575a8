"""A user's own function, numbattn.Where, as a test of elements.

Compiled in are "where", a digest of the function, its arrays as dtype:ndim:layout, and how the same is computed on
whole tiles, see `boxes`, if that is known; arrays are contiguous then.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .....functions.compiled.derivative import linked
from .....functions.compiled.errors import truth_of
from .....functions.compiled.truth import check
from .....functions.compiled.wide import seen
from ....compiler import types
from ....tile import INDEX, convert, device, holds
from ....words.signatures import array_type
from ....words.steps import LoweredGrid
from ..origin import PLACE_TYPES

FUNCTION = "where"
FARTHEST_PLACE = 2**24  # up to which integers are float32, too: see tile.mapping
KNOWN = {}  # the Frozen functions of this process, by digest


class Function(NamedTuple):
    """A grid of states of blocks; the function decides on the elements of those that are PARTIAL."""

    cells: Any  # uint8 (batch, heads, rows of blocks, columns of blocks)
    rows: Any
    cols: Any
    first: Any  # element of the batch of a launch
    at: Any  # the Origin that the function counts from
    seqlen_q: Any
    seqlen_k: Any
    arrays: Any


def lowered_function(grid):
    """The LoweredGrid of a Where."""
    where = grid.function
    KNOWN[where._identity.digest] = where._identity
    arrays = [f"{x.dtype.name}:{x.ndim}:{'C' if where._on_tiles else 'A'}" for x in where.arrays]
    kind = " ".join([FUNCTION, where._identity.digest, *arrays, *filter(None, [where._on_tiles])])
    return LoweredGrid(kind, grid.rows, grid.cols, where._at)


def is_function(kind):
    return kind.startswith(FUNCTION)


def has_functions(mask):
    return any(map(is_function, mask))


def arrays_of(kind):
    """dtype, ndim and layout of the function's arrays."""
    return [word.split(":") for word in kind.split() if ":" in word]


def array_types(kind):
    """The types of the function's arrays."""
    return tuple([array_type(dtype, int(ndim), layout) for dtype, ndim, layout in arrays_of(kind)])


def function_type(kind, cells):
    """The type of a Function; cells: of its states."""
    arrays = types.Tuple(array_types(kind))
    return types.NamedTuple([cells, INDEX, INDEX, *PLACE_TYPES, INDEX, INDEX, arrays], Function)


@lru_cache(maxsize=256)
def inlined(kind):
    """The function as a device function. Raises a TypeError if it may fail."""
    function = KNOWN[kind.split()[1]]
    check(function, array_types(kind))
    return device(linked(function))


@device
def counting(x):
    """An index as an int64 that the compiler knows is not negative."""
    return convert(convert(x, np.uint32), np.int64)


def pair_test(kind):
    """The device function (function, batch, head, i, j) -> whether a Function shows key j to query i."""
    of_user = inlined(kind)

    @device
    def test(function, batch, head, i, j):
        at = function.at
        batch, head = counting(at.batch + function.first + batch), counting(at.head + head)
        i, j = counting(at.query + i), counting(at.key + j)
        return truth_of(of_user(batch, head, i, j, *seen(function.arrays)))

    return test


def function_test(g, kind, layout, transposed):
    """The device function (mask, band, batch, head, m0, n0): `element_test` for grid number g."""
    of_user = inlined(kind)

    @device
    def of_rows(i, j, batch, head, arrays):
        return truth_of(of_user(batch, head, i, j, *seen(arrays)))

    @device
    def of_cols(j, i, batch, head, arrays):
        return truth_of(of_user(batch, head, i, j, *seen(arrays)))

    @device
    def counted(function, batch, head):
        """The first query and key, the numbers of both, and the arguments that all elements share."""
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
