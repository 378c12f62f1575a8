"""RelativeBias: S + table[entry of j - own key], clipped at both ends."""

from dataclasses import dataclass

import numpy as np

from ....base.values import sum_broadcast
from ....scores.relative import RelativeBias
from ...tile import device, diagonal_index, shape, take
from ...words.signatures import array_type
from ..shared.exact_sums import rounded
from .distance import BY_QUERY, Distance, clip, offsets_step, own_key_step
from .kind import ENTRIES, ValueAndSlope, nothing_ahead


@dataclass(frozen=True)
class RelativeBiasKind(Distance):
    of = RelativeBias
    looks_up, gradient = True, ENTRIES

    def types(self, number):
        return array_type(np.dtype(number.name), 3), self.offset_type  # the table

    def steps(self, at, scaling, layout, ACC, transposed=False, by_tma=False, has_derivative=True):
        (_, to_scaled), ONE = scaling, ACC(1)
        by_element, shared_entry = relative_steps(self, at, scaling, layout, ACC, transposed)

        @device
        def one_by_one(S, F, found, scores, batch, head, m0, n0):
            return ValueAndSlope(by_element(S, scores, batch, head, m0, n0), F)

        @device
        def step(S, F, found, scores, batch, head, m0, n0):
            (table, _), (is_shared, entry) = scores.parts[at], shared_entry(scores, batch, head, m0, n0)
            if is_shared:
                return ValueAndSlope(S * to_scaled(ONE, scores) + table[batch, head, entry], F)
            return ValueAndSlope(by_element(S, scores, batch, head, m0, n0), F)

        return nothing_ahead, one_by_one if self.offset == BY_QUERY else step

    def constant_on_tile(self, at, scaling, layout, ACC):
        if self.offset == BY_QUERY:
            return None
        (_, to_scaled), ZERO, ONE = scaling, ACC(0), ACC(1)
        by_element, shared_entry = relative_steps(self, at, scaling, layout, ACC)

        @device
        def with_level(S, scores, batch, head, m0, n0):
            (table, _), (is_shared, entry) = scores.parts[at], shared_entry(scores, batch, head, m0, n0)
            if is_shared:
                return S, table[batch, head, entry], to_scaled(ONE, scores)
            return by_element(S, scores, batch, head, m0, n0), ZERO, ONE

        return with_level

    @classmethod
    def finish(cls, part, grad, sums, problem):
        if sums is None:
            return
        offset = part._whole_offset(problem.seqlen_q, problem.seqlen_k)
        if offset is None:
            grad[...] = rounded(sums).reshape(grad.shape)
        else:
            table = by_entry(sums, problem.seqlen_q - 1 + offset, grad.shape[-1])
            grad[...] = sum_broadcast(table, grad.shape)


def relative_steps(part, number, scaling, layout, ACC, transposed=False):
    """Device functions: (S, scores, batch, head, m0, n0) -> S plus the entry of each element; (scores, batch, head, m0,
    n0) -> whether the whole tile has one entry, as far from the diagonal, and which."""
    (_, to_scaled), (own_key, entries), ONE = scaling, entry_steps(part, number, layout, transposed), ACC(1)
    LAST_ROW, LAST_COL = (size - 1 for size in layout.shape)
    BEFORE, AHEAD = (LAST_COL, LAST_ROW) if transposed else (LAST_ROW, LAST_COL)    # its last query, its last key

    @device
    def by_element(S, scores, batch, head, m0, n0):
        (table, _), (key, offsets) = scores.parts[number], own_key(scores, batch, head, m0)
        return S * to_scaled(ONE, scores) + take(table[batch, head], entries(key, offsets, n0, table))

    @device
    def shared_entry(scores, batch, head, m0, n0):
        (table, _), (key, _) = scores.parts[number], own_key(scores, batch, head, m0)
        least, most = entry_of(n0 - key - BEFORE, table), entry_of(n0 - key + AHEAD, table)
        return least == most, least

    return by_element, shared_entry


def entry_steps(part, number, layout, transposed=False):
    """Device functions: that of `own_key_step`; (key, offsets, n0, table) -> the numbers of the entries of a tile from
    n0 on."""
    SIGN, of_queries = -1 if transposed else 1, offsets_step(layout, transposed)

    @device
    def from_key(key, nothing, n0, table):
        return entry_of(diagonal_index(layout, SIGN * (n0 - key)) * SIGN, table)

    @device
    def from_keys(m0, offsets, n0, table):
        return entry_of(diagonal_index(layout, SIGN * (n0 - m0)) * SIGN - of_queries(offsets, m0), table)

    return own_key_step(part, number), from_keys if part.offset == BY_QUERY else from_key


read = device(RelativeBias._reading(clip))


@device
def entry_of(ahead, table):
    """The number of the entry for keys that are `ahead` of their query's own key."""
    entry, _ = read(ahead, shape(table)[-1] // 2)
    return entry


def by_entry(sums, own, entries):
    """Sums along diagonals (..., m + n - 1), added up by the entries of a table.

    own: the number of the diagonal of own keys, an int or an array over the axes before the last.
    """
    (*lead, count), reach = sums.shape, entries // 2
    if reach == 0 or count == 0:
        return np.broadcast_to(sums.sum(axis=-1, keepdims=True), (*lead, entries))
    own = own if isinstance(own, int) else own[..., None]
    ahead, at = np.arange(count, like=sums) - own, np.arange(1 - reach, reach, like=sums) + own
    inside = np.take_along_axis(sums, np.broadcast_to(np.clip(at, 0, count - 1), (*lead, entries - 2)), -1)
    table = np.zeros_like(sums, shape=(*lead, entries))
    table[..., 0] = np.where(ahead <= -reach, sums, 0).sum(axis=-1)
    table[..., 1:-1] = np.where((at >= 0) & (at < count), inside, 0)
    table[..., -1] = np.where(ahead >= reach, sums, 0).sum(axis=-1)
    return table
