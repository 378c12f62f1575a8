"""Gradients of the arrays that parts read by distance, as a table[i - j], or by offset on a grid: from sums of dS along
diagonals, or over the pairs of two boxes at an offset. Where each query has an offset of its own, from each element of
dS."""

from functools import reduce

import numpy as np

from ....grids.bias import EXTRA
from ....grids.offsets import groups_of
from ...tile import (
    DIAGONALS,
    BoxGroup,
    add_element,
    box_sums,
    convert,
    device,
    diagonal_sums,
    fold_elements,
    index,
    maximum,
    minimum,
    shape,
)
from ..shared.visibility import FARTHEST


def distance_step(part, at, wanted, ACC, SUM, add_pending):
    """Two device functions: dS, a tile in shared memory, keys by queries -> its sums; (pending, these, scores, sums,
    batch, head, m0, n0) -> pending, which adds to the gradients of a part's arrays, as `function.read_step` does.
    """
    if part.boxes:
        return box_step(part, at, SUM)
    return diagonal_step(part, at, wanted, ACC, SUM, add_pending)


def diagonal_step(part, at, wanted, ACC, SUM, add_pending):
    """`distance_step` for what is read by i - j. See `ScoreKind.steps_by_distance`.

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

    return diagonal_sums, add


@device
def no_sums(dS):
    return ()


@device
def as_pending(pending, *_):
    return pending


def box_step(part, at, SUM):
    """`distance_step` for what is read by offset on a grid, of tiles that are boxes."""
    GROUPS, FIRST = range(groups_of(part.boxes)), np.int32(0)

    @device
    def of_sum(pending, total, group, number, start, own, last, steps, sums):
        entry = maximum(minimum(np.int32(start + np.int32(steps[group, number])), last), FIRST)    # sums of no pairs,
        add_element(sums, own + entry, SUM(total))              # 0 or NaN, have entries, too
        return pending

    def then_sums(before, number):
        GROUP = BoxGroup(part.boxes, number)

        @device
        def sums_of(dS):
            return *before(dS), box_sums(dS, GROUP)

        return sums_of

    def then_group(before, number):
        NUMBER, ENDS = number, (number + 1, BoxGroup(part.boxes, number).layout.cols.size)

        @device
        def add_group(pending, found, about):
            pending = before(pending, found, about)
            return fold_elements(of_sum, pending, (found[NUMBER],), NUMBER, 0, ENDS, about)

        return add_group

    add_groups = reduce(then_group, GROUPS, as_pending)

    @device
    def add(pending, found, scores, sums, batch, head, m0, n0):
        first, place, _, _, (table, query, key, steps) = scores.parts[at]
        (heads, entries), i, j = shape(table), place.query + m0, place.key + n0
        own = convert(minimum(place.head + head, heads - 1) * entries, np.int32)
        if query[i] != EXTRA and key[j] != EXTRA:
            start = np.int32(np.int32(key[j]) - np.int32(query[i]))
            pending = add_groups(pending, found, (start, own, convert(entries - 1, np.int32), steps, sums))
        return pending

    return reduce(then_sums, GROUPS, no_sums), add


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
