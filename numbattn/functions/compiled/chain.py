"""Functions of one edge, one after the other: scores of graphs. See `numbattn.graphs.score`.

Kernels on CPUs and GPUs call these. links: the Link of each function; s: of the dtype `real`; at: batch, head, edge, i
and j; given: as from `given_of`. To the functions of one element (s, batch, head, i, j, *arrays), of which these are
made, an edge is an i, its query a j, and its key the first of the arrays.
"""

from functools import cache, lru_cache

import numpy as np
from numba import types

from .element import check, differentiated_element
from .reads import along, by_read, by_read_along, check_along, check_by_read_along, check_twice_along, twice_along
from .reads import check as check_reads
from .strict import compiled

HIDDEN = -np.inf


def check_all(links, kinds, real, order, gradients=False):
    """Raise a TypeError for functions that may not be compiled. kinds: the types of what they are given; real: that of
    s; order: 2 with tangents, 3 with second derivatives along them."""
    for (identity, wanted), (arrays, tangents, _) in zip(links, kinds):
        kinds_of, wanted_of = (types.int64, *arrays), (False, *wanted)
        for each in range(min(order, 2) + 1):
            check(identity, real, kinds_of, each)
        for each in range(2) if len(tangents) else ():
            check_along(identity, wanted_of, real, kinds_of, tangents[0], each)
        if order > 2 and len(tangents):
            check_twice_along(identity.function, wanted_of, real, kinds_of, tangents[0])
        if gradients and any(wanted):
            check_reads(identity.function, wanted_of, real, kinds_of)
            if len(tangents):
                check_by_read_along(identity.function, wanted_of, real, kinds_of, tangents[0])


# What one function adds is compiled once for all chains that it ends, and a chain once for all that it begins.
@lru_cache(maxsize=256)
def own(link, number, order):
    """(s, at, given) -> function `number`, or its derivative of this order."""
    function = differentiated_element(link.identity, order)

    @compiled
    def call(s, at, given):
        return function(s, at[0], at[1], at[2], at[3], (at[4],) + given[number][0])

    return call


@lru_cache(maxsize=256)
def shifts(link, number, order):
    """(s, at, given) -> the tangent of that along arrays; of order 2, the second derivative of the function along them.
    """
    wanted = False, *link.wanted
    function = along(link.identity, wanted, order) if order < 2 else twice_along(link.identity.function, wanted)

    @compiled
    def call(s, at, given):
        return function(s, at[0], at[1], at[2], at[3], (at[4],) + given[number][0], given[number][1][0])

    return call


@lru_cache(maxsize=256)
def values(links, real):
    """(s, at, given) -> s after all."""
    if not links:
        return _same
    before, value_of = values(links[:-1], real), own(links[-1], len(links) - 1, 0)

    @compiled
    def value(s, at, given):
        return real(value_of(before(s, at, given), at, given))

    return value


@lru_cache(maxsize=256)
def slopes(links, real, first=0):
    """(s, at, given) -> s after all but the first ones, and its derivative; 0 where the score is -inf."""
    if len(links) == first:
        return _slopes_of_none(real)
    before, number = slopes(links[:-1], real, first), len(links) - 1
    value_of, slope_of = (own(links[-1], number, order) for order in range(2))

    @compiled
    def both(s, at, given):
        s, F = before(s, at, given)
        value, slope = real(value_of(s, at, given)), real(0)
        if s != HIDDEN and value != HIDDEN:                 # elsewhere derivatives may be NaN
            slope = real(slope_of(s, at, given))
        return value, F * slope

    return both


@lru_cache(maxsize=256)
def tangents(links, real, first=0):
    """(s, ts, at, given) -> s and ts after all but the first ones, the derivative and its tangent."""
    if len(links) == first:
        return _tangents_of_none(real)
    before, number = tangents(links[:-1], real, first), len(links) - 1
    value_of, slope_of, bend_of = (own(links[-1], number, order) for order in range(3))
    shift_of, slope_shift_of = (shifts(links[-1], number, order) for order in range(2))
    moves = any(links[-1].wanted)

    @compiled
    def all_four(s, ts, at, given):
        s, ts, F, tF = before(s, ts, at, given)
        value, slope, tslope, shift = real(value_of(s, at, given)), real(0), real(0), real(0)
        if s != HIDDEN and value != HIDDEN:
            slope, tslope = real(slope_of(s, at, given)), ts * real(bend_of(s, at, given))
            if moves:
                shift = real(shift_of(s, at, given))
                tslope += real(slope_shift_of(s, at, given))
        return value, slope * ts + shift, F * slope, tF * slope + F * tslope

    return all_four


@lru_cache(maxsize=256)
def seconds(links, real):
    """(s, ts, s2, at, given) -> s, ts and s2, the second derivative of s along the tangents, after all."""
    if not links:
        return _all_same
    before, number = seconds(links[:-1], real), len(links) - 1
    value_of, slope_of, bend_of = (own(links[-1], number, order) for order in range(3))
    shift_of, slope_shift_of, second_shift_of = (shifts(links[-1], number, order) for order in range(3))
    moves, two = any(links[-1].wanted), real(2)

    @compiled
    def all_three(s, ts, s2, at, given):
        s, ts, s2 = before(s, ts, s2, at, given)
        value, slope, shift, second = real(value_of(s, at, given)), real(0), real(0), real(0)
        if s != HIDDEN and value != HIDDEN:
            slope, second = real(slope_of(s, at, given)), ts * ts * real(bend_of(s, at, given))
            if moves:
                shift = real(shift_of(s, at, given))
                second += two * ts * real(slope_shift_of(s, at, given)) + real(second_shift_of(s, at, given))
        return value, slope * ts + shift, slope * s2 + second

    return all_three


@lru_cache(maxsize=256)
def reads(links, number, real):
    """(s, ds, at, given, read) -> what the gradient of an element gets of read number `read` of function `number`,
    which element that is among those of all gradients, and how many it reads. s: before all functions; ds: after."""
    identity, wanted = links[number]
    before, rest = values(links[:number], real), slopes(links, real, number + 1)
    value_of, derivative = own(links[number], number, 0), by_read(identity.function, (False, *wanted))

    @compiled
    def term(s, ds, at, given, read):
        s = before(s, at, given)
        value, arrays = real(value_of(s, at, given)), (at[4],) + given[number][0]
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
    before, just = tangents(links[:number], real), tangents(links[: number + 1], real, number)
    rest, derivative = tangents(links, real, number + 1), by_read_along(identity.function, (False, *wanted))

    @compiled
    def term(s, ts, ds, tds, at, given, read):
        s, ts, _, _ = before(s, ts, at, given)
        value, tvalue, _, _ = just(s, ts, at, given)
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


@compiled
def _all_same(s, ts, s2, at, given):
    return s, ts, s2


@cache
def _slopes_of_none(real):
    @compiled
    def of_none(s, at, given):
        return s, real(1)

    return of_none


@cache
def _tangents_of_none(real):
    @compiled
    def of_none(s, ts, at, given):
        return s, ts, real(1), real(0)

    return of_none
