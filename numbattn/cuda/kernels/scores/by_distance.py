"""Gradients of the arrays that parts read by distance, as a table[i - j]: from sums of dS along diagonals, or, where
each query has an offset of its own, from each element of dS."""

from functools import reduce

import numpy as np

from ...tile import DIAGONALS, convert, device, fold_elements, index, shape
from ..shared.visibility import FARTHEST


def distance_step(part, at, wanted, ACC, SUM, add_pending):
    """The device function (pending, diagonals, scores, sums, batch, head, m0, n0) -> pending, which adds to the
    gradients of a part's arrays, as `function.read_step` does, from `diagonal_sums` of dS, keys by queries from n0 and
    m0 on. See `ScoreKind.steps_by_distance`.

    What a thread's diagonals read is found before anything is added: so it waits once for what is looked up.
    """
    (shared_of, element_of), ZERO, NONE = part.steps_by_distance(at, wanted, ACC), SUM(0), np.int32(0)
    SHAPE, SLOTS, KEYS = DIAGONALS.shape, DIAGONALS.cols.slots, DIAGONALS.cols.size // 2
    START, add_one = (NONE, ZERO) * SLOTS, add_one_step(ZERO, add_pending)

    @device
    def of_diagonal(found, total, _, diagonal, first, shared):
        element, slope = element_of(diagonal + first, shared)
        x = SUM(slope * total) if total != 0 else ZERO          # the slope of what is masked may be NaN
        return (*found[2:], convert(element, np.int32), x)

    def then_slot(before, slot):
        AT, X = 2 * slot, 2 * slot + 1

        @device
        def add_slots(pending, found, sums):
            return add_one(before(pending, found, sums), found[AT], found[X], sums)

        return add_slots

    add_found = reduce(then_slot, range(SLOTS), as_pending)

    @device
    def add(pending, diagonals, scores, sums, batch, head, m0, n0):
        about = m0 - n0 - KEYS, shared_of(scores, batch, head)
        return add_found(pending, fold_elements(of_diagonal, START, (diagonals,), 0, 0, SHAPE, about), sums)

    return add


@device
def as_pending(pending, found, sums):
    return pending


def query_distance_step(part, at, ACC, SUM, add_pending):
    """The device function (pending, S, dS, scores, sums, batch, head, m0, n0) -> pending, which adds to the gradients
    of a part's arrays, as `function.read_step` does, where the part has an offset for each query."""
    (shared_of, element_of), ZERO = part.steps_by_distance(at, (), ACC), SUM(0)
    add_one = add_one_step(ZERO, add_pending)

    @device
    def of_element(pending, ds, i, j, offsets, shared, sums):
        element, slope = element_of(i + offsets[i] - j, shared)
        return add_one(pending, convert(element, np.int32), SUM(slope * ds), sums)

    @device
    def add(pending, S, dS, scores, sums, batch, head, m0, n0):
        (_, offsets), shared = scores.parts[at], shared_of(scores, batch, head)
        (seqlen_q,) = shape(offsets[batch, head])
        about = offsets[batch, head], shared, sums              # beyond the last key dS is 0
        return fold_elements(of_element, pending, (dS,), m0, n0, (seqlen_q, index(FARTHEST)), about)

    return add


def add_one_step(ZERO, add_pending):
    """The device function (pending, at, x, sums) -> pending, which adds x to what is pending for element `at`."""

    @device
    def add_one(pending, at, x, sums):
        element, total = pending
        if x != 0:
            if at != element:
                add_pending(pending, sums)
                total = ZERO
            return at, total + x
        return element, total

    return add_one
