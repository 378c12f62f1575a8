"""Tangents of the arrays that functions read: how functions and their derivatives move while S does not.

Tangents are stored one after the other in one array, the last one of the arrays.
"""

from dataclasses import dataclass

import numpy as np

from ....functions.compiled.reads import along, by_read_along, check_along, check_by_read_along
from ....scores.element import ScoreTangent
from ...compiler import from_dtype
from ...tile import device, fold_elements, where
from ...words.steps import array_of_function
from .function import FunctionKind, ShiftKind, check_places, counted, kind_of, mapped_elements, shift_steps


@dataclass(frozen=True)
class FunctionTangentKind(FunctionKind):
    of = ScoreTangent

    wanted: tuple  # for each array, whether its gradient is

    def moved(self, order, at, layout, ACC, transposed):
        """The device function (S, tscores, batch, head, m0, n0) -> the tangent of the function, or of its derivative of
        this order, for all elements of a tile of S before it, which itself has no tangent."""
        *kinds, tangents = self.array_types
        check_along(self.identity, self.wanted, from_dtype(ACC), tuple(kinds), tangents, order)
        tangent_of = along(self.identity, self.wanted, order)

        @device
        def of_element(s, batch, head, i, j, given):
            return tangent_of(s, batch, head, i, j, given[:-1], given[-1])

        return mapped_elements(of_element, layout, transposed, at)

    def moves(self, order, at, layout, ACC, transposed):
        """What `moved` returns, but (S, value, tscores, batch, head, m0, n0), and 0 where the score is -inf, before the
        function or after it. value: the score after it."""
        moved, HIDDEN = self.moved(order, at, layout, ACC, transposed), ACC(-np.inf)

        @device
        def of_tile(S, value, tscores, batch, head, m0, n0):
            found = moved(S, tscores, batch, head, m0, n0)
            return where((S != HIDDEN) & (value != HIDDEN), found, 0)

        return of_tile

    @classmethod
    def lowered(cls, part, number, problem):
        check_places(problem)
        score, arrays = part._score, (*part._score._looked_up, part._tangents)
        identity, about = score._identity_of(problem.sum_dtype), tuple([(x.dtype.name, x.ndim) for x in arrays])
        is_shift = isinstance(kind_of(identity, about[:-1]), ShiftKind)
        of = ZeroTangentKind if part._is_zero else ShiftTangentKind if is_shift else FunctionTangentKind
        found = of(identity.digest, about, identity, score._counted)
        return found, (), {array_of_function(number, which): x for which, x in enumerate(arrays)}


@dataclass(frozen=True)
class ZeroTangentKind(FunctionTangentKind):
    """A function whose arrays' tangents are all zero."""

    is_zero = True


@dataclass(frozen=True)
class ShiftTangentKind(FunctionTangentKind):
    """A function that only adds a term that does not depend on S."""

    def steps(self, at, scaling, layout, ACC, transposed=False, by_tma=False, has_derivative=True):
        return shift_steps(self.moved(0, at, layout, ACC, transposed), scaling, layout, ACC)


def read_tangent_step(tangent, at, ACC, SUM, add_pending):
    """The device function (pending, S, tS, dS, tdS, tscores, sums, batch, head, m0, n0) -> pending, which adds to the
    tangents of the gradients of a function's arrays, as `function.read_step` does to the gradients.

    tangent, at: the part with the arrays' tangents, and its place in the parts of tscores.
    """
    (*kinds, of_tangents), function = tangent.array_types, tangent.identity.function
    check_by_read_along(function, tangent.wanted, from_dtype(ACC), tuple(kinds), of_tangents)
    derivative, ZERO, HIDDEN = by_read_along(function, tangent.wanted), SUM(0), ACC(-np.inf)

    @device
    def of_element(carried, s, ts, ds, tds, i, j, batch, head, given, read, sums):
        element, total, most = carried
        if s != HIDDEN and (ds != 0 or tds != 0):               # elsewhere derivatives may be NaN
            slope, tslope, at, count = derivative(s, ts, batch, head, i, j, given[:-1], given[-1], read)
            most = max(most, count)
            if read < count:
                if at != element:
                    add_pending((element, total), sums)
                    element, total = at, ZERO
                total += SUM(slope * tds + tslope * ds)
        return element, total, most

    @device
    def add(pending, S, tS, dS, tdS, tscores, sums, batch, head, m0, n0):
        i, j, seqlen_q, seqlen_k, (batch, head, arrays) = counted(tscores.parts[at], batch, head)
        ends, (element, total), read, most = (i + seqlen_q, j + seqlen_k), pending, 0, 1
        while read < most:                                      # an element may read several
            carried, given = (element, total, 0), (batch, head, arrays, read, sums)
            element, total, most = fold_elements(of_element, carried, (S, tS, dS, tdS), i + m0, j + n0, ends, given)
            read += 1
        return element, total

    return add
