"""Functions of the user's own, numbattn.Score, called by their addresses."""

from ...scores.function import Score
from ..function import record_of, tile_function
from ..tile import address_of, call_at, inline
from .kind import Kind, Lowered


def lower(part, problem, order):
    """A function, Lowered, with the record of its arrays; its numbers are the addresses of it and its derivatives."""
    function = tile_function(part, problem.sum_dtype)
    derivatives = tile_function(part, problem.sum_dtype, order) if order else None
    numbers = function.address, derivatives.address if order else 0
    return Lowered((0, 0), (0, 0), numbers=numbers), record_of(part.arrays), (function, derivatives)


@inline
def apply(S, slopes, row, batch, head, m0, n0):
    if slopes.size:
        call(row.other, S, address_of(slopes), row, batch, head, m0, n0)
    call(row.one, S, 0, row, batch, head, m0, n0)


@inline
def call(function, S, slopes, row, batch, head, m0, n0):
    at = row.origin
    batch, head, m0, n0 = batch + at.batch, head + at.head, m0 + at.query, n0 + at.key
    call_at(function, (address_of(S), slopes, S.shape[0], S.shape[1], batch, head, m0, n0, row.address))


KIND = Kind(Score, lower, apply)
