"""Numba's errors about a user's own function, in the user's terms."""

import os
import re
from contextlib import contextmanager

import numpy as np
from numba import types
from numba.core.errors import NumbaError, TypingError
from numba.extending import overload

from ...base.checks import UserTypeError
from ..entries import IS_A_MASK, IS_NO_TRUTH
from .dual import REAL, Dual
from .strict import REFUSED

RETURNS_NONE = "may return None: let it return a number on every way, s, say"
NO_NUMBER = "returns what is no number: let it return a float, on every way"
PART_OF_COUNTED = "has a slice of an array whose gradient is wanted, or iterates over it: read its entries, x[i, j]"
OTHERWISE = {  # other words for a function of distances
    "kernel": {
        IS_A_MASK: "returns True or False: let it return a number, 1.0 or 0.0",
        RETURNS_NONE: "may return None: let it return a number on every way",
    },
}
HOW_TO_DERIVE = {
    "score": "Write it down, as derivative= of the Score, or second= if it is that of a derivative, and compare both "
             "by check_score",
    "gradient": "Write the function with others, which have one, or pass gradient=False",
    "kernel": "Write the function with others, which have one",
}  # fmt: skip


def number_of(x):
    """The result of a score function, which must not be True or False."""
    if isinstance(x, bool | np.bool_):
        raise TypeError(IS_A_MASK)
    return x


@overload(number_of)
def _number_of(x):
    if isinstance(x, types.Boolean):
        raise TypingError(IS_A_MASK)
    if isinstance(x, types.NoneType | types.Optional):
        raise TypingError(RETURNS_NONE)
    if not isinstance(x, (Dual, *REAL)):
        raise TypingError(NO_NUMBER)
    return lambda x: x


def truth_of(x):
    """The result of a mask function, which must be True or False."""
    if not isinstance(x, bool | np.bool_):
        raise TypeError(IS_NO_TRUTH)
    return x


@overload(truth_of)
def _truth_of(x):
    if not isinstance(x, types.Boolean):
        raise TypingError(IS_NO_TRUTH)
    return lambda x: x


@contextmanager
def naming(*functions, of="score"):
    """A context in which errors of compilation name the user's functions that may be the cause, and what to do. of: a
    score, the gradient of its arrays, a mask, or a kernel of points."""
    try:
        yield
    except KeyError as error:  # numba-cuda's table of NumPy's functions
        if not functions or not isinstance(error.args[0], np.ufunc):
            raise
        name = error.args[0].__name__
        raise UserTypeError(f"{of}: {_places_of(functions)}, uses np.{name}, which GPUs do not have") from None
    except NumbaError as error:
        if not functions:
            raise
        text, where = str(error), _places_of(functions)
        for refusal in (IS_A_MASK, IS_NO_TRUTH, RETURNS_NONE, NO_NUMBER, *REFUSED):
            if refusal in text:
                words = OTHERWISE.get(of, {}).get(refusal, refusal)
                raise UserTypeError(f"{of}: {where}, {words}{_line(text, refusal)}") from None
        if PART_OF_COUNTED in text or "getiter with parameters (Counted(" in text:
            raise UserTypeError(f"{of}: {where}, {PART_OF_COUNTED}") from None
        if "Dual(" in text:
            raise UserTypeError(f"{of}: the derivative of {where}, cannot be found:\n{without_rule(text)}\n"
                                f"{HOW_TO_DERIVE[of]}") from None
        raise UserTypeError(f"{of}: Numba cannot compile {where}: {error}") from None


def _places_of(functions):
    """Where functions are defined, in words."""
    codes = [(f.__qualname__, f.__code__.co_firstlineno, f.__code__.co_filename) for f in functions]
    return " or ".join(f"{name}, line {line} of {file}" for name, line, file in codes)


def _line(text, refusal):
    """Where Numba says that something is, refused by an operator."""
    found = re.search(r'File "(.*)", line (\d+)', text[text.index(refusal) :]) if refusal in REFUSED else None
    return f" (line {found[2]} of {os.path.basename(found[1])})" if found else ""


def without_rule(text):
    """The part of Numba's error that says that something has no meaning for dual numbers."""
    found = re.findall(r">>> (\S+\(.*Dual\(.*\))", text) or re.findall(r"attribute '\w+' of type Dual\([\w()]+\)", text)
    return f"{found[-1]} has no rule here" if found else text.strip().splitlines()[0]
