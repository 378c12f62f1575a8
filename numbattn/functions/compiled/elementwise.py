"""A user's function of one number, and its derivatives: compiled, checked, and applied to NumPy arrays."""

from functools import lru_cache

import numba
import numpy as np

from .derivative import compiled_of, derivative_of
from .element import refuse_failing
from .errors import naming, number_of
from .strict import compiled


@lru_cache(maxsize=128)
def of_one(function, order=0):
    """A Frozen of one number, compiled when it is called; order 1: its derivative, 2: the second one."""
    of_number = compiled_of(function)
    for _ in range(order):
        of_number = derivative_of(of_number)

    @compiled
    def one(t):
        return number_of(of_number(t))

    return one


@lru_cache(maxsize=128)
def check(words, function, dtype, order=0):
    """Raise a TypeError if it may raise an error, print or allocate memory, for numbers of this dtype. words: the name
    of the function in the message."""
    one, arguments = of_one(function, order), (numba.from_dtype(dtype),)
    with naming(function.python, of="kernel"):
        one.compile(arguments)
    refuse_failing(one.overloads[arguments], words, function)


@lru_cache(maxsize=128)
def elementwise(function, order=0):
    """A function of arrays."""
    one = of_one(function, order)

    @compiled
    def fill(given, found):
        for at in range(given.size):
            found[at] = one(given[at])

    def of_array(x):
        given = np.ascontiguousarray(x)
        found = np.empty_like(given)
        fill(given.reshape(-1), found.reshape(-1))
        return found

    return of_array
