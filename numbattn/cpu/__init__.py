"""Attention on NumPy arrays: Numba kernels over tiles.

They multiply matrices themselves, see `product`, and leave the threads of NumPy's and SciPy's BLAS alone. Their
arguments have the same types for all shapes, masks and scores, so that they are compiled once for each dtype of sums.
"""

from functools import cache

from ..base.interrupts import imported
from .forward import forward
from .rotations import turn
from .where import shown_by_function, states_of_blocks

__all__ = ["forward", "run", "shown_by_function", "states_of_blocks", "turn"]


def run(problem, pass_, inputs, given, tangents, deterministic, whole):
    """The results of a pass, see `numbattn.call.passes.run_pass`; they are bitwise reproducible."""
    return function_of(pass_.name)(problem, inputs, given, tangents)


@cache
def function_of(name):
    """The function of a pass, which has a file of its name."""
    return getattr(imported(f"{__name__}.{name}"), name)
