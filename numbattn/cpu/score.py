"""Scores, tile by tile: what the parts of `score` do to S.

As everywhere here tiles are transposed: a row is a key, a column a query.
"""

from typing import Any, NamedTuple

import numpy as np

from ..checks import DTYPES
from ..functions import Score
from ..origin import Origin
from ..scores import Alibi, Bias, DistancePart, RelativeBias, Sink, Softcap, sink_of
from ..values import rounded
from .arguments import compact, matrices_of
from .function import call_at, record_of, tile_function
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
    values: Any  # int64 (steps, batch, heads), addresses of matrices; for a function, of the record of its arrays
    origin: Origin  # from which functions count


NO_STEPS = Steps(np.zeros((0, 7), np.int64), np.zeros(0), *np.zeros((2, 0, 0, 0), np.int64), Origin())


def steps_of(problem, parts, origin, derivatives=False):
    """The Steps of a score, and the arrays to keep alive. derivatives: whether those of functions are wanted."""
    if not parts:
        return NO_STEPS, ()
    numbers, caps, offsets, values, alive = [], [], [], [], []
    zero = np.zeros(problem.matrices, np.int64)
    for part in parts:
        if isinstance(part, Sink):
            continue
        if isinstance(part, Score):
            function, record = tile_function(part, problem.sum_dtype), record_of(part.arrays)
            slope = tile_function(part, problem.sum_dtype, derivative=True) if derivatives else None
            numbers.append((FUNCTION, slope.address if derivatives else 0, 0, 0, 0, function.address, False))
            caps.append(0.0)
            offsets.append(zero)
            values.append(np.full(problem.matrices, record.ctypes.data))
            alive += function, slope, record
            continue
        x = compact(matrix_of(part))
        x = np.require(x if isinstance(part, Bias) else rounded(x, problem.sum_dtype), requirements="A")
        kind = OF_BIASES[x.dtype] if isinstance(part, Bias) else KINDS[type(part)]
        matrices = matrices_of(x, problem)
        reach = part._reach if isinstance(part, RelativeBias) else 0
        offset = part._whole_offset(problem.seqlen_q, problem.seqlen_k) if isinstance(part, DistancePart) else 0
        numbers.append((kind, *x.shape[-2:], *x.strides[-2:], reach, offset is None))
        caps.append(getattr(part, "cap", 0.0))
        offsets.append(zero if offset is None else np.broadcast_to(offset, problem.batch).reshape(problem.matrices))
        values.append(matrices.address + matrices.offsets)
        alive.append(x)
    numbers, caps = np.array(numbers, np.int64).reshape(-1, 7), np.array(caps, np.float64)
    offsets, values = (np.array(x, np.int64).reshape(len(caps), *problem.matrices) for x in (offsets, values))
    return Steps(numbers, caps, offsets, values, origin), alive


def matrix_of(part):
    """The array of a part with rows and columns; of a Softcap one that nobody reads."""
    (x,) = part._weights or (np.zeros(1),)
    if isinstance(part, Alibi):
        return x[..., None, None]
    return x[..., None, :] if isinstance(part, RelativeBias) else x.reshape((1,) * (2 - x.ndim) + x.shape)


def sinks_of(problem, parts):
    """The logit of each (batch, head); empty without a Sink."""
    sink = sink_of(parts)
    if sink is None:
        return np.zeros((0, 0), problem.sum_dtype)
    return np.broadcast_to(rounded(sink.logits, problem.sum_dtype), problem.batch).reshape(problem.matrices).copy()


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
        place = steps.values[step, batch, head], rows, cols, row_stride, col_stride
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
