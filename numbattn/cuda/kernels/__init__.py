"""The kernels: one file per pass and tier, and the steps that they share.

Each factory takes plain numbers and names from a plan and returns a `Source`. What it captures is compiled in: dtypes,
tile sizes, which kinds of masks there are. Everything else is an argument. The Spec beside it says how it is called.
"""

from . import backward, delta, forward, forward_hopper

# The kernels of a pass in order: of each the first Spec that takes the work
FORWARD = ((forward_hopper.SPEC, forward.SPEC),)
BACKWARD = ((delta.SPEC,), (backward.SPEC_KV,), (backward.SPEC_Q,))
