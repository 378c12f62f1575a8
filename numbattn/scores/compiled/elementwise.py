"""A user's function of one number, and its derivative, of the elements of NumPy's arrays."""

from functools import lru_cache

import numpy as np

from .derivative import compiled_of, derivative_of
from .strict import compiled


@lru_cache(maxsize=128)
def elementwise(function, order=0):
    """A function of arrays of floats; function: a Frozen, order: 1 for its derivative."""
    of_one = derivative_of(compiled_of(function)) if order else compiled_of(function)

    @compiled
    def fill(given, found):
        for at in range(given.size):
            found[at] = of_one(given[at])

    def of_array(x):
        given = np.ascontiguousarray(x)
        found = np.empty_like(given)
        fill(given.reshape(-1), found.reshape(-1))
        return found

    return of_array
