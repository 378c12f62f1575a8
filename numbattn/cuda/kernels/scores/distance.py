"""What parts that depend on the distance of a key from a query's own key, i + offset, share."""

from dataclasses import dataclass, replace

import numpy as np

from ...tile import INDEX, convert, device, diagonal_index, index, maximum, minimum, shape, take
from ...words.steps import OFFSETS, array_of_offset
from ..shared.layouts import places_of
from ..shared.visibility import EDGE, LINE
from .kind import ScoreKind

BY_MATRIX, BY_SEGMENT, BY_QUERY = "matrix", "segment", "query"  # what has offsets, if there is no single one
ALIGNED = "aligned"  # within segments: by segment or by query, depending on the kernel


@dataclass(frozen=True)
class Distance(ScoreKind):
    offset: str = ""  # what has offsets; "" for a single one

    @property
    def looks_up(self):
        return self.offset == BY_QUERY

    @property
    def offset_type(self):
        return {BY_MATRIX: EDGE, BY_QUERY: LINE}.get(self.offset, INDEX)

    def is_by_distance(self, wanted, ACC):
        return self.offset not in (ALIGNED, BY_QUERY)

    def first_own_key(self, at):
        """The device function (scores, batch, head) -> the own key of query 0, if not each query has an offset."""
        own_key, FIRST = own_key_step(self, at), index(0)

        @device
        def of_first(scores, batch, head):
            key, _ = own_key(scores, batch, head, FIRST)
            return key

        return of_first

    def steps_by_distance(self, at, wanted, ACC):
        own_key, read, HAS_ENTRIES = self.first_own_key(at), device(self.of._reading(clip)), self.own_axes > 0

        @device
        def shared_of(scores, batch, head):
            array, _ = scores.parts[at]
            return own_key(scores, batch, head), shape(array)[-1] // 2 if HAS_ENTRIES else 0

        @device
        def element_of(distance, shared):
            key, reach = shared
            return read(-distance - key, reach)

        return shared_of, element_of

    @classmethod
    def lowered(cls, part, number, problem):
        kind, _, arrays = super().lowered(part, number, problem)
        offset = part._whole_offset(problem.seqlen_q, problem.seqlen_k)
        if isinstance(offset, int):
            return kind, (offset,), arrays
        if offset is None:
            return cls(ALIGNED), (), arrays
        return cls(BY_MATRIX), (), arrays | {array_of_offset(number): offset.astype(np.int32)}

    def aligned_by(self, which):
        return replace(self, offset=which) if self.offset == ALIGNED else self

    def flat(self, planner, work, number):
        yield from super().flat(planner, work, number)
        if self.offset == BY_MATRIX:
            yield planner.at(array_of_offset(number), own=0)
        elif self.offset == BY_SEGMENT:
            yield 0                                         # kernels know it
        elif self.offset == BY_QUERY:
            yield planner.at(OFFSETS, own=1)


@device
def clip(x, low, high):
    return maximum(minimum(x, high), low)


def own_key_step(part, number):
    """The device function (scores, batch, head, m0) -> the own key of query m0, and (); if each query has an offset,
    m0, and the offsets."""

    @device
    def by_number(scores, batch, head, m0):
        _, offset = scores.parts[number]
        return m0 + offset, ()

    @device
    def by_matrix(scores, batch, head, m0):
        _, offsets = scores.parts[number]
        return m0 + index(offsets[batch, head]), ()

    @device
    def by_query(scores, batch, head, m0):
        _, offsets = scores.parts[number]
        return m0, offsets[batch, head]

    return {BY_MATRIX: by_matrix, BY_QUERY: by_query}.get(part.offset, by_number)


def offsets_step(layout, transposed):
    """The device function (offsets, m0) -> those of a tile's queries from m0 on."""
    places = places_of(transposed)

    @device
    def of_queries(offsets, m0):
        (seqlen_q,), (i, _) = shape(offsets), places(layout, m0, 0)
        return take(offsets, minimum(i, seqlen_q - 1))

    return of_queries


def distance_steps(part, number, layout, ACC, transposed=False):
    """Device functions: that of `own_key_step`; (key, offsets, n0) -> how far the keys of a tile from n0 on are from
    the queries' own keys."""
    SIGN, of_queries = -1 if transposed else 1, offsets_step(layout, transposed)

    @device
    def from_key(key, nothing, n0):
        return abs(diagonal_index(layout, convert(SIGN * (n0 - key), ACC)))

    @device
    def from_keys(m0, offsets, n0):
        apart = convert(of_queries(offsets, m0) * SIGN, ACC)
        return abs(diagonal_index(layout, convert(SIGN * (n0 - m0), ACC)) - apart)

    return own_key_step(part, number), from_keys if part.offset == BY_QUERY else from_key
