"""A user's function of one element, compiled as kernels call it, and what it may not do."""

from functools import lru_cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...checks import UserTypeError
from .derivative import compiled_of, derivative_of
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
    """(s, batch, head, i, j, arrays) of a compiled function: what it makes of an element."""

    @compiled
    def element(s, batch, head, i, j, arrays):
        return number_of(function(s, place(batch), place(head), place(i), place(j), *seen(arrays)))

    return element


def value_of(identity):
    """The element of a function.Identity, compiled when it is called."""
    return element_of(compiled_of(identity.function))


def slope_of(identity):
    """The derivative of that element."""
    given = identity.derivative
    return element_of(derivative_of(identity.function) if given is None else compiled_of(given))


def slope_in_python(identity: Any, function: Any, arrays: Any) -> Any:
    """The derivative of a function without one of its own, (s, batch, head, i, j), for arrays of NumPy's."""
    of_element = slope_of(identity)

    def slope(*element):
        with naming(function):
            return of_element(*element, arrays)

    return slope


@lru_cache(maxsize=512)
def check(identity, real, kinds, derivative=False):
    """A TypeError where the function of a function.Identity may raise an error, print or allocate memory, called with
    s of this type and arrays of these types; or with `derivative` its derivative."""
    element = slope_of(identity) if derivative else value_of(identity)
    arguments = real, *[types.int64] * 4, types.Tuple(kinds)
    with naming(identity.function.python):
        element.compile(arguments)
    overload = element.overloads[arguments]
    if may_fail(overload):
        words, failing = "Score function", identity.function
        if derivative and identity.derivative is not None:
            words, failing = "Score derivative", identity.derivative
        raise UserTypeError(_message(words, failing, reason(overload)))


def _message(words, function, found):
    code = function.pieces[0].code
    line, file, text = found or (code.co_firstlineno, code.co_filename,
                                 "may raise an error: nobody would see it")  # fmt: skip
    return f"{words}: {code.co_name}, line {line} of {file}, {text}"
