"""Attention on NumPy arrays: Numba kernels over BLAS tiles."""

from .backward import backward
from .forward import forward

__all__ = ["backward", "forward"]
