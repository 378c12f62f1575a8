"""Gradients of the arrays that a user's function reads, or a part with an offset for each query, on any GPU.

A block takes a row of tiles of a score matrix, and adds dS times the derivative by each element that is read to the
gradient of that element, by atomics: consecutive terms of one element are added up first. S, P and dS are recomputed as
in `score_gradient`. Small arrays have several copies of their sums, to avoid contention; `sum_parts` adds these up. If
every run has to give the same bits, integers are added: see `exact_sums`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...tile import block_index, device, index, minimum, shape
from ...words.arguments import LSE_LOG2, Argument, Matrix, Statistic
from ...words.signatures import array_type
from ...words.spec import Spec
from ..scores import (
    READS,
    SCORE,
    parts_of,
    query_distance_step,
    read_step,
    read_tangent_step,
    score_steps,
    tangent_steps,
)
from ..scores.score import scaling_steps
from ..shared.dropout import DROPOUT
from ..shared.exact_sums import add_atomically, add_exactly
from ..shared.layouts import DTYPES, sum_type, sums
from ..shared.shares import MatrixShare
from ..shared.visibility import MASK, visible_keys
from .score_gradient import along, of_scores, source, sum_step
from .score_gradient_ds import ALONG, DsArguments
from .score_gradient_tiles import rows


class TileRow(NamedTuple):
    """A row of tiles of a score matrix, and the sums to which a block adds."""

    share: Any
    m_first: Any
    m_end: Any
    sums: Any


def function_gradient(*, sum_dtype, exact, wanted, **about):
    """The gradients of the arrays of part number `after`. wanted: of which of a function's arrays; exact: whether sums
    are the same in any order."""
    score, after, tiles, add_both = about["score"], about["after"], about["tiles"], None
    TILE_M, TILE_N = tiles.tile_m, tiles.tile_n
    ACC, SUM = sum_type(DTYPES[about["dtype"]]), np.dtype(sum_dtype).type
    S_TILE = sums(tiles, TILE_M, TILE_N)
    part, before, ONE, ZERO = parts_of(score)[after], parts_of(score)[:after], ACC(1), SUM(0)
    (apply, *_), (_, to_scaled) = score_steps(before, S_TILE, ACC, after=after), scaling_steps(before, part)
    add_pending = add_exactly if exact else add_atomically
    is_function = part.gradient == READS
    if is_function:
        add_reads = read_step(part, after, wanted, ACC, SUM, add_pending)
    else:
        add_reads = query_distance_step(part, after, ACC, SUM, add_pending)

    @device
    def keys_of(walk, given, band, batch, head, m_block):
        m0, (_, _, seqlen_q) = m_block * TILE_M, shape(given.statistics[1])
        first, end = visible_keys(band, m0, minimum(m0 + TILE_M, seqlen_q))
        return first // TILE_N, (end + TILE_N - 1) // TILE_N

    @device
    def add(pending, dS, S, given, batch, head, m0, n0, walk):
        S, _ = apply(S[0], given.scores, batch, head, m0, n0)
        return add_reads(pending, S * to_scaled(ONE, given.scores), dS, given.scores, walk.sums, batch, head, m0, n0)

    NONE = np.int32(0)                                          # of the type that counts elements
    if is_function and "tscore" in about:
        NONE = np.int64(0)
        add_both = tangents_step(score, about["tscore"], after, S_TILE, ACC, SUM, add_pending)
    _, shared, sum_of = sum_step(keys_of, add, about, add_both)

    def kernel(mQ, mK, mV, mDO, mSums, mLse, mDelta, mask, scores, drops, along, group_size, kept_scale):
        given = DsArguments((mQ, mK, mV, mDO), (mLse, mDelta), mask, scores, drops, group_size, kept_scale, along)
        (_, heads, seqlen_q), (_, _, parts, _), none = shape(mDelta), shape(mSums), index(0)
        m_blocks = (seqlen_q + TILE_M - 1) // TILE_M
        matrix, m_block = block_index() // m_blocks, m_blocks - 1 - block_index() % m_blocks
        batch, head = matrix // heads, matrix % heads
        share = MatrixShare(batch, head, none, index(1), none, index(1))
        walk = TileRow(share, m_block, m_block + 1, mSums[batch, head][block_index() % parts])
        add_pending(sum_of(walk, given, (NONE, ZERO)), walk.sums)

    return source(kernel, ARGUMENTS, shared, np.int64 if exact else SUM, about)


def tangents_step(score, tscore, after, layout, ACC, SUM, add_pending):
    """The device function that adds a tile's reads to the tangents of gradients: dS and S are pairs with their
    tangents. tscore: see Work."""
    tangents = [tangent for part, tangent in zip(score, tscore) if part.has_step]
    part, before, ONE = parts_of(score)[after], parts_of(score)[:after], ACC(1)
    at = sum(map(bool, tangents[:after]))
    apply, _ = tangent_steps(before, tangents[:after], layout, ACC, after=len(before))
    add_reads = read_tangent_step(tangents[after], at, ACC, SUM, add_pending)
    _, to_scaled = scaling_steps(before, part)

    @device
    def add_both(pending, dS, S, given, batch, head, m0, n0, walk):
        S, tS, _ = apply(*S, given.scores, given.along.scores, batch, head, m0, n0)
        scale, about = to_scaled(ONE, given.scores), (batch, head, m0, n0)
        return add_reads(pending, S * scale, tS * scale, *dS, given.along.scores, walk.sums, *about)

    return add_both


@dataclass(frozen=True)
class ElementSums(Argument):
    """Sums, (batch, heads, parts, elements of a matrix), planned with the launch under this name: those of all elements
    of the gradient `of`, of which a matrix has these last axes."""

    name: str
    of: str
    axes: int

    def flat(self, planner, work):
        yield planner.sums_by_matrix(self.name, self.of, self.axes)

    def type(self, about):
        return array_type(about.own_dtype, 4)


def arguments_of(*sums):
    """What the kernel takes. sums: see ElementSums."""
    return (
        Matrix("q"), Matrix("k", "k"), Matrix("v", "k"), Matrix("do"), ElementSums(*sums), LSE_LOG2,
        Statistic("delta"), MASK, SCORE, DROPOUT, ALONG, "group_size", "kept_scale",
    )  # fmt: skip


ARGUMENTS = arguments_of("sums", "gradient", 1)


def spec_of(*sums, **about):
    """The Spec of the kernel that adds to these sums: see ElementSums. about: further parameters."""
    return Spec(
        function_gradient,
        arguments_of(*sums),
        tiles=lambda work: tuple([row._replace(blocks=1) for row in rows(work, True)]),     # functions take registers
        parameters=lambda work, tiles: of_scores(work, tiles) | about | along(work),
        slices=True,
    )
