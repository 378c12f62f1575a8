"""Scores: what a call's parts do to S = scale Q K^T before the mask, and what dS is multiplied by. See numbattn.scores.

Only the kinds of the parts are compiled in; their numbers and arrays are arguments. Without a score nothing is. With
one, S and its exponents are natural: what kernels call scale_log2 is log2(e) then.
"""

from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numba.cuda import types

from ..tile import (
    INDEX,
    Alignment,
    aligned,
    convert,
    device,
    diagonal_index,
    exp2,
    full,
    load,
    maximum,
    minimum,
    reciprocal,
    shape,
    take,
    where,
)
from .layouts import DTYPES, array_type, sum_type
from .softmax import LOG2_E

CURVED = ("softcap",)  # kinds with a derivative that is not 1
SINK_PART = "sink"


class Scores(NamedTuple):
    """A score, as kernels take it."""

    scale: Any
    parts: Any  # of each but a sink what its kind needs: see `part_types`
    logits: Any  # (batch, heads), where there is a sink


def kind_of(part):
    """What is compiled in of a part is a string: its kind; of a bias dtype and alignment, too."""
    return part.partition(" ")[0]


def looks_up(score):
    """Whether a part looks up a number for each element."""
    return any(kind_of(part) in ("bias", "relative") for part in score)


def parts_of(score):
    return [part for part in score if part != SINK_PART]


def part_types(part, number):
    """The types of what a part needs."""
    kind, *about = part.split()
    if kind == "softcap":
        return number, number                                           # the cap, and 1 / cap
    if kind == "alibi":
        return array_type(np.dtype(number.name), 2), INDEX              # slopes, and seqlen_k - seqlen_q
    if kind == "relative":
        return (array_type(np.dtype(number.name), 3),)                  # the table
    return (array_type(DTYPES[about[0]], 4),)                           # the bias


def scores_type(score, dtype):
    """The type of Scores with these parts, or of nothing."""
    if not score:
        return types.Tuple(())
    number = getattr(types, sum_type(dtype).__name__)
    parts = types.Tuple([types.Tuple(part_types(part, number)) for part in parts_of(score)])
    logits = types.Tuple([array_type(sum_type(dtype), 2)] * (SINK_PART in score))
    return types.NamedTuple([number, parts, logits], Scores)


def score_steps(score, layout, ACC, transposed=False, behind=-1):
    """Device functions for tiles of S: (S, scores, batch, head, m0, n0) -> S behind all parts, and F; (dS, F) -> dS F.

    F is the derivative of what the parts behind number `behind` do, by what they are given. The tile's rows are
    queries, or keys if it is transposed.
    """
    parts = parts_of(score)
    if not parts:
        return (scaled if score else as_it_is), linear

    steps = [STEPS[kind_of(part)](part, number, layout, ACC, transposed) for number, part in enumerate(parts)]
    if behind >= 0:  # the derivatives of those before are not asked for
        steps[: behind + 1] = map(without_derivative, steps[: behind + 1])
    every_step, ONE = reduce(then, steps), ACC(1)

    @device
    def apply(S, scores, batch, head, m0, n0):
        return every_step(S * scores.scale, full(layout, ONE), scores, batch, head, m0, n0)

    curved = any(kind_of(part) in CURVED for part in parts[behind + 1 :])
    return apply, times if curved else linear


@device
def as_it_is(S, scores, batch, head, m0, n0):
    return S, S


@device
def scaled(S, scores, batch, head, m0, n0):
    return S * scores.scale, S


@device
def linear(dS, F):
    return dS


@device
def times(dS, F):
    return dS * F


def then(one, other):
    @device
    def both(S, F, scores, batch, head, m0, n0):
        S, F = one(S, F, scores, batch, head, m0, n0)
        return other(S, F, scores, batch, head, m0, n0)

    return both


def without_derivative(step):
    @device
    def value(S, F, scores, batch, head, m0, n0):
        S, _ = step(S, F, scores, batch, head, m0, n0)
        return S, F

    return value


# --------------------------------------------------------------------------------------------------------- the parts
def softcap(part, number, layout, ACC, transposed):
    TWO_LOG2E = ACC(2 * LOG2_E)

    @device
    def step(S, F, scores, batch, head, m0, n0):
        """tanh(x) = 1 - 2 r with r = 1 / (exp(2 x) + 1), and its derivative 4 r (1 - r): off by 1e-7, absolute."""
        cap, inverse = scores.parts[number]
        r = reciprocal(exp2(S * (inverse * TWO_LOG2E)) + 1)
        return cap - 2 * cap * r, F * (4 * r * (1 - r))

    return step


def alibi(part, number, layout, ACC, transposed):
    distance = distance_of(layout, ACC, transposed)

    @device
    def step(S, F, scores, batch, head, m0, n0):
        slopes, shift = scores.parts[number]
        return S - distance(m0 + shift, n0) * slopes[batch, head], F

    return step


def distance_of(layout, ACC, transposed=False):
    """The device function (m0, n0): how far queries and keys of a tile are apart."""
    SIGN = -1 if transposed else 1

    @device
    def distance(m0, n0):
        return abs(diagonal_index(layout, convert(SIGN * (n0 - m0), ACC)))

    return distance


def relative(part, number, layout, ACC, transposed):
    SIGN = -1 if transposed else 1

    @device
    def step(S, F, scores, batch, head, m0, n0):
        (table,) = scores.parts[number]
        _, _, entries = shape(table)
        reach = entries // 2
        ahead = diagonal_index(layout, SIGN * (n0 - m0)) * SIGN     # j - i
        return S + take(table[batch, head], maximum(minimum(ahead, reach), -reach) + reach), F

    return step


def bias(part, number, layout, ACC, transposed):
    ROWS_OF = Alignment(0 if transposed else int(part.split()[2]))

    @device
    def queries_by_keys(matrix, m0, n0):
        return load(aligned(matrix[:, n0:], ROWS_OF), layout, m0)

    @device
    def keys_by_queries(matrix, m0, n0):
        return load(matrix[m0:].T, layout, n0)

    tile_of = keys_by_queries if transposed else queries_by_keys

    @device
    def step(S, F, scores, batch, head, m0, n0):
        (biases,) = scores.parts[number]
        return S + convert(tile_of(biases[batch, head], m0, n0), ACC), F

    return step


STEPS = {"softcap": softcap, "alibi": alibi, "relative": relative, "bias": bias}


# ---------------------------------------------------------------------------------------------------------- the sink
def sink_steps(score, ACC):
    """Device functions of a row's end: (m, total, scores, batch, head) -> m and total with the sink's logit, and alpha,
    which rescales O; (total, alpha) -> what O is multiplied by. total stays 0 where nothing is seen."""
    LOG2E = ACC(LOG2_E)

    @device
    def without(m, total, scores, batch, head):
        return m, total, total

    @device
    def inverse(total, alpha):
        return reciprocal(total)

    @device
    def with_sink(m, total, scores, batch, head):
        logit, seen = scores.logits[0][batch, head], total > 0
        largest = maximum(m, logit)
        alpha = where(seen, exp2((m - largest) * LOG2E), 0)
        return largest, total * alpha + where(seen, exp2((logit - largest) * LOG2E), 0), alpha

    @device
    def rescaled_inverse(total, alpha):
        return alpha * reciprocal(total)

    return (with_sink, rescaled_inverse) if SINK_PART in score else (without, inverse)
