"""What calls on CuPy arrays ask for, see `numbattn.base.backends`."""

from .caches.append import append, check_device
from .chosen import chosen
from .launch import current_gpu as current
from .merge import merge_into, sum_into
from .passes import Passes
from .points import PointsBackend

PASSES, POINTS = Passes(current), PointsBackend(current)
forward, backward = PASSES.forward, PASSES.backward
tangent, backward_tangent, laplacian = PASSES.tangent, PASSES.backward_tangent, PASSES.laplacian
place, states_of_blocks, shown_by_function = PASSES.place, PASSES.states_of_blocks, PASSES.shown_by_function
sums, gradient, logsumexp, nearest = POINTS.sums, POINTS.gradient, POINTS.logsumexp, POINTS.nearest

__all__ = [
    "append", "backward", "backward_tangent", "check_device", "chosen", "current", "forward", "gradient", "laplacian",
    "logsumexp", "merge_into", "nearest", "place", "shown_by_function", "states_of_blocks", "sum_into", "sums",
    "tangent",
]  # fmt: skip
