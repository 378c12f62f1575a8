"""Kernels for many small matrices: all scores of a matrix are one tile in registers."""

from ...words.spec import Route
from ...words.tiers import MMA
from ..any import delta
from . import backward, forward
from .steps import routes_by_size, takes

FORWARD = (*routes_by_size(forward.SPEC, forward.TILES), Route(takes(forward.SPEC), (forward.SPEC,), MMA))
BACKWARD = (
    *routes_by_size(backward.SPEC, backward.TILES, lambda work: backward.is_alone(work) and not work.score_gradients),
    Route(lambda work: backward.is_alone(work) and takes(backward.SPEC)(work), (backward.SPEC,), MMA),
    Route(backward.takes_given, (delta.SPEC, backward.SPEC_GIVEN), MMA),
)
