"""Functions of the user's own, numbattn.Score, as parts of a score: mapped over the elements of tiles of S.

What is compiled in is "function", or "shift" for one that only adds what does not depend on S, then a digest that
stands for the function, and its arrays, dtype:ndim.
"""

from functools import lru_cache

import numpy as np
from numba.cuda import types

from ....dual import derivative_of, is_additive, linked, number_of
from ....frozen import Frozen
from ...tile import INDEX, device, full, map_elements, where
from ..shared.layouts import array_type

FUNCTION, SHIFT = "function", "shift"
KNOWN = {}  # scores.Identity by its digest: what has been asked for in this process


@lru_cache(maxsize=1024)
def part_of(identity, arrays):
    """What is compiled in for a scores.Identity and arrays of these (dtype, ndim)."""
    kinds = [array_type(dtype, ndim) for dtype, ndim in arrays]
    only_adds = identity.derivative is None and is_additive(identity.function, (*[types.int64] * 4, *kinds))
    KNOWN[identity.digest] = identity
    return " ".join([SHIFT if only_adds else FUNCTION, identity.digest, *(f"{dtype}:{ndim}" for dtype, ndim in arrays)])


def arrays_of(part):
    """(dtype, ndim) of the arrays of a function; of another part none."""
    kind, *about = part.split()
    pairs = [x.split(":") for x in about[1:]] if kind in (FUNCTION, SHIFT) else []
    return [(dtype, int(ndim)) for dtype, ndim in pairs]


def has_matrices(part):
    """Whether it is a function that looks up something in matrices, probably for each element."""
    return any(ndim > 1 for _, ndim in arrays_of(part))


def function_types(part):
    """The types of what it needs: the first element of the batch, seqlen_q, seqlen_k, arrays."""
    return INDEX, INDEX, INDEX, types.Tuple([array_type(*about) for about in arrays_of(part)])


def identity_of(part):
    return KNOWN[part.split()[1]]


@device
def nothing_ahead(scores, tile, batch, head, m0, n0):
    return ()


def function(part, number, unit, layout, ACC, transposed):
    (_, natural), identity, ONE = unit, identity_of(part), ACC(1)
    mapped = mapped_over(layout, transposed, number)
    value_of, HIDDEN = mapped(identity.function, number_of), ACC(-np.inf)
    slope_of = mapped(identity.derivative or derivative_of(identity.function), same)

    @device
    def step(S, F, found, scores, batch, head, m0, n0):
        """The derivative is 0 where the score is -inf, before the function or behind it."""
        S = S * natural(ONE, scores)
        value, slope = value_of(S, scores, batch, head, m0, n0), slope_of(S, scores, batch, head, m0, n0)
        return value, F * where((S != HIDDEN) & (value != HIDDEN), slope, 0)

    return nothing_ahead, step


def value(part, number, unit, layout, ACC, transposed):
    """A function without its derivative: that is not even looked for."""
    (_, natural), ONE = unit, ACC(1)
    value_of = mapped_over(layout, transposed, number)(identity_of(part).function, number_of)

    @device
    def step(S, F, found, scores, batch, head, m0, n0):
        return value_of(S * natural(ONE, scores), scores, batch, head, m0, n0), F

    return nothing_ahead, step


def shift(part, number, unit, layout, ACC, transposed):
    (_, natural), ONE, NOTHING = unit, ACC(1), ACC(-0.0)  # x + -0.0 is x
    added_by = mapped_over(layout, transposed, number)(identity_of(part).function, number_of)

    @device
    def step(S, F, found, scores, batch, head, m0, n0):
        return S * natural(ONE, scores) + added_by(full(layout, NOTHING), scores, batch, head, m0, n0), F

    return nothing_ahead, step


@device
def same(x):
    return x


def mapped_over(layout, transposed, number):
    """Makes of a user's function the device function (S, scores, batch, head, m0, n0): of all elements of a tile, of
    each what `result` makes of the function's result."""

    def mapped(of_user, result):
        of_user = inlined(of_user)

        @device
        def of_rows(s, i, j, batch, head, arrays):
            return result(of_user(s, batch, head, i, j, *arrays))

        @device
        def of_cols(s, j, i, batch, head, arrays):
            return result(of_user(s, batch, head, i, j, *arrays))

        @device
        def queries_by_keys(S, scores, batch, head, m0, n0):
            first, seqlen_q, seqlen_k, arrays = scores.parts[number]
            return map_elements(of_rows, S, m0, n0, (seqlen_q, seqlen_k), (first + batch, head, arrays))

        @device
        def keys_by_queries(S, scores, batch, head, m0, n0):
            first, seqlen_q, seqlen_k, arrays = scores.parts[number]
            return map_elements(of_cols, S, n0, m0, (seqlen_k, seqlen_q), (first + batch, head, arrays))

        return keys_by_queries if transposed else queries_by_keys

    return mapped


@lru_cache(maxsize=256)
def inlined(function):
    """A Frozen as a device function; what is compiled already is one."""
    return device(linked(function)) if isinstance(function, Frozen) else function
