"""Scores lowered: what is compiled in of each part, its numbers, its arrays by name. And what is left of gradients."""

from ...checks import overlap
from ...values import Memo, sum_broadcast
from ..kernels.scores import CLASSES
from .steps import Lowered, gradient_of_part, sums_by_row, sums_of_part

LOWERED_PARTS = Memo("lowered")  # by number, lengths and dtype of sums


def known_parts_and_arrays(parts, problem):
    """As `parts_and_arrays`, and where the arrays lie, so far as it is kept with the parts."""
    found, arrays, places = [], {}, []
    for number, part in enumerate(parts):
        lowered, of_part, place = known_part(part, number, problem)
        found.append(lowered)
        arrays.update(of_part)
        places.append(place)
    return tuple(found), arrays, tuple(places)


def known_part(part, number, problem):
    """A part, Lowered, its arrays by name, and where they lie; kept with a part whose own arrays they are, on a GPU."""
    key = number, problem.seqlen_q, problem.seqlen_k, problem.sum_dtype
    found = LOWERED_PARTS.get(part, key)
    if found is None:
        lowered, arrays = lowered_part(part, number, problem)
        found = lowered, arrays, tuple([(name, x.shape, x.strides) for name, x in arrays.items()])
        own = part._arrays().values()
        if not part._is_on_host and all(any(overlap(x, y) for y in own) for x in arrays.values()):
            LOWERED_PARTS.keep(part, key, found)
    return found


def parts_and_arrays(parts, problem):
    """Each part of a score, Lowered, and their arrays by name, as kernels take them."""
    found, arrays = [], {}
    for number, part in enumerate(parts):
        lowered, of_part = lowered_part(part, number, problem)
        found.append(lowered)
        arrays |= of_part
    return tuple(found), arrays


def lowered_part(part, number, problem):
    kind, numbers, arrays = CLASSES[type(part)].lowered(part, number, problem)
    return Lowered(kind, numbers, part._wants_gradient), arrays


def finish_gradient(part, number, arrays, problem):
    """The gradient of a part's array, from what kernels have left of it."""
    grad, by_row = arrays[gradient_of_part(number)], arrays.get(sums_by_row(number))
    if by_row is None:
        CLASSES[type(part)].finish(part, grad, arrays.get(sums_of_part(number)), problem)
    else:
        grad[...] = sum_broadcast(by_row.sum(axis=-1), grad.shape)
