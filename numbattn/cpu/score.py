"""Scores, tile by tile: what the parts of `score` do to S, and the gradients of their arrays.

As everywhere here tiles are transposed: a row is a key, a column a query.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ..scores import Alibi, Bias, DistancePart, RelativeBias, Score, Sink, Softcap, sink_of
from .arguments import matrices_of, readable
from .function import call_at, record_of, tile_function
from .tile import address_of, expm1, inline, strided_view, tile

LOG2_E = math.log2(math.e)
CAP, BIAS, ALIBI, RELATIVE, FUNCTION = range(5)
KINDS = {Softcap: CAP, Bias: BIAS, Alibi: ALIBI, RelativeBias: RELATIVE, Score: FUNCTION}
CURVED = Softcap, Score  # have a derivative that is not 1
PARTS = 16  # at most, of which a sum over all tiles of queries is made: a constant, so that its bits do not change


class Steps(NamedTuple):
    """The parts of a score but for a Sink, as kernels take them: one type for all."""

    numbers: Any  # int64 (steps, 6): kind; rows, columns and stride of its matrices; reach or function; is aligned
    caps: Any  # float64 (steps)
    offsets: Any  # int64 (steps, batch, heads), of parts that are not aligned by tile
    values: Any  # int64 (steps, batch, heads), addresses of matrices; for a function, of the record of its arrays


def steps_of(problem, parts):
    """The Steps of a score, and the arrays to keep alive."""
    numbers, caps, offsets, values, alive = [], [], [], [], []
    zero = np.zeros(problem.matrices, np.int64)
    for part in parts:
        if isinstance(part, Sink):
            continue
        if isinstance(part, Score):
            function, record = tile_function(part, problem.sum_dtype), record_of(part.arrays)
            numbers.append((FUNCTION, 0, 0, 0, function.address, False))
            caps.append(0.0)
            offsets.append(zero)
            values.append(np.full(problem.matrices, record.ctypes.data))
            alive += function, record
            continue
        x = readable(_compact(_matrix_of(part)), problem.sum_dtype)
        matrices = matrices_of(x, problem)
        reach = part._reach if isinstance(part, RelativeBias) else 0
        offset = part._whole_offset(problem.seqlen_q, problem.seqlen_k) if isinstance(part, DistancePart) else 0
        numbers.append((KINDS[type(part)], matrices.rows, matrices.cols, matrices.stride, reach, offset is None))
        caps.append(getattr(part, "cap", 0.0))
        offsets.append(zero if offset is None else np.broadcast_to(offset, problem.batch).reshape(problem.matrices))
        values.append(matrices.address + matrices.offsets)
        alive.append(x)
    numbers, caps = np.array(numbers, np.int64).reshape(-1, 6), np.array(caps, np.float64)
    offsets, values = (np.array(x, np.int64).reshape(len(caps), *problem.matrices) for x in (offsets, values))
    return Steps(numbers, caps, offsets, values), alive


def _matrix_of(part):
    """The array of a part with rows and columns; of a Softcap one that nobody reads."""
    (x,) = part._weights or (np.zeros(1),)
    if isinstance(part, Alibi):
        return x[..., None, None]
    return x[..., None, :] if isinstance(part, RelativeBias) else x.reshape((1,) * (2 - x.ndim) + x.shape)


def _compact(x):
    """x with one row, or column, instead of many that share memory."""
    x = x[..., :1, :] if x.strides[-2] == 0 else x
    return x[..., :1] if x.strides[-1] == 0 else x


def sinks_of(problem, parts):
    """The logit of each (batch, head); empty without a Sink."""
    sink = sink_of(parts)
    if sink is None:
        return np.zeros((0, 0), problem.sum_dtype)
    return np.broadcast_to(sink.logits.astype(problem.sum_dtype), problem.batch).reshape(problem.matrices).copy()


def factor_of_q(scale, parts):
    """What Q is multiplied by: scores are in base 2 at once, unless something is done to them."""
    return scale if any(not isinstance(part, Sink) for part in parts) else scale * LOG2_E


def curved_in(parts):
    """How many parts have a derivative that is not 1."""
    return sum(isinstance(part, CURVED) for part in parts)


# ------------------------------------------------------------------------------------------------------------- scores
@inline
def score(S, steps, slopes, batch, head, m0, n0, aligned):
    """All steps in order; S is then in base 2. slopes: a tile for each derivative that is not 1, or nothing.

    aligned: the offset of the tile's queries within their segment.
    """
    if steps.caps.size == 0:
        return
    number = 0
    for step in range(steps.caps.size):
        kind, rows, cols, stride, extra, _ = steps.numbers[step]
        x = strided_view(steps.values[step, batch, head], rows, cols, stride, S.dtype)
        own_slopes = slopes[number * S.size : (number + 1) * S.size]
        if kind == CAP:
            cap(S, own_slopes, S.dtype.type(steps.caps[step]))
            number += 1
        elif kind == FUNCTION:
            to, record = address_of(own_slopes) if slopes.size else 0, steps.values[step, batch, head]
            call_at(extra, address_of(S), to, S.shape[0], S.shape[1], batch, head, m0, n0, record)
            number += 1
        elif kind == BIAS:
            add_bias(S, x, m0, n0)
        elif kind == ALIBI:
            add_alibi(S, x, m0 + offset_of(steps, step, batch, head, aligned) - n0)
        else:
            add_relative(S, x, n0 - m0 - offset_of(steps, step, batch, head, aligned), extra)
    for j in range(S.shape[0]):
        for i in range(S.shape[1]):
            S[j, i] *= S.dtype.type(LOG2_E)


@inline
def offset_of(steps, step, batch, head, aligned):
    """The own key of query 0."""
    return aligned if steps.numbers[step, 5] else steps.offsets[step, batch, head]


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
    one_query, one_key = bias.shape[0] == 1, bias.shape[1] == 1
    for j in range(S.shape[0]):
        for i in range(S.shape[1]):
            S[j, i] += bias[0 if one_query else m0 + i, 0 if one_key else n0 + j]


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


# ---------------------------------------------------------------------------------------------------------- gradients
@inline
def pull_back(dS, slopes, first, end):
    """dS times derivatives number first to end - 1, in place. Where an element is masked they may be NaN."""
    for number in range(first, end):
        derivative = tile(slopes[number * dS.size : (number + 1) * dS.size], dS.shape[0], dS.shape[1])
        for j in range(dS.shape[0]):
            for i in range(dS.shape[1]):
                dS[j, i] = dS[j, i] * derivative[j, i] if dS[j, i] != 0 else dS.dtype.type(0)


@inline
def collect(dx, dS, steps, step, batch, head, m0, n0, aligned):
    """Add a tile of dS, that behind the step, to the gradient of the step's array."""
    kind, _, _, _, reach, _ = steps.numbers[step]
    first = n0 - m0 - offset_of(steps, step, batch, head, aligned)
    if kind == BIAS:
        one_query, one_key = dx.shape[0] == 1, dx.shape[1] == 1
        for j in range(dS.shape[0]):
            for i in range(dS.shape[1]):
                dx[0 if one_query else m0 + i, 0 if one_key else n0 + j] += dS[j, i]
    elif kind == ALIBI:
        for j in range(dS.shape[0]):
            for i in range(dS.shape[1]):
                dx[0, 0] -= abs(first + j - i) * dS[j, i]
    else:
        for j in range(dS.shape[0]):
            for i in range(dS.shape[1]):
                dx[0, min(max(first + j - i, -reach), reach) + reach] += dS[j, i]


