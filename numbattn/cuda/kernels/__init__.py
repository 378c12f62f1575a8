"""The kernels, one file each, and the steps that they share.

A factory takes numbers and names from a plan and returns a `Source`. What the kernel captures is compiled in: dtypes,
tile sizes, the kinds of masks. Everything else is an argument. The Spec beside the factory says how it is called.
"""

from ..spec import Route, everything
from . import backward, backward_hopper_kv, backward_hopper_q, backward_hopper_wide, delta, forward, forward_hopper
from .backward_hopper_kv import adds_dq, keeps_both
from .backward_hopper_wide import tells_dropped
from .forward_hopper import is_for_hopper

# Of each pass: the first Route that takes the work is taken
FORWARD = (
    Route(is_for_hopper, (forward_hopper.SPEC,)),
    Route(everything, (forward.SPEC,)),
)
BACKWARD = (
    Route(adds_dq, (delta.SPEC_PADDED, backward_hopper_kv.SPEC_SUMS, backward_hopper_kv.SPEC_ROUND)),
    Route(keeps_both, (delta.SPEC_PADDED, backward_hopper_kv.SPEC, backward_hopper_q.SPEC)),
    Route(tells_dropped, (delta.SPEC_PADDED, backward_hopper_wide.SPEC, backward_hopper_q.SPEC)),
    Route(is_for_hopper, (delta.SPEC_PADDED, backward.SPEC_KV, backward_hopper_q.SPEC)),
    Route(everything, (delta.SPEC, backward.SPEC_KV, backward.SPEC_Q)),
)
