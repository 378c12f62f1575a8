"""Functions of the user's own, numbattn.Score, called by their addresses."""

from ...scores.function import Score
from ..function import gradient_function, record_of, tile_function
from ..tile import address_of, call_at, inline
from .kind import Kind, Lowered


def lower(part, problem, order):
    """A function, Lowered, with the record of its arrays; its numbers are the addresses of it and its derivatives."""
    function = tile_function(part, problem.sum_dtype)
    derivatives = tile_function(part, problem.sum_dtype, order) if order else None
    gradient = gradient_function(part, problem.sum_dtype) if order and part._wants_gradient else None
    numbers = function.address, derivatives.address if order else 0
    lowered = Lowered((0, 0), (0, 0), numbers=numbers, sums=gradient.address if gradient else 0)
    return lowered, record_of(part.arrays), (function, derivatives, gradient)


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
def collect_reads(dx, dS, S, sums, row, batch, head, m0, n0):
    """Add to the gradients of a function's arrays. dS: after it, S: before it; sums: the address of what does that."""
    place = place_of(row.origin, batch, head, m0, n0)
    given = address_of(S), address_of(dS), address_of(dx), dx.size, S.shape[0], S.shape[1]
    call_at(sums, (*given, *place, row.address))


KIND = Kind(Score, lower, apply)
