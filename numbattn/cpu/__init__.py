"""Attention on NumPy arrays: Numba kernels over tiles.

They multiply matrices themselves, see `product`, and leave the threads of NumPy's and SciPy's BLAS alone. Their
arguments have the same types for all shapes, masks and scores, so that they are compiled once for each dtype of sums.
"""

from .backward import backward
from .backward_tangent import backward_tangent
from .forward import forward
from .function import applied
from .tangent import laplacian, tangent
from .where import shown_by_function, states_of_blocks

__all__ = ["applied", "backward", "backward_tangent", "forward", "laplacian", "shown_by_function",
           "states_of_blocks", "tangent"]  # fmt: skip
