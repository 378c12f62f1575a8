"""A score of edges, compiled apart from the kernels of graphs, which call it by its address: see `functions.chain`."""

import ctypes
from functools import lru_cache, reduce
from typing import NamedTuple

import numba
import numpy as np
from numba import types

from ..functions.compiled import chain
from ..functions.compiled.errors import naming
from ..functions.compiled.strict import compiled
from ..graphs.score import elements_of, given_of, links_of
from .compile import c_function
from .function import kinds_of
from .record import data_address, reader
from .tile import address_of, call_at, contiguous_view, inline

WORDS = 9
S, TS, S2, VALUE, SLOPE, TVALUE, TSLOPE, DS, TDS = range(WORDS)  # of the numbers of an edge, before and after the score
ARGUMENTS = [ctypes.c_int64] * 7  # numbers, batch, head, edge, i, j, record
SUMMED_ARGUMENTS = [ctypes.c_int64] * 9  # these, sums, elements
BLOCKS = 64  # of rows, each with sums of its own: a constant, so that gradients do not depend on the number of threads


class EdgeScore(NamedTuple):
    """A score as kernels take it; zeros without one."""

    apply: int  # addresses of functions
    add: int
    record: int  # addresses of arrays
    sums: int
    elements: int  # of a sum
    rows: int  # with one sum


def score_of(problem, inputs, rows, order=0, moving=(), adds=False):
    """The EdgeScore; the sums (blocks, elements), if gradients are wanted; and what has to live as long as these.
    order: 0: S alone, 1: its derivative, too, 2: with tangents, also of arrays, `moving`, 3: with their derivatives."""
    parts, dtype = inputs.score, problem.sum_dtype
    elements = sum(map(elements_of, parts)) if adds else 0
    size = -(-rows // BLOCKS) if elements else 1
    sums = np.zeros((-(-rows // size) if elements else 0, elements))
    if not parts:
        return EdgeScore(0, 0, 0, 0, 0, 1), sums, ()
    given = given_of(parts, float, dtype, moving if order > 1 else None)
    kinds = tuple([types.Tuple([types.Tuple([*map(kind_of, arrays)]), types.Tuple(kinds_of(tangents)), types.int64])
                   for arrays, tangents, _ in given])  # fmt: skip
    record = np.array([word for arrays, tangents, first in given for word in (*words_of((*arrays, *tangents)), first)])
    about = links_of(parts, dtype), kinds, dtype
    with naming(*[part._function for part in parts if hasattr(part, "_function")]):
        functions = [apply_function(*about, order), add_function(*about, order) if elements else None]
    addresses = [0 if function is None else function.address for function in functions]
    score = EdgeScore(*addresses, data_address(record), data_address(sums), elements, size)
    return score, sums, (given, record, functions)


def kind_of(x):
    return types.float64 if isinstance(x, float) else kinds_of((x,))[0]


def words_of(arrays):
    """Numbers, and of arrays address, shape and strides."""
    for x in arrays:
        if isinstance(x, float):
            yield int(np.float64(x).view(np.int64))
        else:
            yield from (data_address(x), *x.shape, *x.strides)


@lru_cache(maxsize=256)
def apply_function(links, kinds, dtype, order):
    """The CFunction of ARGUMENTS that reads S, and TS with order 2, and writes VALUE and what else is of that order;
    with order 3 it reads S2, too, and writes it, but no derivatives by S."""

    def make():
        chain.check_all(links, kinds, numba.from_dtype(dtype), order)
        real, read, first, second, third = dtype.type, reader(kinds), order > 0, order > 1, order > 2
        of_order = chain.values, chain.slopes, chain.tangents, chain.seconds
        of_value, of_slope, of_both, of_second = (each(links, real) for each in of_order)

        def apply(numbers, batch, head, edge, i, j, record):
            x, at, given = contiguous_view(numbers, 1, WORDS, WORDS, real), (batch, head, edge, i, j), read(record, 0)
            if third:
                x[0, VALUE], x[0, TVALUE], x[0, S2] = of_second(x[0, S], x[0, TS], x[0, S2], at, given)
            elif second:
                x[0, VALUE], x[0, TVALUE], x[0, SLOPE], x[0, TSLOPE] = of_both(x[0, S], x[0, TS], at, given)
            elif first:
                x[0, VALUE], x[0, SLOPE] = of_slope(x[0, S], at, given)
            else:
                x[0, VALUE] = of_value(x[0, S], at, given)

        return apply

    return c_function((*name_of(links), kinds, dtype.str, order), ARGUMENTS, make)


@lru_cache(maxsize=256)
def add_function(links, kinds, dtype, order):
    """The CFunction of SUMMED_ARGUMENTS that adds to the gradients of arrays, from S and DS, or with order 2 to the
    tangents of these, from TS and TDS, too."""

    def make():
        chain.check_all(links, kinds, numba.from_dtype(dtype), order, gradients=True)
        real, read_given, second = dtype.type, reader(kinds), order > 1

        def after(before, number):
            term_of = chain.reads(links, number, real)
            moved_of = chain.reads_along(links, number, real) if second else None

            @compiled
            def add(x, sums, at, given):
                before(x, sums, at, given)
                read, count = 0, 1
                while read < count:
                    if second:
                        term, element, count = moved_of(x[0, S], x[0, TS], x[0, DS], x[0, TDS], at, given, read)
                    else:
                        term, element, count = term_of(x[0, S], x[0, DS], at, given, read)
                    if read < count:
                        sums[0, element] += term
                    read += 1

            return add

        add = reduce(after, [number for number, link in enumerate(links) if any(link.wanted)], nothing)

        def add_all(numbers, batch, head, edge, i, j, record, sums, elements):
            x = contiguous_view(numbers, 1, WORDS, WORDS, real)
            sums = contiguous_view(sums, 1, elements, elements, np.float64)
            add(x, sums, (batch, head, edge, i, j), read_given(record, 0))

        return add_all

    return c_function((*name_of(links), "add", kinds, dtype.str, order), SUMMED_ARGUMENTS, make)


def name_of(links):
    return "edges", *[(link.identity.digest, link.wanted) for link in links]


@compiled
def nothing(x, sums, at, given):
    pass


# ------------------------------------------------------------------------------------------------------- in kernels
@inline
def scored(score, numbers, at, s, ts):
    """S and tS after the score, its derivative and the tangent of that."""
    if score.apply == 0:
        return s, ts, numbers.dtype.type(1), numbers.dtype.type(0)
    numbers[S], numbers[TS] = s, ts
    call_at(score.apply, (address_of(numbers), at.batch, at.head, at.number, at.i, at.j, score.record))
    return numbers[VALUE], numbers[TVALUE], numbers[SLOPE], numbers[TSLOPE]


@inline
def scored_twice(score, numbers, at, s, ts, s2):
    """S, tS and the second derivative of S after the score."""
    if score.apply == 0:
        return s, ts, s2
    numbers[S], numbers[TS], numbers[S2] = s, ts, s2
    call_at(score.apply, (address_of(numbers), at.batch, at.head, at.number, at.i, at.j, score.record))
    return numbers[VALUE], numbers[TVALUE], numbers[S2]


@inline
def add_reads(score, numbers, at, line, dS, tdS):
    """Add to the gradients of arrays, from dS and tdS after the score, whose numbers are those of `scored`."""
    if score.add != 0:
        numbers[DS], numbers[TDS] = dS, tdS
        sums = score.sums + line // score.rows * score.elements * 8
        place = address_of(numbers), at.batch, at.head, at.number, at.i, at.j, score.record
        call_at(score.add, (*place, sums, score.elements))
