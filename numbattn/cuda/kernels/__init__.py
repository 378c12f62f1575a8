"""The kernels, one file each: those for any GPU here, others by architecture; and the steps that they share.

A factory takes numbers and names from a plan and returns a `Source`. What the kernel captures is compiled in: dtypes,
tile sizes, the kinds of masks. Everything else is an argument. The Spec beside the factory says how it is called.
"""

from .. import compiler  # noqa: F401, before anything of numba.cuda
from ..words.spec import Route, everything
from ..words.tiers import MMA
from . import hopper, small
from .any import backward, combine, decode, delta, forward
from .mma import backward as backward_mma
from .mma import forward as forward_mma

# Of each pass: the first Route that takes the work is taken
LARGE_FORWARD = (
    *hopper.FORWARD,
    Route(decode.takes, (decode.SPEC, combine.SPEC), reads=decode.reads),
    Route(forward_mma.takes, (forward_mma.SPEC,), MMA),
    Route(everything, (forward.SPEC,)),
)
LARGE_BACKWARD = (
    *hopper.BACKWARD,
    *backward_mma.ROUTES,
    Route(backward.has_all_keys, (delta.SPEC, backward.SPEC_ALL)),
    Route(everything, (delta.SPEC, backward.SPEC_KV, backward.SPEC_Q)),
)
FORWARD, BACKWARD = small.FORWARD + LARGE_FORWARD, small.BACKWARD + LARGE_BACKWARD
