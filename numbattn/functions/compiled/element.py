"""A user's function of one element, compiled as kernels call it, and what it may not do."""

from functools import lru_cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.errors import NumbaError
from numba.extending import intrinsic

from ...base.checks import UserTypeError
from ..frozen import ORDERS
from .derivative import differentiated
from .errors import naming, number_of
from .nothrow import may_fail, reason
from .strict import compiled
from .wide import seen


@intrinsic
def place(typingctx, x):
    """An index; the optimiser is told that it is not negative."""

    def generate(context, builder, signature, args):
        builder.assume(builder.icmp_signed(">=", args[0], ir.Constant(args[0].type, 0)))
        return args[0]

    return x(x), generate


@lru_cache(maxsize=512)
def element_of(function):
    """A compiled function as one of an element, (s, batch, head, i, j, arrays)."""

    @compiled
    def element(s, batch, head, i, j, arrays):
        return number_of(function(s, place(batch), place(head), place(i), place(j), *seen(arrays)))

    return element


def differentiated_element(identity, order):
    """The element of a function.Identity, its derivative, or the derivative of that, compiled when it is called."""
    return element_of(differentiated(identity, order))


def in_python(identity: Any, order: int, arrays: Any) -> Any:
    """A derivative that the user has not written, (s, batch, head, i, j), for NumPy arrays."""
    of_element, given = differentiated_element(identity, order), identity.key[order_given(identity, order)].python

    def derivative(*element):
        try:
            return of_element(*element, arrays)
        except NumbaError:  # one context for each element would double the time
            with naming(given):
                raise

    return derivative


def order_given(identity, order):
    """The order of the user's own function that a derivative is, or follows from."""
    return max(lower for lower in range(order + 1) if identity.key[lower] is not None)


@lru_cache(maxsize=512)
def check(identity, real, kinds, order=0):
    """Raise a TypeError if the function of a function.Identity, or its derivative of this order, may raise an error,
    print or allocate memory, called with s of this type and arrays of these types."""
    element, given = differentiated_element(identity, order), order_given(identity, order)
    arguments = real, *[types.int64] * 4, types.Tuple(kinds)
    with naming(identity.key[given].python):
        element.compile(arguments)
    refuse_failing(element.overloads[arguments], f"Score {ORDERS[given]}", identity.key[given])


def refuse_failing(overload, words, function):
    """Raise a TypeError that begins with `words` if the compiled Frozen may raise an error, print or allocate memory.
    """
    if may_fail(overload):
        raise UserTypeError(_message(words, function, reason(overload)))


def _message(words, function, found):
    code = function.pieces[0].code
    line, file, text = found or (code.co_firstlineno, code.co_filename,
                                 "may raise an error: nobody would see it")  # fmt: skip
    return f"{words}: {code.co_name}, line {line} of {file}, {text}"
