"""Attention on NumPy arrays: Numba kernels over tiles.

They multiply matrices themselves, see `product`, and leave the threads of NumPy's and SciPy's BLAS alone.
"""

from .backward import backward
from .forward import forward

__all__ = ["backward", "forward"]
