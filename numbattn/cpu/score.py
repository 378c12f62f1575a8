"""Scores, tile by tile: what the parts of `score` do to S.

As everywhere here tiles are transposed: a row is a key, a column a query.
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..checks import DTYPES
from ..origin import Origin
from ..scores import sink_of
from ..scores.alibi import Alibi
from ..scores.bias import Bias
from ..scores.distance import DistancePart
from ..scores.function import Score
from ..scores.relative import RelativeBias
from ..scores.sink import Sink
from ..scores.softcap import Softcap
from ..values import rounded
from .arguments import compact, offsets_of
from .function import call_at, record_of, tile_function
from .record import Later, Record, data_address
from .tile import address_of, any_view, expm1, float_of_bfloat16, float_of_float16, inline, tile
from .transposition import transpose

CAP, ALIBI, RELATIVE, FUNCTION, *BIASES = range(8)
KINDS = {Softcap: CAP, Alibi: ALIBI, RelativeBias: RELATIVE, Score: FUNCTION}
FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = BIASES  # of each dtype: read as they are
OF_BIASES = dict(zip(DTYPES, BIASES))
CURVED = Softcap, Score  # have a derivative that is not 1
ABREAST = 8  # queries whose rows of a bias are read together: more of them drive each other out of the cache


class Steps(NamedTuple):
    """The parts of a score but for a Sink, as kernels take them: one type for all."""

    numbers: Any  # int64 (steps, 7): kind; rows and columns of its matrices, strides; reach or function; is aligned. A
    # function has its derivative, or 0, in place of rows
    caps: Any  # float64 (steps)
    offsets: Any  # int64 (steps, batch, heads), of parts that are not aligned by tile
    addresses: Any  # int64 (steps), of arrays; for a function, of the record of its arrays
    places: Any  # int64 (steps, batch, heads), bytes: where in the array the matrix of each begins
    origin: Origin  # from which functions count
    curved: int  # how many have a derivative that is not 1


NO_STEPS = Record(Steps(np.zeros((0, 7), np.int64), np.zeros(0), np.zeros((0, 0, 0), np.int64), np.zeros(0, np.int64),
                        np.zeros((0, 0, 0), np.int64), Origin(), 0))  # fmt: skip


class Step(NamedTuple):
    """A row of Steps, but for its address."""

    kind: int
    shape: tuple  # of an array (..., rows, columns); of a function its derivative and 0
    strides: tuple
    extra: int = 0  # reach, or function
    offset: Any = 0  # an int, or int64 (batch, heads) as bytes; None if it is aligned by tile
    cap: float = 0.0


def steps_of(problem, parts, origin, derivatives=False):
    """The Record of the Steps of a score. derivatives: whether those of functions are wanted."""
    if not parts:
        return NO_STEPS
    steps, arrays, held = [], [], []
    for part in parts:
        if not isinstance(part, Sink):
            step, x, owners = (_function if isinstance(part, Score) else _step)(part, problem, derivatives)
            steps.append(step)
            arrays.append(x)
            held.append(owners)
    addresses = np.array([*map(data_address, arrays)], np.int64)
    return _steps(problem, tuple(steps), origin).filled(addresses, held=(arrays, held))


def _function(part, problem, derivatives):
    """The Step of a user's function, the record of its arrays, and what has to live as long."""
    function = tile_function(part, problem.sum_dtype)
    slope = tile_function(part, problem.sum_dtype, derivative=True) if derivatives else None
    shape = slope.address if derivatives else 0, 0
    return Step(FUNCTION, shape, (0, 0), function.address), record_of(part.arrays), (function, slope)


def _step(part, problem, derivatives):
    """The Step of another part, its array, and nothing else."""
    x, kind, reach, offset = compact(matrix_of(part)), KINDS.get(type(part)), 0, 0
    if isinstance(part, Bias):
        kind = OF_BIASES[x.dtype]
    else:
        x = rounded(x, problem.sum_dtype)
    if isinstance(part, RelativeBias):
        reach = part._reach
    if isinstance(part, DistancePart):
        offset = part._whole_offset(problem.seqlen_q, problem.seqlen_k)
        if isinstance(offset, np.ndarray):
            offset = np.broadcast_to(offset, problem.batch).astype(np.int64).tobytes()
    x = x if x.flags.aligned else np.require(x, requirements="A")
    return Step(kind, x.shape, x.strides, reach, offset, getattr(part, "cap", 0.0)), x, None


@lru_cache(maxsize=64)
def _steps(problem, steps, origin):
    """The Record of Steps."""
    count, caps = len(steps), np.array([step.cap for step in steps], np.float64)
    numbers, offsets = np.zeros((count, 7), np.int64), np.zeros((count, *problem.matrices), np.int64)
    places = np.zeros_like(offsets)
    for number, (kind, shape, strides, extra, offset, _) in enumerate(steps):
        numbers[number] = kind, *shape[-2:], *strides[-2:], extra, offset is None
        if isinstance(offset, bytes):
            offset = np.frombuffer(offset, np.int64).reshape(problem.matrices)
        offsets[number] = 0 if offset is None else offset
        places[number] = offsets_of(shape[:-2], strides[:-2], problem.batch, problem.heads).reshape(problem.matrices)
    curved = sum(step.kind in (CAP, FUNCTION) for step in steps)
    return Record(Steps(numbers, caps, offsets, Later((count,), np.int64), places, origin, curved))


def matrix_of(part):
    """The array of a part with rows and columns; of a Softcap one that nobody reads."""
    (x,) = part._weights or (np.zeros(1),)
    if isinstance(part, Alibi):
        return x[..., None, None]
    return x[..., None, :] if isinstance(part, RelativeBias) else x.reshape((1,) * (2 - x.ndim) + x.shape)


