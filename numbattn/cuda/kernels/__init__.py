"""The kernels, one file each: those for any GPU here, others by architecture; and the steps that they share.

A factory takes numbers and names from a plan and returns a `Source`. What the kernel captures is compiled in: dtypes,
tile sizes, the kinds of masks. Everything else is an argument. The Spec next to the factory says how it is called.
"""

from importlib import import_module

from ..words.spec import Route, everything
from ..words.tiers import MMA
from . import hopper, small
from .any import (
    backward,
    backward_tangent,
    column_sums,
    combine,
    decode,
    delta,
    forward,
    score_gradient,
    statistics,
    tangent,
)
from .hopper import column_sums as hopper_column_sums
from .hopper import statistics as hopper_statistics
from .hopper.score_gradient import bias_route, diagonals_route
from .mma import backward as mma_backward
from .mma import forward as mma_forward
from .points import gradient as point_gradient
from .points import logsumexp as point_logsumexp
from .points import nearest as point_nearest
from .points import sums as point_sums
from .points.norms import point_routes

# Of each pass: the first Route that takes the work is taken
LARGE_FORWARD = (
    *hopper.FORWARD,
    Route(decode.takes, (decode.SPEC, combine.SPEC), reads=decode.reads),
    Route(mma_forward.takes, (mma_forward.SPEC,), MMA),
    Route(everything, (forward.SPEC,)),
)
LARGE_BACKWARD = (
    *hopper.BACKWARD,
    *mma_backward.ROUTES,
    Route(backward.has_all_keys, (delta.SPEC, backward.SPEC_ALL)),
    Route(everything, (delta.SPEC, backward.SPEC_KV, backward.SPEC_Q)),
)
ROUTES = {
    "forward": small.FORWARD + LARGE_FORWARD,
    "backward": small.BACKWARD + LARGE_BACKWARD,
    "tangent": (*hopper.TANGENT, Route(everything, (tangent.SPEC,))),
    "statistics": (hopper_statistics.ROUTE, Route(everything, (statistics.SPEC,))),
    "column_sums": (hopper_column_sums.ROUTE, Route(everything, (column_sums.SPEC,))),
    "laplacian": (Route(everything, (tangent.SPEC_SECOND,)),),
    "backward_tangent": (*hopper.BACKWARD_TANGENT, Route(everything, backward_tangent.SPECS),),
    "sums": hopper.POINT_SUMS + point_routes(point_sums.SPEC),
    "gradient": point_routes(point_gradient.SPEC),
    "logsumexp": hopper.LOGSUMEXP + point_routes(point_logsumexp.SPEC),
    "logsumexp_of_halves": hopper.LOGSUMEXP_OF_HALVES,
    "nearest": hopper.NEAREST + point_routes(point_nearest.SPEC),
}


def routes_of(pass_):
    """The Routes of a pass. One that has none here has a kernel for every GPU, the SPEC of any/, in a file of its name.
    """
    return ROUTES.get(pass_.name) or (Route(everything, (import_module(f".any.{pass_.name}", __name__).SPEC,)),)


def bias_gradients(name, **about):
    """The Routes of the gradient of a bias, or of slopes, to an array of this name; about: see `score_gradient`."""
    general = score_gradient.spec_of(score_gradient.bias_gradient, name, **about)
    return bias_route(name, **about), Route(everything, (general,))


def diagonal_sums(name, **about):
    """The Routes of the sums of dS by diagonal, to an array of this name; about: see `score_gradient`."""
    general = score_gradient.spec_of(score_gradient.diagonal_sums, name, **about)
    return diagonals_route(name, **about), Route(everything, (general,))
