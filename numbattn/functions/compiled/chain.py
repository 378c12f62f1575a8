"""Functions of one edge, one after the other: scores of graphs. See `numbattn.graphs.score`.

Kernels on CPUs and GPUs call these. links: the Link of each function; s: of the dtype `real`; at: batch, head, edge, i
and j; given: as from `given_of`. To the functions of one element (s, batch, head, i, j, *arrays), of which these are
made, an edge is an i, its query a j, and its key the first of the arrays.
"""

from functools import lru_cache, reduce

import numpy as np
from numba import types

from .element import check, differentiated_element
from .reads import along, by_read, by_read_along, check_along, check_by_read_along
from .reads import check as check_reads
from .strict import compiled

HIDDEN = -np.inf


def check_all(links, kinds, real, order, gradients=False):
    """Raise a TypeError for functions that may not be compiled. kinds: the types of what they are given; real: that of
    s; order: 2 with tangents."""
    for (identity, wanted), (arrays, tangents, _) in zip(links, kinds):
        kinds_of, wanted_of = (types.int64, *arrays), (False, *wanted)
        for each in range(order + 1):
            check(identity, real, kinds_of, each)
        for each in range(2) if len(tangents) else ():
            check_along(identity, wanted_of, real, kinds_of, tangents[0], each)
        if gradients and any(wanted):
            check_reads(identity.function, wanted_of, real, kinds_of)
            if len(tangents):
                check_by_read_along(identity.function, wanted_of, real, kinds_of, tangents[0])


@lru_cache(maxsize=256)
def values(links, real):
    """(s, at, given) -> s after all."""

    def after(before, number):
        value_of = differentiated_element(links[number].identity, 0)

        @compiled
        def value(s, at, given):
            s = before(s, at, given)
            return real(value_of(s, at[0], at[1], at[2], at[3], (at[4],) + given[number][0]))

        return value

    return reduce(after, range(len(links)), _same)


@lru_cache(maxsize=256)
def slopes(links, real, first=0):
    """(s, at, given) -> s after all but the first ones, and its derivative; 0 where the score is -inf."""

    def after(before, number):
        value_of, slope_of = (differentiated_element(links[number].identity, order) for order in range(2))

        @compiled
        def both(s, at, given):
            s, F = before(s, at, given)
            arrays = (at[4],) + given[number][0]
            value, slope = real(value_of(s, at[0], at[1], at[2], at[3], arrays)), real(0)
            if s != HIDDEN and value != HIDDEN:                 # elsewhere derivatives may be NaN
                slope = real(slope_of(s, at[0], at[1], at[2], at[3], arrays))
            return value, F * slope

        return both

    @compiled
    def nothing(s, at, given):
        return s, real(1)

    return reduce(after, range(first, len(links)), nothing)


@lru_cache(maxsize=256)
def tangents(links, real, first=0):
    """(s, ts, at, given) -> s and ts after all but the first ones, the derivative and its tangent."""

    def after(before, number):
        identity, wanted = links[number]
        value_of, slope_of, bend_of = (differentiated_element(identity, order) for order in range(3))
        moves, of_wanted = any(wanted), (False, *wanted)
        of_value, of_slope = (along(identity, of_wanted, order) if moves else None for order in range(2))

        @compiled
        def all_four(s, ts, at, given):
            s, ts, F, tF = before(s, ts, at, given)
            arrays = (at[4],) + given[number][0]
            value, slope = real(value_of(s, at[0], at[1], at[2], at[3], arrays)), real(0)
            tslope, shift = real(0), real(0)
            if s != HIDDEN and value != HIDDEN:
                slope = real(slope_of(s, at[0], at[1], at[2], at[3], arrays))
                tslope = ts * real(bend_of(s, at[0], at[1], at[2], at[3], arrays))
                if moves:
                    shift = real(of_value(s, at[0], at[1], at[2], at[3], arrays, given[number][1][0]))
                    tslope += real(of_slope(s, at[0], at[1], at[2], at[3], arrays, given[number][1][0]))
            return value, slope * ts + shift, F * slope, tF * slope + F * tslope

        return all_four

    @compiled
    def nothing(s, ts, at, given):
        return s, ts, real(1), real(0)

    return reduce(after, range(first, len(links)), nothing)


@lru_cache(maxsize=256)
def reads(links, number, real):
    """(s, ds, at, given, read) -> what the gradient of an element gets of read number `read` of function `number`,
    which element that is among those of all gradients, and how many it reads. s: before all functions; ds: after."""
    before, rest = values(links[:number], real), slopes(links, real, number + 1)
    value_of = differentiated_element(links[number].identity, 0)
    derivative = by_read(links[number].identity.function, (False, *links[number].wanted))

    @compiled
    def term(s, ds, at, given, read):
        s = before(s, at, given)
        arrays = (at[4],) + given[number][0]
        value = real(value_of(s, at[0], at[1], at[2], at[3], arrays))
        if ds == 0 or s == HIDDEN or value == HIDDEN:
            return 0.0, 0, 0
        _, F = rest(value, at, given)
        slope, element, count = derivative(s, at[0], at[1], at[2], at[3], arrays, read)
        return float(slope * (ds * F)), element + given[number][2], count

    return term


@lru_cache(maxsize=256)
def reads_along(links, number, real):
    """(s, ts, ds, tds, at, given, read): the same of the tangent of a gradient."""
    identity, wanted = links[number]
    before, own = tangents(links[:number], real), tangents(links[: number + 1], real, number)
    rest, derivative = tangents(links, real, number + 1), by_read_along(identity.function, (False, *wanted))

    @compiled
    def term(s, ts, ds, tds, at, given, read):
        s, ts, _, _ = before(s, ts, at, given)
        value, tvalue, _, _ = own(s, ts, at, given)
        if (ds == 0 and tds == 0) or s == HIDDEN or value == HIDDEN:
            return 0.0, 0, 0
        _, _, F, tF = rest(value, tvalue, at, given)
        arrays, moved = (at[4],) + given[number][0], given[number][1][0]
        slope, tslope, element, count = derivative(s, ts, at[0], at[1], at[2], at[3], arrays, moved, read)
        return float(slope * (tds * F + ds * tF) + tslope * (ds * F)), element + given[number][2], count

    return term


@compiled
def _same(s, at, given):
    return s
