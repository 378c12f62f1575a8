"""Scores, tile by tile: the steps of the parts of `score` on S.

As everywhere here tiles are transposed: a row is a key, a column a query.
"""

from functools import cache, lru_cache, reduce
from typing import Any, NamedTuple

import numpy as np

from .. import scores
from ..base.origin import Origin
from ..base.values import put
from .arguments import mask_of, numbers_of
from .operands import offsets_of
from .record import Later, Record, data_address
from .scores import KINDS, Row
from .tile import inline, inline_view, tile

NOTHING = -1  # the number of no kind
COLUMNS = 12
KIND, SLOPES, ORDER, ROWS, COLS, ROW_STRIDE, COL_STRIDE, IS_ALIGNED, ONE, OTHER, SUMS, KEPT = range(COLUMNS)


class Steps(NamedTuple):
    """The parts of a score except a Sink, as kernels take them: one type for all scores."""

    numbers: Any  # int64 (steps, 12): number of the kind; of its first tile of derivatives, or -1, and how many it has;
    # rows and columns of its matrices, strides; whether it is aligned by tile; two numbers of the kind's own; of a
    # function the address of what adds to gradients of its arrays; the number of the tile where S before it is kept,
    # or -1, of second derivatives also its tangent, in the tile after that
    caps: Any  # float64 (steps)
    offsets: Any  # int64 (steps, batch, heads), of parts that are not aligned by tile
    addresses: Any  # int64 (steps), of arrays
    places: Any  # int64 (steps, batch, heads), bytes: where in the array the matrix of each begins
    origin: Origin  # that functions count from


NO_STEPS = Record(Steps(np.zeros((0, COLUMNS), np.int64), np.zeros(0), np.zeros((0, 0, 0), np.int64),
                        np.zeros(0, np.int64), np.zeros((0, 0, 0), np.int64), Origin()))  # fmt: skip


def steps_of(problem, parts, origin, order=0, sums=False):
    """The Record of the Steps of a score. order: of the highest derivative wanted, for parts that are not linear; sums:
    whether gradients of functions' arrays are wanted."""
    if not parts:
        return NO_STEPS
    steps, arrays, held = [], [], []
    for part in scores.steps_of(parts):
        number = number_of(type(part))
        lowered, x, owners = KINDS[number].lower(part, problem, order, sums)
        steps.append((number, lowered, order > 0 and part._keeps_scores))
        arrays.append(x)
        held.append(owners)
    addresses = np.array([*map(data_address, arrays)], np.int64)
    return lowered_steps(problem, tuple(steps), origin, order).filled(addresses, held=(arrays, held))


@cache
def number_of(part):
    """The number of the kind of a class of parts."""
    return next(number for number, kind in enumerate(KINDS) if issubclass(part, kind.of))


@lru_cache(maxsize=64)
def lowered_steps(problem, steps, origin, order):
    """The Record of Steps: of each part the number of its kind, or NOTHING, its LoweredStep, whether S is kept."""
    count, caps = len(steps), np.array([lowered.cap for _, lowered, _ in steps], np.float64)
    numbers, offsets = np.zeros((count, COLUMNS), np.int64), np.zeros((count, *problem.matrices), np.int64)
    places, tiles = np.zeros_like(offsets), 0
    for step, (kind, (shape, strides, offset, own, _, sums), _) in enumerate(steps):
        is_nonlinear = kind != NOTHING and KINDS[kind].of._is_nonlinear
        derivatives = (tiles, order) if is_nonlinear else (-1, 0)
        numbers[step] = kind, *derivatives, *shape[-2:], *strides[-2:], offset is None, *own, sums, -1
        tiles += derivatives[1]
        if isinstance(offset, bytes):
            offset = np.frombuffer(offset, np.int64).reshape(problem.matrices)
        offsets[step] = 0 if offset is None else offset
        places[step] = offsets_of(shape[:-2], strides[:-2], problem.batch, problem.heads).reshape(problem.matrices)
    keeping = np.flatnonzero([keeps for _, _, keeps in steps])
    numbers[keeping, KEPT] = tiles + order * np.arange(len(keeping))
    return Record(Steps(numbers, caps, offsets, Later((count,), np.int64), places, origin))


def options_of(problem, inputs, order=0, sums=False):
    """The Records of the mask, of the Steps of the score, see `steps_of`, of dropout and the scale."""
    return (
        mask_of(problem, inputs.mask), steps_of(problem, inputs.score, inputs.origin, order, sums),
        numbers_of(inputs.dropout, inputs.origin, inputs.scale),
    )  # fmt: skip


def sinks_of(problem, parts):
    """The Record of the logit of each (batch, head); empty without a Sink."""
    sink = scores.sink_of(parts) if parts else None
    if sink is None:
        return no_sinks(problem.sum_dtype, 2)
    logits = np.empty(problem.batch, problem.sum_dtype)
    put(logits, sink.logits)
    return _sinks(problem.matrices, problem.sum_dtype).filled(logits)


@cache
def no_sinks(dtype, axes):
    return Record(np.zeros((0,) * axes, dtype))


@lru_cache(maxsize=64)
def _sinks(shape, dtype):
    return Record(Later(shape, dtype))


def nonlinear_in(parts):
    """How many parts have a derivative that is not 1."""
    return sum(part._is_nonlinear for part in parts)


def kept_in(parts):
    """How many parts need S before them to be kept, for gradients of their arrays."""
    return sum(part._keeps_scores for part in parts)


# ------------------------------------------------------------------------------------------------------------- scores
def by_kind(functions):
    """The device function (kind, *arguments) that calls the function with the number `kind`, if there is one."""

    def or_this(others, numbered):
        number, function = numbered

        @inline
        def call(kind, *arguments):
            if kind == number:
                function(*arguments)
            else:
                others(kind, *arguments)

        return call

    @inline
    def nothing(kind, *arguments):
        pass

    return reduce(or_this, [x for x in enumerate(functions) if x[1]], nothing)


apply = by_kind([kind.apply for kind in KINDS])


@inline
def score(S, steps, slopes, batch, head, m0, n0, aligned):
    """All steps in order. slopes: tiles for derivatives of parts that are not linear, and for S where it is kept.

    aligned: the offset of the tile's queries within their segment.
    """
    for step in range(steps.caps.size):
        own, order = steps.numbers[step, SLOPES], steps.numbers[step, ORDER]
        own_slopes = slopes[own * S.size : (own + order) * S.size] if own >= 0 else slopes[:0]
        if steps.numbers[step, KEPT] >= 0:
            copy(numbered_tile(slopes, steps.numbers[step, KEPT], S), S)
        row = row_of(steps, step, batch, head, aligned)
        apply(steps.numbers[step, KIND], S, own_slopes, row, batch, head, m0, n0)


@inline
def copy(out, S):
    for j in range(S.shape[0]):
        for i in range(S.shape[1]):
            out[j, i] = S[j, i]


@inline_view
def numbered_tile(buffer, number, like):
    """A tile of a buffer of tiles as large as this one."""
    return tile(buffer[number * like.size : (number + 1) * like.size], like.shape[0], like.shape[1])


@inline
def row_of(steps, step, batch, head, aligned):
    """The Row of a step."""
    numbers, address = steps.numbers[step], steps.addresses[step] + steps.places[step, batch, head]
    offset = aligned if numbers[IS_ALIGNED] else steps.offsets[step, batch, head]
    return Row(address, numbers[ROWS], numbers[COLS], numbers[ROW_STRIDE], numbers[COL_STRIDE], offset, numbers[ONE],
               numbers[OTHER], numbers[SUMS], steps.caps[step], steps.origin)  # fmt: skip
