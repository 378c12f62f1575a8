"""A part that a function of one element defines, such as numbattn.Score: mapped over the elements of tiles of S.

A function that only adds a term that does not depend on S is a kind of its own.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from ....functions.compiled.derivative import differentiated, is_additive, linked
from ....functions.compiled.element import check
from ....functions.compiled.errors import number_of
from ....functions.compiled.reads import by_last_index, by_read, has_steady_slope, is_by_distance
from ....functions.compiled.reads import check as check_reads
from ....functions.compiled.wide import seen, widened
from ....functions.frozen import Frozen
from ....grids.bias import EXTRA
from ....scores.element import FunctionPart
from ...compiler import from_dtype, types
from ...tile import (
    INDEX,
    add_element,
    device,
    fold_elements,
    full,
    map_elements,
    maximum,
    minimum,
    opaque,
    shape,
    where,
)
from ...words.signatures import array_type
from ...words.steps import array_of_function
from ..shared import exact_sums
from ..shared.origin import PLACE, PLACE_TYPES
from .kind import READS, ScoreKind, ValueAndSlope, nothing_ahead

MOST_ELEMENTS = 2**31 - 1  # of gradients, which int32 counts
FARTHEST_PLACE = 2**24  # up to which integers are float32, too: see tile.mapping


@dataclass(frozen=True)
class FunctionKind(ScoreKind):
    of = FunctionPart
    may_be_far = looks_up = True
    gradient = READS

    digest: str  # of its identity
    arrays: tuple  # (dtype, ndim) of each
    identity: Any = field(compare=False, repr=False)  # the element.Identity

    @property
    def array_types(self):
        return tuple([array_type(*about) for about in self.arrays])

    def types(self, number):
        """The types of the place of a launch, seqlen_q, seqlen_k, arrays."""
        return *PLACE_TYPES, INDEX, INDEX, types.Tuple(self.array_types)

    def mapped(self, order, at, layout, ACC, transposed):
        """The device function (S, scores, batch, head, m0, n0) -> the function, or its derivative of this order, for
        all elements of a tile. Raises a TypeError if it may fail."""
        check(self.identity, from_dtype(ACC), self.array_types, order)
        function = self.identity.key[order] or differentiated(self.identity, order)
        return mapped_over(layout, transposed, at)(function, same if order else number_of)

    def steps(self, at, scaling, layout, ACC, transposed=False, by_tma=False, has_derivative=True):
        (_, to_scaled), ONE = scaling, ACC(1)
        if not has_derivative:  # it is not even looked for
            value_of = self.mapped(0, at, layout, ACC, transposed)

            @device
            def value_alone(S, F, found, scores, batch, head, m0, n0):
                return ValueAndSlope(value_of(S * to_scaled(ONE, scores), scores, batch, head, m0, n0), F)

            return nothing_ahead, value_alone

        value_and_slope = self.derivatives(at, scaling, layout, ACC, transposed, order=1)

        @device
        def step(S, F, found, scores, batch, head, m0, n0):
            value, slope = value_and_slope(S, scores, batch, head, m0, n0)
            return ValueAndSlope(value, F * slope)

        return nothing_ahead, step

    def derivatives(self, at, scaling, layout, ACC, transposed=False, order=2):
        """Derivatives are 0 where the score is -inf, before the function or after it."""
        (_, to_scaled), ONE, HIDDEN = scaling, ACC(1), ACC(-np.inf)
        value_of, *slopes_of = (self.mapped(each, at, layout, ACC, transposed) for each in range(order + 1))
        slope_of, bend_of = slopes_of[0], slopes_of[-1]

        @device
        def values(S, scores, batch, head, m0, n0):
            S = S * to_scaled(ONE, scores)
            value = value_of(S, scores, batch, head, m0, n0)
            return S, value, (S != HIDDEN) & (value != HIDDEN)

        @device
        def first(S, scores, batch, head, m0, n0):
            S, value, seen = values(S, scores, batch, head, m0, n0)
            return value, where(seen, slope_of(S, scores, batch, head, m0, n0), 0)

        @device
        def both(S, scores, batch, head, m0, n0):
            S, value, seen = values(S, scores, batch, head, m0, n0)
            slope, bend = slope_of(S, scores, batch, head, m0, n0), bend_of(S, scores, batch, head, m0, n0)
            return value, where(seen, slope, 0), where(seen, bend, 0)

        return first if order == 1 else both

    def is_by_distance(self, wanted, ACC):
        return is_by_distance(self.identity.function, wanted, from_dtype(ACC), self.array_types)

    def steps_by_distance(self, at, wanted, ACC):
        derivative, NOTHING = by_read(self.identity.function, wanted), ACC(0)

        @device
        def shared_of(scores, batch, head):
            i, j, seqlen_q, seqlen_k, given = counted(scores.parts[at], batch, head)
            return given, i - j, i - (j + seqlen_k - 1), i + seqlen_q - 1 - j

        @device
        def element_of(distance, shared):
            (batch, head, arrays), apart, least, most = shared
            distance = min(max(distance + apart, least), most)  # that there is
            slope, element, _ = derivative(NOTHING, batch, head, distance, 0, arrays, 0)
            return element, slope

        return shared_of, element_of

    @classmethod
    def lowered(cls, part, number, problem):
        check_places(problem)
        if part._wants_gradient and part._elements > MOST_ELEMENTS:
            raise NotImplementedError(f"score: got a {type(part).__name__} with gradients of {part._elements} "
                                      f"elements, at most {MOST_ELEMENTS} on a GPU")
        identity = part._identity_of(problem.sum_dtype)
        arrays = tuple([(x.dtype.name, x.ndim) for x in part._looked_up])
        if part._boxes is None:
            found = kind_of(identity, arrays)
        else:
            found = BoxBiasKind(identity.digest, arrays, identity, *part._boxes)
        return found, (), {array_of_function(number, which): x for which, x in enumerate(part._looked_up)}

    @classmethod
    def finish(cls, part, grad, sums, problem):
        if sums is not None:
            grad[...] = exact_sums.rounded(sums)

    def flat(self, planner, work, number):
        yield from (*PLACE, work.problem.seqlen_q, work.problem.seqlen_k)
        yield from (planner.whole(array_of_function(number, which)) for which in range(len(self.arrays)))


@dataclass(frozen=True)
class ShiftKind(FunctionKind):
    """A function that only adds a term that does not depend on S."""

    is_nonlinear = False

    @property
    def looks_up(self):
        """A matrix is probably looked up for each element."""
        return any(ndim > 1 for _, ndim in self.arrays)

    def steps(self, at, scaling, layout, ACC, transposed=False, by_tma=False, has_derivative=True):
        return shift_steps(self.mapped(0, at, layout, ACC, transposed), scaling, layout, ACC)


@dataclass(frozen=True)
class BoxBiasKind(ShiftKind):
    """numbattn.grids.bias.of_lines, of tokens in the order of boxes."""

    has_extra: bool
    boxes: tuple  # their sizes, if the sums of `box_step` say what the table's gradient is; or ()

    def mapped(self, order, at, layout, ACC, transposed):
        NOTHING, FIRST, HAS_EXTRA = ACC(0), np.int32(0), self.has_extra

        @device
        def of_pair(s, batch, head, i, j, arrays):
            table, query, key, _ = arrays
            heads, entries = shape(table)
            if HAS_EXTRA and (query[i] == EXTRA or key[j] == EXTRA):
                return NOTHING
            entry = maximum(np.int32(np.int32(key[j]) - np.int32(query[i])), FIRST)
            return ACC(table[minimum(head, heads - 1), minimum(entry, entries - 1)])

        return mapped_elements(of_pair, layout, transposed, at)

    def is_by_distance(self, wanted, ACC):
        return bool(self.boxes)


def shift_steps(added_of, scaling, layout, ACC):
    """The steps of a function that only adds to S. added_of: the device function (S, scores, batch, head, m0, n0) ->
    the terms, where S is 0."""
    (_, to_scaled), ONE, NOTHING = scaling, ACC(1), ACC(-0.0)  # x + -0.0 is x

    @device
    def step(S, F, found, scores, batch, head, m0, n0):
        added = added_of(full(layout, NOTHING), scores, batch, head, m0, n0)
        return ValueAndSlope(S * to_scaled(ONE, scores) + added, F)

    return nothing_ahead, step


def check_places(problem):
    if max(problem.seqlen_q, problem.seqlen_k) > FARTHEST_PLACE:
        raise NotImplementedError(f"score: got a Score of {problem.seqlen_q} queries and {problem.seqlen_k} "
                                  f"keys, at most {FARTHEST_PLACE} on a GPU")


@lru_cache(maxsize=1024)
def kind_of(identity, arrays):
    """The kind of a function with this Identity and arrays of these (dtype, ndim)."""
    kinds = [widened(array_type(dtype, ndim)) for dtype, ndim in arrays]
    only_adds = identity.key[1] is None and is_additive(identity.function, (*[types.int64] * 4, *kinds))
    return (ShiftKind if only_adds else FunctionKind)(identity.digest, arrays, identity)


@device
def same(x):
    return x


def mapped_over(layout, transposed, number):
    """A Python function (of_user, result) -> the device function (S, scores, batch, head, m0, n0) that maps
    result(of_user) over all elements of a tile."""

    def mapped(of_user, result):
        of_user = inlined(of_user)

        @device
        def of_element(s, batch, head, i, j, arrays):
            return result(of_user(s, batch, head, i, j, *seen(arrays)))

        return mapped_elements(of_element, layout, transposed, number)

    return mapped


def mapped_elements(of_element, layout, transposed, number):
    """The device function (S, scores, batch, head, m0, n0) that maps the device function (s, batch, head, i, j, arrays)
    over all elements of a tile."""

    @device
    def of_rows(s, i, j, batch, head, arrays):
        return of_element(s, batch, head, i, j, arrays)

    @device
    def of_cols(s, j, i, batch, head, arrays):
        return of_element(s, batch, head, i, j, arrays)

    @device
    def queries_by_keys(S, scores, batch, head, m0, n0):
        i, j, seqlen_q, seqlen_k, given = counted(scores.parts[number], batch, head)
        return map_elements(of_rows, S, i + m0, j + n0, (i + seqlen_q, j + seqlen_k), given)

    @device
    def keys_by_queries(S, scores, batch, head, m0, n0):
        i, j, seqlen_q, seqlen_k, given = counted(scores.parts[number], batch, head)
        return map_elements(of_cols, S, j + n0, i + m0, (j + seqlen_k, i + seqlen_q), given)

    return keys_by_queries if transposed else queries_by_keys


@device
def counted(part, batch, head):
    """The call's first query and key, the numbers of both, and the arguments that all elements share."""
    first, at, seqlen_q, seqlen_k, arrays = part
    return at.query, at.key, seqlen_q, seqlen_k, (first + at.batch + batch, at.head + head, arrays)


