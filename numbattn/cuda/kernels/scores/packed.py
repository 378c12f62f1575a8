"""Scores of packed sequences: a segment's offsets follow from its place."""

from functools import reduce

from ...tile import device
from .distance import BY_SEGMENT
from .score import Scores
from .traits import parts_of


def within_segment(score):
    """The device function (scores, segment) -> the Scores in a segment of packed arrays, with its offsets."""
    parts = [with_offset if part.offset == BY_SEGMENT else with_part for part in parts_of(score)]
    if with_offset not in parts:
        return same_scores
    within = reduce(lambda before, part: part[1](part[0], before), enumerate(parts), no_parts)

    @device
    def scores_of(scores, segment):
        own, query = segment.first_key + segment.keys, segment.first_query + segment.queries    # after the last ones
        return Scores(scores.scale, scores.inverse_scale, within(scores.parts, own - query), scores.logits)

    return scores_of


@device
def same_scores(scores, segment):
    return scores


@device
def no_parts(parts, offset):
    return ()


def with_part(number, before):
    @device
    def parts_to(parts, offset):
        return (*before(parts, offset), parts[number])

    return parts_to


def with_offset(number, before):
    @device
    def parts_to(parts, offset):
        return (*before(parts, offset), (parts[number][0], offset))

    return parts_to