def sinks_of(problem, parts):
    """The Record of the logit of each (batch, head); empty without a Sink."""
    sink = sink_of(parts) if parts else None
    if sink is None:
        return _no_sinks(problem.sum_dtype)
    logits = np.broadcast_to(rounded(sink.logits, problem.sum_dtype), problem.batch)
    return Record(logits.reshape(problem.matrices).copy())


@cache
def _no_sinks(dtype):
    return Record(np.zeros((0, 0), dtype))


def curved_in(parts):
    """How many parts have a derivative that is not 1."""
    return sum(isinstance(part, CURVED) for part in parts)


# ------------------------------------------------------------------------------------------------------------- scores
@inline
def score(S, steps, slopes, batch, head, m0, n0, aligned):
    """All steps in order. slopes: a tile for each derivative that is not 1, or nothing.

    aligned: the offset of the tile's queries within their segment.
    """
    number = 0
    for step in range(steps.caps.size):
        kind, rows, cols, row_stride, col_stride, extra, _ = steps.numbers[step]
        place = steps.addresses[step] + steps.places[step, batch, head], rows, cols, row_stride, col_stride
        own_slopes = slopes[number * S.size : (number + 1) * S.size]
        if kind == CAP:
            cap(S, own_slopes, S.dtype.type(steps.caps[step]))
            number += 1
        elif kind == FUNCTION:
            record, derivative, value = place[0], rows, extra
            if slopes.size:
                call_function(derivative, S, address_of(own_slopes), steps.origin, batch, head, m0, n0, record)
            call_function(value, S, 0, steps.origin, batch, head, m0, n0, record)
            number += 1
        elif kind == ALIBI:
            add_alibi(S, any_view(*place, S.dtype), m0 + offset_of(steps, step, batch, head, aligned) - n0)
        elif kind == RELATIVE:
            first = n0 - m0 - offset_of(steps, step, batch, head, aligned)
            add_relative(S, any_view(*place, S.dtype), first, extra)
        elif kind == FLOAT32:
            add_bias(S, any_view(*place, np.float32), m0, n0)
        elif kind == FLOAT64:
            add_bias(S, any_view(*place, np.float64), m0, n0)
        elif kind == FLOAT16:
            add_bits(S, any_view(*place, np.uint16), float_of_float16, m0, n0)
        else:
            add_bits(S, any_view(*place, np.uint16), float_of_bfloat16, m0, n0)


@inline
def call_function(function, S, slopes, origin, batch, head, m0, n0, record):
    batch, head, m0, n0 = batch + origin.batch, head + origin.head, m0 + origin.query, n0 + origin.key
    call_at(function, address_of(S), slopes, S.shape[0], S.shape[1], batch, head, m0, n0, record)


@inline
def offset_of(steps, step, batch, head, aligned):
    """The own key of query 0."""
    return aligned if steps.numbers[step, 6] else steps.offsets[step, batch, head]


@inline
def cap(S, slopes, size):
    """size tanh(x), and its derivative. With x = S / size and e = exp(2 x) - 1, tanh(x) = e / (e + 2)."""
    one, two = S.dtype.type(1), S.dtype.type(2)
    for j in range(S.shape[0]):
        for i in range(S.shape[1]):
            S[j, i] = expm1(two * (S[j, i] / size))
    if slopes.size:
        derivative = tile(slopes, S.shape[0], S.shape[1])
        for j in range(S.shape[0]):
            for i in range(S.shape[1]):
                half = two / (S[j, i] + two)
                derivative[j, i] = (S[j, i] + one) * half * half            # 1 - tanh(x)^2 without cancellation
    for j in range(S.shape[0]):
        for i in range(S.shape[1]):
            S[j, i] = size * (S[j, i] / (S[j, i] + two))


@inline
def add_bias(S, bias, m0, n0):
    if bias.shape[0] > 1 and bias.shape[1] > 1 and bias.strides[1] == bias.itemsize:
        transpose(S, bias[m0 : m0 + S.shape[1], n0 : n0 + S.shape[0]], S.dtype.type(1), True)
        return
    one_query, one_key = bias.shape[0] == 1, bias.shape[1] == 1
    step = S.shape[1] if one_query else ABREAST
    for first in range(0, S.shape[1], step):
        for j in range(S.shape[0]):
            for i in range(first, min(first + step, S.shape[1])):
                S[j, i] += S.dtype.type(bias[0 if one_query else m0 + i, 0 if one_key else n0 + j])


@inline
def add_bits(S, bits, float_of, m0, n0):
    """Of a bias in float16 or bfloat16, which Numba does not know on CPUs."""
    one_query, one_key = bits.shape[0] == 1, bits.shape[1] == 1
    step = S.shape[1] if one_query else ABREAST
    for first in range(0, S.shape[1], step):
        for j in range(S.shape[0]):
            for i in range(first, min(first + step, S.shape[1])):
                S[j, i] += S.dtype.type(float_of(bits[0 if one_query else m0 + i, 0 if one_key else n0 + j]))


@inline
def add_alibi(S, slope, first):
    """first: how far the own key of the first query is behind the first key."""
    for j in range(S.shape[0]):
        for i in range(S.shape[1]):
            S[j, i] -= slope[0, 0] * S.dtype.type(abs(first + i - j))


@inline
def add_relative(S, table, first, reach):
    """first: how far the first key is behind the own key of the first query."""
    for j in range(S.shape[0]):
        for i in range(S.shape[1]):
            S[j, i] += table[0, min(max(first + j - i, -reach), reach) + reach]
