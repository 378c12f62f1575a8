"""The kernels for Hopper: TMA loads, wgmma, warp specialisation."""

from functools import partial

from ...words.spec import Route
from ...words.tiers import WGMMA
from ..any import combine, delta
from ..any.decode import has_few_queries, held_of
from ..mma import backward as mma_backward
from ..points import norms
from . import (
    backward_kv,
    backward_q,
    backward_tangent,
    backward_wide,
    decode,
    dq_sums,
    dq_turns,
    forward,
    logsumexp,
    nearest,
    parts,
    sums,
    tangent,
)
from .forward_tiles import is_for_hopper
from .tangent_tiles import takes as takes_tangent
from .variants import BOTH, GENERAL, SUMS, TURNS, WIDE, variant_of


def takes(kernels, work):
    return is_for_hopper(work) and variant_of(work).kernels == kernels


def reads(work):
    """No caches of 8 bits, which TMA does not widen."""
    return is_for_hopper(work) and held_of(work.problem) is None


def attends(work):
    return reads(work) and not work.problem.page_size


def decodes(work):
    return reads(work) and has_few_queries(work) and (not work.problem.page_size or decode.takes_pages(work))


FORWARD = Route(decodes, (decode.SPEC, combine.SPEC), WGMMA), Route(attends, (forward.SPEC,), WGMMA)
TANGENT = (Route(takes_tangent, (tangent.SPEC,), WGMMA),)
BACKWARD_TANGENT = (Route(backward_tangent.takes, backward_tangent.SPECS, WGMMA),)
BACKWARD = (
    Route(partial(takes, SUMS), (delta.SPEC_BOUNDED, backward_kv.SPEC_SUMS, dq_sums.SPEC), WGMMA),
    Route(partial(takes, TURNS), (delta.SPEC_BOUNDED, backward_kv.SPEC_TURNS, dq_turns.SPEC), WGMMA),
    Route(partial(takes, BOTH), (delta.SPEC_BOUNDED, backward_kv.SPEC, backward_q.SPEC), WGMMA),
    Route(partial(takes, WIDE), (delta.SPEC_BOUNDED, backward_wide.SPEC, backward_q.SPEC), WGMMA),
    Route(partial(takes, GENERAL), (delta.SPEC_BOUNDED, mma_backward.SPEC_KV, backward_q.SPEC), WGMMA),
)
NEAREST = (
    Route(nearest.takes, (norms.HALF_OF_Y, nearest.SPEC), WGMMA),
    Route(nearest.takes_parts, (parts.OF_X, parts.OF_Y, nearest.SPEC_OF_PARTS), WGMMA),
)
LOGSUMEXP = (Route(logsumexp.takes, (parts.OF_X, parts.OF_Y_AND_COLUMNS, logsumexp.SPEC), WGMMA),)
PARTS_OF_HALVES = parts.OF_X_IN_HALVES, parts.OF_Y_IN_HALVES
LOGSUMEXP_OF_HALVES = (
    Route(logsumexp.takes_halves, (*PARTS_OF_HALVES, logsumexp.EXACT, logsumexp.INEXACT), WGMMA),
)
POINT_SUMS = (
    Route(sums.takes_few, (parts.OF_X, parts.OF_Y, parts.AS_LINES, sums.SPEC_FEW), WGMMA),
    Route(sums.takes_many, (parts.OF_X, parts.OF_Y, parts.OF_B, sums.SPEC), WGMMA),
)
