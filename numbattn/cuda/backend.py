"""What calls on CuPy arrays ask for, see `numbattn.base.backends`."""

from .caches.append import append, check_device
from .chosen import chosen
from .launch import current_gpu as current
from .merge import merge_into, sum_into
from .passes import Passes
from .points import PointsBackend
from .rotations import turn

PASSES, POINTS = Passes(current), PointsBackend(current)
forward, run = PASSES.forward, PASSES.run
place, place_before, scratch = PASSES.place, PASSES.place_before, PASSES.scratch
states_of_blocks, shown_by_function = PASSES.states_of_blocks, PASSES.shown_by_function
sums, gradient, logsumexp = POINTS.sums, POINTS.gradient, POINTS.logsumexp
nearest, clusters = POINTS.nearest, POINTS.clusters

__all__ = [
    "append", "check_device", "chosen", "clusters", "current", "forward", "gradient", "logsumexp", "merge_into",
    "nearest", "place", "place_before", "run", "scratch", "shown_by_function", "states_of_blocks", "sum_into", "sums",
    "turn",
]  # fmt: skip