class Sums(NamedTuple):
    """The gradient of an array while it is summed up, a block for each of the shares of each of its own matrices."""

    dx: Any  # (parts, own matrices, rows, columns); the parts are sums over different tiles of queries
    tiles: Any  # of all score matrices, as Tiles.table
    starts: Any  # tiles[starts[b]:starts[b + 1]] belong to block b
    shares: int  # so many blocks for each matrix


def sums_for(problem, part, tiles, tile_m):
    """Sums of zeros for the array of a part. No tile goes beyond a multiple of tile_m: blocks share no row."""
    *lead, rows, cols = _matrix_of(part).shape
    lead = (1,) * (len(problem.batch) - len(lead)) + tuple(lead)
    own = np.broadcast_to(np.arange(math.prod(lead)).reshape(lead), problem.batch).reshape(-1)
    m_blocks = -(-problem.seqlen_q // tile_m)
    parts = 1 if rows > 1 else min(m_blocks, PARTS)
    shares = m_blocks if rows > 1 else parts
    batch, head, m0, *_ = tiles.T
    block = own[batch * problem.heads + head] * shares + m0 // tile_m % max(shares, 1)
    order = np.argsort(block, kind="stable")
    starts = np.searchsorted(block[order], np.arange(math.prod(lead) * shares + 1))
    whole = rows > 1 and cols > 1  # few numbers are added to an element, and there are many of these
    dx = np.zeros((parts, math.prod(lead), rows, cols), problem.sum_dtype if whole else np.float64)
    return Sums(dx, tiles[order], starts, shares)
