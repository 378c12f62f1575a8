"""Sums over pairs of points on NumPy arrays: Numba kernels over tiles of pairs, which are not kept.

A kernel has the steps of all kinds: it is compiled once for each dtype of sums.
"""

from .clusters import clusters
from .gradient import gradient
from .logsumexp import logsumexp
from .nearest import nearest
from .sums import sums

__all__ = ["clusters", "gradient", "logsumexp", "nearest", "sums"]
