"""What calls on CuPy arrays ask for, see `numbattn.backends`."""

from .caches.append import append, check_device
from .launch import current_gpu as current
from .merge import merge_into, sum_into
from .passes import Passes

PASSES = Passes(current)
forward, backward = PASSES.forward, PASSES.backward
tangent, backward_tangent, laplacian = PASSES.tangent, PASSES.backward_tangent, PASSES.laplacian

__all__ = [
    "append", "backward", "backward_tangent", "check_device", "current", "forward", "laplacian", "merge_into",
    "sum_into", "tangent",
]  # fmt: skip
