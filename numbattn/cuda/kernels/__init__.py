"""The kernels, one file each, and the steps that they share.

A factory takes numbers and names from a plan and returns a `Source`. What the kernel captures is compiled in: dtypes,
tile sizes, the kinds of masks. Everything else is an argument. The Spec beside the factory says how it is called.
"""

from . import backward, backward_hopper_kv, backward_hopper_q, backward_hopper_wide, delta, forward, forward_hopper

# The kernels of a pass in order; of the candidates for each the first Spec that takes the work
FORWARD = ((forward_hopper.SPEC, forward.SPEC),)
BACKWARD = (
    (delta.SPEC_PADDED, delta.SPEC),
    (backward_hopper_kv.SPEC_SUMS, backward_hopper_kv.SPEC, backward_hopper_wide.SPEC, backward.SPEC_KV),
    (backward_hopper_kv.SPEC_ROUND, backward_hopper_q.SPEC, backward.SPEC_Q),
)
