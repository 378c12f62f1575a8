"""Parts that a function of one element defines, called by their addresses."""

from ...scores.element import FunctionPart
from ..function import gradient_function, record_of, tile_function
from ..function_tangents import along_function, gradient_along_function
from ..tile import address_of, call_at, inline
from .kind import CPUScoreKind, LoweredStep


def lower(part, problem, order, sums):
    """The lowered function with the record of its arrays; its numbers are the addresses of it and its derivatives."""
    dtype = problem.sum_dtype
    functions = [tile_function(part, dtype), tile_function(part, dtype, order) if order else None]
    functions.append(gradient_function(part, dtype) if sums and part._wants_gradient else None)
    *numbers, adding = map(address_or_0, functions)
    return LoweredStep((0, 0), (0, 0), numbers=tuple(numbers), sums=adding), record_of(part._looked_up), functions


def lower_tangent(tangent, problem, order):
    """A ScoreTangent, likewise; its numbers are the addresses of an along_function, or 0, and, with the order 2, of a
    gradient_along_function."""
    moves = None if tangent._is_zero else along_function(tangent, problem.sum_dtype, order > 1)
    gradient = gradient_along_function(tangent, problem.sum_dtype) if order > 1 else None
    numbers = address_or_0(moves), address_or_0(gradient)
    record = record_of((*tangent._score._looked_up, tangent._tangents))
    return LoweredStep((0, 0), (0, 0), numbers=numbers), record, (tangent, moves, gradient)


def address_or_0(function):
    return function.address if function else 0


@inline
def apply(S, slopes, row, batch, head, m0, n0):
    if slopes.size:
        call(row.other, S, address_of(slopes), row, batch, head, m0, n0)
    call(row.one, S, 0, row, batch, head, m0, n0)


@inline
def call(function, S, slopes, row, batch, head, m0, n0):
    place = place_of(row.origin, batch, head, m0, n0)
    call_at(function, (address_of(S), slopes, S.shape[0], S.shape[1], *place, row.address))


@inline
def place_of(origin, batch, head, m0, n0):
    return batch + origin.batch, head + origin.head, m0 + origin.query, n0 + origin.key


@inline
def collect(dx, dS, S, row, batch, head, m0, n0):
    place = place_of(row.origin, batch, head, m0, n0)
    given = address_of(S), address_of(dS), address_of(dx), dx.size, S.shape[0], S.shape[1]
    call_at(row.sums, (*given, *place, row.address))


@inline
def move(S, tS, F, row, batch, head, m0, n0):
    if row.one != 0:
        given = address_of(S), address_of(tS), address_of(F), S.shape[0], S.shape[1]
        call_at(row.one, (*given, *place_of(row.origin, batch, head, m0, n0), row.address))


@inline
def collect_along(dx, dS, tdS, S, row, batch, head, m0, n0):
    given = address_of(S), address_of(dS), address_of(tdS), address_of(dx), dx.size
    place = place_of(row.origin, batch, head, m0, n0)
    call_at(row.other, (*given, S.shape[0], S.shape[1], *place, row.address))


KIND = CPUScoreKind(FunctionPart, lower, apply, collect, lower_tangent, move, collect_along)