def read_step(part, number, wanted, ACC, SUM, add_pending):
    """The device function (pending, S, dS, scores, sums, batch, head, m0, n0) -> pending, which adds to the gradients
    of a function's arrays.

    S, dS: tiles before the function and after it; sums: for the elements of all arrays wanted; pending: an element, and
    the terms that a thread has not added to it yet, so that it adds once for many; add_pending: the device function
    (pending, sums) that does.
    """
    function, about = part.identity.function, (wanted, from_dtype(ACC), part.array_types)
    check_reads(function, *about)
    derivative, ZERO, HIDDEN = by_read(function, wanted), SUM(0), ACC(-np.inf)
    IS_STEADY = has_steady_slope(function, *about)

    @device
    def term(slope, s, ds):
        return SUM(slope * ds) if IS_STEADY or (ds != 0 and s != HIDDEN) else ZERO      # its slope may be NaN

    @device
    def moved(pending, at, sums):
        element, total = pending
        if at != element:
            add_pending(pending, sums)
            total = ZERO
        return at, total

    @device
    def of_tile(carried, s, ds, i, j, batch, head, arrays):
        """Whether all elements of a thread read the same one, which, and their sum, in two halves: without a branch."""
        is_first, others, element, total, half, most = carried
        slope, at, count = derivative(s, batch, head, i, j, arrays, 0)
        at = np.int32(at) if count > 0 else np.int32(-1)
        element = at if is_first else element
        return False, others | (at ^ element), element, half, total + term(slope, s, ds), max(most, count)

    @device
    def of_element(carried, s, ds, i, j, batch, head, arrays, read, sums):
        element, total = carried
        slope, at, count = derivative(s, batch, head, i, j, arrays, read)
        if read < count:
            element, total = moved((element, total), np.int32(at), sums)
            total += term(slope, s, ds)
        return element, total

    @device
    def add(pending, S, dS, scores, sums, batch, head, m0, n0):
        i, j, seqlen_q, seqlen_k, given = counted(scores.parts[number], batch, head)
        (element, before), tiles, ends, read = pending, (S, dS), (i + seqlen_q, j + seqlen_k), 0
        carried = True, np.int32(0), np.int32(0), ZERO, ZERO, 0
        _, others, at, total, half, most = fold_elements(of_tile, carried, tiles, i + m0, j + n0, ends, given)
        if others == 0 and at >= 0:
            element, before = moved(pending, at, sums)
            before, read = before + (total + half), 1
        row = opaque(i + m0)                                    # else registers keep all values read so far
        while read < most:                                      # an element may read several
            about = *given, read, sums
            element, before = fold_elements(of_element, (element, before), tiles, row, j + n0, ends, about)
            read += 1
        return element, before

    return add


