"""dS of a tile, or its tangent: the gradients of the arrays of a score are sums of it.

Line numbers are those of Algorithm 4; tangents are recomputed as in `backward_tangent`.
"""

from typing import Any, NamedTuple

from ...compiler import types
from ...tile import device, load
from ...words.arguments import Argument, Matrix, Statistic
from ...words.signatures import type_of
from ..scores import TSCORE, score_steps, tangent_steps
from ..scores.score import to_log2_of
from ..shared.recompute import low_steps, tangent_of_p, tangents_of_ds


class DsArguments(NamedTuple):
    """What kernels compute dS from."""

    inputs: Any  # Q, K, V, dO
    statistics: Any  # of rows: lse in base 2, delta
    mask: Any
    scores: Any
    drops: Any
    group_size: Any
    kept_scale: Any
    along: Any  # Along; nothing unless the tangent of dS is summed


class Along(NamedTuple):
    """What else the tangent of dS is computed from."""

    inputs: Any  # tQ, tK, tV, tdO, each a tuple of one or none
    statistics: Any  # of rows: tlse, tdelta
    scores: Any  # see scores.tangent


class AlongArgument(Argument):
    """The fields of Along; nothing in passes without tangents."""

    matrices = tuple(Matrix(name, heads, optional=True) for name, heads in zip(("tq", "tk", "tv", "tdo"), "qkkq"))
    statistics = Statistic("padded tlse"), Statistic("tdelta")

    def flat(self, planner, work):
        if work.is_along:
            for argument in (*self.matrices, *self.statistics, TSCORE):
                yield from argument.flat(planner, work)

    def type(self, about):
        if about.tangents is None:
            return types.Tuple(())
        kinds = [type_of(x, about) for x in (self.matrices, self.statistics, TSCORE)]
        return types.NamedTuple(kinds, Along)


ALONG = AlongArgument()


def ds_steps(score, tangents, tscore, layout, dtype, ACC, after):
    """Device functions (S, tS, dP, tdP, given, batch, head, length, m0, n0) -> dS after part number `after`, or dS and
    the tangent of it; and (given) -> tQ, tK, tV, tdO. length: of the queries."""
    ROWS, NOTHING = layout.row_vector(), ((), (), (), ())
    first_low, recompute, recompute_capped = low_steps(dtype)
    if tangents is None:
        apply, pull_back, to_log2 = score_steps(score, layout, ACC, after=after)

        @device
        def ds_of(S, tS, dP, tdP, given, batch, head, length, m0, n0):
            mLse, mDelta = given.statistics
            lse_log2, D = load(mLse[batch, head][:length], ROWS, m0), load(mDelta[batch, head][:length], ROWS, m0)
            low = load(mLse[batch, head][: first_low(mLse) + length], ROWS, first_low(mLse) + m0)
            S, F = apply(S, given.scores, batch, head, m0, n0)
            P = recompute_capped(S, lse_log2, low, to_log2(given.scores.scale))  # line 13
            return pull_back(P * (dP - D), F)                   # line 20

        @device
        def no_tangents(given):
            return NOTHING

        return ds_of, no_tangents

    (apply, pull_back), to_log2 = tangent_steps(score, tscore, layout, ACC, after=after), to_log2_of(score, ACC)

    @device
    def both(S, tS, dP, tdP, given, batch, head, length, m0, n0):
        (mLse, mDelta), (mTLse, mTDelta) = given.statistics, given.along.statistics
        lse_log2, D = load(mLse[batch, head][:length], ROWS, m0), load(mDelta[batch, head][:length], ROWS, m0)
        tlse, tD = load(mTLse[batch, head][:length], ROWS, m0), load(mTDelta[batch, head][:length], ROWS, m0)
        low = load(mLse[batch, head][: first_low(mLse) + length], ROWS, first_low(mLse) + m0)
        scale_log2 = to_log2(given.scores.scale)
        S, tS, (F, tF) = apply(S, tS, given.scores, given.along.scores, batch, head, m0, n0)
        P = recompute(S, lse_log2, low, scale_log2)
        dS, tdS = tangents_of_ds(P, tangent_of_p(P, tS, tlse, scale_log2), dP - D, tdP - tD)
        return pull_back(dS, tdS, F, tF)

    @device
    def tangents_of(given):
        return given.along.inputs

    return both, tangents_of
