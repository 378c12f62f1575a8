"""The kernels for Hopper: TMA loads, wgmma, warp specialisation."""

from ...plan.spec import Route
from .. import backward, delta
from . import backward_kv, backward_q, backward_wide, forward
from .backward_kv import adds_dq, keeps_both
from .backward_wide import tells_dropped
from .forward import is_for_hopper

FORWARD = (Route(is_for_hopper, (forward.SPEC,)),)
BACKWARD = (
    Route(adds_dq, (delta.SPEC_PADDED, backward_kv.SPEC_SUMS, backward_kv.SPEC_ROUND)),
    Route(keeps_both, (delta.SPEC_PADDED, backward_kv.SPEC, backward_q.SPEC)),
    Route(tells_dropped, (delta.SPEC_PADDED, backward_wide.SPEC, backward_q.SPEC)),
    Route(is_for_hopper, (delta.SPEC_PADDED, backward.SPEC_KV, backward_q.SPEC)),
)
