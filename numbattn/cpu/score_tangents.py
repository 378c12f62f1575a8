"""Tangents of scores, tile by tile, and those of their gradients.

As everywhere here tiles are transposed: a row is a key, a column a query.
"""

import numpy as np

from ..base.values import rounded
from .record import Record, data_address
from .score import (
    KEPT,
    KIND,
    NO_STEPS,
    NOTHING,
    ORDER,
    SLOPES,
    apply,
    by_kind,
    copy,
    lowered_steps,
    no_sinks,
    number_of,
    numbered_tile,
    row_of,
)
from .score_gradients import add_to_sum, sum_of
from .scores import KINDS
from .scores.kind import LoweredStep
from .softmax import multiply
from .tile import inline

NO_ARRAY = np.zeros(0)


def tangents_of_steps(problem, inputs, tparts, order=1):
    """The Record of Steps with tangents in place of arrays: all steps of the first direction, then those of the next;
    NO_STEPS if all are zero. tparts: for each direction, see `parts_of`; order: of the highest derivative wanted."""
    steps, arrays, held = [], [], []
    for own in tparts:
        for part, tangent in zip(inputs.score, own):
            if part._has_step and tangent is None:
                steps.append((NOTHING, LoweredStep((0, 0), (0, 0)), False))
                arrays.append(NO_ARRAY)
            elif part._has_step:
                number = number_of(type(part))
                lowered, x, owners = lower_tangent(KINDS[number], tangent, problem, order)
                steps.append((number, lowered, False))
                arrays.append(x)
                held.append(owners)
    if not held:
        return NO_STEPS
    addresses = np.array([*map(data_address, arrays)], np.int64)
    return lowered_steps(problem, tuple(steps), inputs.origin, 0).filled(addresses, held=(arrays, held))


def lower_tangent(kind, tangent, problem, order):
    if kind.lower_tangent:
        return kind.lower_tangent(tangent, problem, order)
    return kind.lower(tangent, problem, order, sums=False)


def tangents_of_sinks(problem, tparts):
    """The Record of the tangents of logits, (directions, batch, heads); empty where they are zero."""
    sinks = [part for own in tparts for part in own if part is not None and not part._has_step]
    logits = [rounded(sink.logits, problem.sum_dtype) for sink in sinks]
    if not logits:
        return no_sinks(problem.sum_dtype, 3)
    logits = [np.broadcast_to(x, problem.batch).reshape(problem.matrices) for x in logits]
    return Record(np.array(logits, order="C"))


move = by_kind([kind.move for kind in KINDS])
collect_along = by_kind([kind.collect_along for kind in KINDS])


@inline
def differentiate_score(tS, S2, steps, tsteps, number, slopes, bends, batch, head, m0, n0, aligned):
    """Turn tS before all steps into tS after them, and S2, if it is wanted, into the second derivative along the same
    direction.

    tsteps: tangents of arrays, of which those of direction `number` are added. slopes: as `score` leaves them, and,
    with bends, a tile after each S that is kept, which becomes tS there. bends: a tile for each step that is not
    linear, which becomes the tangent of its slope, or nothing.
    """
    count = steps.caps.size
    for step in range(count):
        first, order, kept = steps.numbers[step, SLOPES], steps.numbers[step, ORDER], steps.numbers[step, KEPT]
        if first >= 0:
            slope, tangent = numbered_tile(slopes, first, tS), number * count + step
            if bends.size and kept >= 0:
                copy(numbered_tile(slopes, kept + 1, tS), tS)
            if order > 1:
                curvature = numbered_tile(slopes, first + 1, tS)
                bend_both(S2, tS, slope, curvature)
                if bends.size:
                    bend(numbered_tile(bends, first // order, tS), tS, curvature)
            multiply(tS, slope)
            if tsteps.caps.size and kept >= 0:
                S, bends_own = numbered_tile(slopes, kept, tS), bends[first // order * tS.size :]
                row = row_of(tsteps, tangent, batch, head, aligned)
                move(tsteps.numbers[tangent, KIND], S, tS, bends_own, row, batch, head, m0, n0)
        elif tsteps.caps.size:
            row = row_of(tsteps, number * count + step, batch, head, aligned)
            apply(tsteps.numbers[number * count + step, KIND], tS, slopes[:0], row, batch, head, m0, n0)


@inline
def pull_back_tangents(dS, tdS, steps, tsteps, t, scratch, sums, at, chunk, n0):
    """`pull_back` for dS and its tangent, which is added to the tangents of gradients of arrays on the way. t: the
    direction, for tsteps; scratch: its slopes and bends are those of `differentiate_score`; at: the tile's queries."""
    batch, head, m0, aligned, count = at.batch, at.head, at.m0, at.offset, steps.caps.size
    slopes, bends = scratch.slopes, scratch.bends
    for step in range(count - 1, -1, -1):
        first, order, kept = steps.numbers[step, SLOPES], steps.numbers[step, ORDER], steps.numbers[step, KEPT]
        if first >= 0:
            if kept >= 0:
                S = numbered_tile(slopes, kept, dS)
                row = row_of(tsteps, t * count + step, batch, head, aligned)
                dx = sum_of(sums, step, batch, head, chunk)
                collect_along(steps.numbers[step, KIND], dx, dS, tdS, S, row, batch, head, m0, n0)
            multiply_duals(dS, tdS, numbered_tile(slopes, first, dS), numbered_tile(bends, first // order, dS))
        elif sums.numbers[step, 0] >= 0:
            add_to_sum(tdS, dS, steps, step, sums, batch, head, chunk, m0, n0, aligned)


@inline
def bend(out, tS, curvature):
    """The tangent of a slope."""
    for j in range(tS.shape[0]):
        for i in range(tS.shape[1]):
            out[j, i] = curvature[j, i] * tS[j, i]


@inline
def bend_both(S2, tS, slope, curvature):
    """S2 = f' S2 + f'' tS^2; S2 may be empty."""
    for j in range(S2.shape[0]):
        for i in range(S2.shape[1]):
            S2[j, i] = slope[j, i] * S2[j, i] + curvature[j, i] * (tS[j, i] * tS[j, i])


@inline
def multiply_duals(dS, tdS, slope, bend):
    """tdS = f' tdS + tf' dS and dS = f' dS. Where both are 0 already, as where P is 0, slopes may be NaN."""
    zero = dS.dtype.type(0)
    for j in range(dS.shape[0]):
        for i in range(dS.shape[1]):
            some = dS[j, i] != zero or tdS[j, i] != zero
            tdS[j, i] = slope[j, i] * tdS[j, i] + bend[j, i] * dS[j, i] if some else zero
            dS[j, i] = slope[j, i] * dS[j, i] if some else zero
