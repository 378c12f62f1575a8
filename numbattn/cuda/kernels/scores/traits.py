"""Traits of a score that follow from those of its kinds: whether it has a derivative, what it looks up. No CUDA here.
"""

from ..shared.visibility import is_looked_up
from .distance import BY_QUERY


def parts_of(score):
    """The parts with a step, in Scores.parts."""
    return [part for part in score if part.has_step]


def place_of_part(score, number):
    """The place of part number `number` in Scores.parts."""
    return len(parts_of(score[:number]))


def looks_up(score):
    """Whether a part looks up a number for each element, or row."""
    return any(part.looks_up for part in score)


def differs_by_head(score):
    """Whether a part may differ between heads."""
    return any(part.differs_by_head for part in parts_of(score))


def takes_offsets(score):
    """Whether a part takes an offset for each query."""
    return any(part.offset == BY_QUERY for part in score)


def is_nonlinear(score):
    """Whether a part has a derivative that is not 1."""
    return any(part.is_nonlinear for part in score)


def is_packed(score):
    """Whether all parts can be computed in tiles that end with their segment."""
    return all(part.is_packed for part in score)


def is_scaled(score):
    """Whether S after all parts is scaled, an exponent of e; else it is Q K^T plus slopes."""
    return any(part.is_scaled for part in parts_of(score))


def may_be_far(score):
    """Whether a mask of finfo.min, in a dtype with float32's exponents, may be among the parts, after the last one that
    bounds S."""
    bounded = [number for number, part in enumerate(score) if part.is_bounded]
    return any(part.may_be_far for part in (score[bounded[-1] + 1 :] if bounded else score))


def number_of_tma_bias(work):
    """The number of the bias whose tiles TMA loads on Hopper, or None: one of two bytes an element, with rows that fit
    a tensor map, if nothing else is looked up."""
    looking_up = [number for number, part in enumerate(work.score) if part.looks_up]
    by_tma = [number for number in looking_up if work.score[number].is_tma_loaded]
    alone = looking_up == by_tma and not (is_looked_up(work.mask) or work.problem.dropout)
    return by_tma[0] if alone and len(by_tma) == 1 else None


def dtype_of_part(work, number):
    """The name of the dtype of a bias; "" for None."""
    return "" if number is None else work.score[number].dtype


def dtype_of_tma_bias(work):
    """The name of the dtype of the bias that TMA loads; "" without one."""
    return dtype_of_part(work, number_of_tma_bias(work))