def class_steps(part, number, wanted, ACC, SUM, layout):
    """`read_step` for functions that are `is_by_class`, from dS summed by query and class of the key, by a product with
    a matrix of zeros and ones. Device functions: (scores, batch, head, n0) -> that matrix, of keys and classes; (tile
    of such sums, scores, sums, batch, head, m0) adds them. layout: of both tiles."""
    derivative, CLASSES = by_last_index(part.identity.function, wanted), layout.shape[1]
    ZERO, ONE, NOWHERE = ACC(0), ACC(1), 0

    @device
    def of_key(x, j, column, batch, head, arrays):
        _, _, last, _ = derivative(ZERO, batch, head, NOWHERE, j, arrays)
        return ONE if last == column else ZERO

    @device
    def add_one(carried, x, i, column, batch, head, arrays, sums):
        slope, first, _, _ = derivative(ZERO, batch, head, i, NOWHERE, arrays)
        if x != 0:
            add_element(sums, first + column, SUM(slope * x))
        return carried

    @device
    def classes_of(scores, batch, head, n0):
        _, j, _, seqlen_k, given = counted(scores.parts[number], batch, head)
        return map_elements(of_key, full(layout, ZERO), j + n0, 0, (j + seqlen_k, CLASSES), given)

    @device
    def add_sums(total, scores, sums, batch, head, m0):
        i, _, seqlen_q, _, given = counted(scores.parts[number], batch, head)
        fold_elements(add_one, (0,), (total,), i + m0, 0, (i + seqlen_q, CLASSES), (*given, sums))

    return classes_of, add_sums


@lru_cache(maxsize=256)
def inlined(function):
    """A Frozen as a device function; a compiled function already is one."""
    return device(linked(function)) if isinstance(function, Frozen) else function
