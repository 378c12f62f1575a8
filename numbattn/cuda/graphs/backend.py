"""The backend for calls on CuPy arrays, see `numbattn.graphs.passes`."""

from ..launch import current_gpu as current
from .passes import GraphBackend

PASSES = GraphBackend(current)
forward, backward, tangent, backward_tangent = PASSES.forward, PASSES.backward, PASSES.tangent, PASSES.backward_tangent
laplacian = PASSES.laplacian

__all__ = ["backward", "backward_tangent", "current", "forward", "laplacian", "tangent"]
