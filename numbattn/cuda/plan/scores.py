"""Scores lowered: what is compiled in of each part, its numbers, its arrays by name. And what is left of gradients."""

import numpy as np

from ...base.values import sum_broadcast
from ...call.order import gradient_of_part
from ..kernels.scores import ENTRIES, READS, class_of
from ..words.steps import SUMS_OF_DS, LoweredPart, sums_by_row, sums_of_part
from .known import KNOWN, lower_and_keep


def lowered_part(part, number, problem):
    """A part as a LoweredPart, its arrays by name, as kernels take them, and where these lie."""
    key = number, problem
    return KNOWN.get(part, key) or lower_and_keep(part, key, part_and_arrays, own_arrays)


def part_and_arrays(part, number, problem):
    kind, numbers, arrays = class_of(type(part)).lowered(part, number, problem)
    wants = part._wants_gradient
    return LoweredPart(kind, numbers, part._counted if wants and kind.gradient == READS else wants), arrays


def own_arrays(part):
    return None if part._on_host else part._arrays().values()


def finish_gradients(parts, arrays, temporaries, problem):
    """The gradients of arrays of a score, from what kernels have left of them."""
    wanted = [(number, part) for number, part in enumerate(parts) if gradient_of_part(number) in arrays]
    if wanted:
        _finish(wanted, arrays, temporaries.arrays, problem)


@np.errstate(under="ignore")
def _finish(wanted, arrays, left, problem):
    dS = left.get(SUMS_OF_DS)
    for number, part in wanted:
        grad, by_row, kind = arrays[gradient_of_part(number)], left.get(sums_by_row(number)), class_of(type(part))
        if by_row is not None:
            grad[...] = sum_broadcast(by_row.sum(axis=-1), grad.shape)
        elif dS is None:
            kind.finish(part, grad, left.get(sums_of_part(number)), problem)
        elif kind.gradient != ENTRIES:  # a kernel has written that of a table
            grad[...] = part._gradient(dS, None, None)
