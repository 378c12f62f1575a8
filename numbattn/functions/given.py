"""What a user gives: a function, its signature, and the arrays that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter, signature
from types import FunctionType
from typing import Any

import numpy as np

from ..base.checks import dtype_of, library, words_for

PLACE = "batch", "head", "i", "j"
DTYPES = tuple(map(np.dtype, "?bhilqBHIfd"))  # what compiled functions read on CPUs and GPUs


def python_function(name: str, function: Any) -> FunctionType:
    """A Python function; of a function that Numba has compiled, what it was made of."""
    function = getattr(function, "py_func", function)
    if not isinstance(function, FunctionType):
        raise TypeError(f"{name}: got {words_for(function)}, expected a Python function")
    return function


def arrays_given(of: str, given: Any) -> tuple[Any, ...]:
    """The arrays of a function, of the kind of value that it is in."""
    if not isinstance(given, Iterable) or isinstance(given, str | bytes) or library(given):
        raise TypeError(f"{of} arrays: got {words_for(given)}, expected a sequence of arrays")
    for number, x in enumerate(arrays := tuple(given)):
        name, dtype = f"{of} arrays[{number}]", dtype_of(x)
        if dtype == np.uint64:
            raise TypeError(f"{name}: got {words_for(x)}, which int64 cannot hold: give x.astype(np.int64)")
        if dtype not in DTYPES:
            raise TypeError(f"{name}: got {words_for(x)}, expected an array of NumPy or CuPy, of booleans, integers, "
                            "float32 or float64")
    return arrays


def check_signature(name: str, function: Callable[..., Any] | None, arguments: Sequence[str], arrays: int) -> None:
    """Refuse a function that cannot be called as kernels call it, with these arguments and so many arrays, all by
    position."""
    if function is None:
        return
    expected = f"({', '.join(arguments)}, *arrays)"
    try:
        signature(function).bind(*range(len(arguments) + arrays))
    except TypeError as error:
        raise TypeError(f"{name}: {function.__qualname__}{signature(function)} cannot be called as {expected} with "
                        f"{arrays} arrays: {error}") from None  # fmt: skip
    if any(x.kind is Parameter.KEYWORD_ONLY for x in signature(function).parameters.values()):
        raise TypeError(f"{name}: {function.__qualname__}{signature(function)} takes arguments by name only, which "
                        f"compiled code cannot give: expected {expected}")  # fmt: skip
