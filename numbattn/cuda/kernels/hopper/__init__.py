"""The kernels for Hopper: TMA loads, wgmma, warp specialisation."""

from functools import partial

from ...words.spec import Route
from ...words.tiers import WGMMA
from ..any import combine, delta
from ..any.decode import has_few_queries, held_of
from ..mma import backward as mma_backward
from ..points import norms
from ..scores import is_nonlinear
from ..tables import is_wide
from . import (
    backward_kv,
    backward_q,
    backward_tangent,
    backward_wide,
    decode,
    dq_sums,
    dq_turns,
    forward,
    forward_wide,
    logsumexp,
    nearest,
    parts,
    sums,
    tangent,
)
from .forward_tiles import has_wgmma, head_dims, is_for_hopper, own_columns, slices_of, takes_wide
from .tangent_tiles import takes as takes_tangent
from .variants import BOTH, GENERAL, SUMS, TURNS, WIDE, variant_of


def takes(kernels, work):
    return is_for_hopper(work) and variant_of(work).kernels == kernels


def takes_slices(work):
    """Larger head_dims, in slices of dQ, dK and dV."""
    dims = head_dims(work.problem)
    if not (has_wgmma(work) and is_wide(work.problem) and max(dims) <= max(backward_wide.WIDE)):
        return False
    slices = slices_of(*dims)
    is_whole = all(own_columns(dim, slices - 1, slices)[1] > 0 for dim in dims)
    is_apart = work.reads or (work.problem.dropout and is_nonlinear(work.score))
    return is_whole and not is_apart and all(spec.fitting(work) for spec in (backward_wide.SPEC, backward_q.SPEC))


def reads(work):
    """No caches of fewer bits than q, which TMA does not widen."""
    return held_of(work.problem) is None


def reads_whole(work):
    """Nor in pages."""
    return reads(work) and not work.problem.page_size


def attends(work):
    fits = is_for_hopper(work) or (takes_wide(work) and forward.SPEC.fitting(work) is not None)
    return fits and reads_whole(work)


def attends_wide(work):
    return takes_wide(work) and forward_wide.takes(work) and reads_whole(work)


def decodes(work):
    if not (is_for_hopper(work) and reads(work) and has_few_queries(work)):
        return False
    return not work.problem.page_size or decode.takes_pages(work)


FORWARD = (
    Route(decodes, (decode.SPEC, combine.SPEC), WGMMA),
    Route(attends_wide, (forward_wide.SPEC,), WGMMA),
    Route(attends, (forward.SPEC,), WGMMA),
)
TANGENT = (Route(takes_tangent, (tangent.SPEC,), WGMMA),)
BACKWARD_TANGENT = (Route(backward_tangent.takes, backward_tangent.SPECS, WGMMA),)
BACKWARD = (
    Route(partial(takes, SUMS), (delta.SPEC_BOUNDED, backward_kv.SPEC_SUMS, dq_sums.SPEC), WGMMA),
    Route(partial(takes, TURNS), (delta.SPEC_BOUNDED, backward_kv.SPEC_TURNS, dq_turns.SPEC), WGMMA),
    Route(partial(takes, BOTH), (delta.SPEC_BOUNDED, backward_kv.SPEC, backward_q.SPEC), WGMMA),
    Route(partial(takes, WIDE), (delta.SPEC_BOUNDED, backward_wide.SPEC, backward_q.SPEC), WGMMA),
    Route(partial(takes, GENERAL), (delta.SPEC_BOUNDED, mma_backward.SPEC_KV, backward_q.SPEC), WGMMA),
    Route(takes_slices, (delta.SPEC_BOUNDED, backward_wide.SPEC, backward_q.SPEC), WGMMA),
)
NEAREST = (
    Route(nearest.takes, (norms.HALF_OF_Y, nearest.SPEC), WGMMA),
    Route(nearest.takes_parts, (parts.OF_X, parts.OF_Y, nearest.SPEC_OF_PARTS), WGMMA),
)
LOGSUMEXP = (
    Route(logsumexp.takes_short, (parts.OF_X_AND_SHORT, parts.OF_Y_AND_SHORT, *logsumexp.SPECS_OF_SHORT), WGMMA),
    Route(logsumexp.takes, (parts.OF_X, parts.OF_Y_AND_COLUMNS, logsumexp.SPEC), WGMMA),
)
LOGSUMEXP_OF_HALVES = (
    Route(logsumexp.takes_short, (parts.OF_X_IN_HALVES, parts.OF_Y_IN_HALVES, *logsumexp.SPECS_OF_HALVES), WGMMA),
)
POINT_SUMS = (
    Route(sums.takes_few, (parts.OF_X, parts.OF_Y, parts.AS_LINES, sums.SPEC_FEW), WGMMA),
    Route(sums.takes_many, (parts.OF_X, parts.OF_Y, parts.OF_B, sums.SPEC), WGMMA),
)
