"""A user's own functions, compiled as they are and for dual numbers; and whether they only add to S."""

import operator
from functools import lru_cache, partial

from numba import types
from numba.core.errors import NumbaError
from numba.extending import intrinsic, models, overload, register_model

from ...base.compiling import check_setting
from .dual import ONE, REAL, dual, like, slope_of
from .numpy_functions import INSTEAD
from .strict import compiled


def linked(function):
    """A Frozen as a Python function that Numba can compile: it calls compiled functions, in place of NumPy's where
    these do not work."""
    check_setting("DISABLE_JIT")
    return function.linked(_compiler_of(function), INSTEAD)


@lru_cache(maxsize=256)
def compiled_of(function):
    """A Frozen, compiled when it is called."""
    return _compiler_of(function)(linked(function))


def _compiler_of(function):
    return partial(compiled, has_address=function.calls_itself)


@lru_cache(maxsize=512)
def derivative_of(function):
    """The derivative of a compiled function by the first argument, which is a dual number to the function."""

    @compiled
    def derivative(s, *others):
        return slope_of(function(dual(s, like(s, ONE)), *others))

    return derivative


@lru_cache(maxsize=512)
def differentiated(identity, order):
    """The function of a function.Identity, its derivative or its second derivative, by order: the user's own if there
    is one, compiled when it is called."""
    given = identity.key[order]
    return derivative_of(differentiated(identity, order - 1)) if given is None else compiled_of(given)


class Shifted(types.Type):
    """The first argument plus terms that do not depend on it. It only supports addition."""

    def __init__(self):
        super().__init__("Shifted")


SHIFTED = Shifted()
register_model(Shifted)(models.OpaqueModel)


@intrinsic
def shifted(typingctx):
    """A Shifted. It has no value, only a type."""
    return SHIFTED(), lambda context, builder, signature, args: context.get_dummy_value()


def keeps_shifted(function, *, first_only):
    @overload(function)
    def of_shifted(x, y):
        if (x == SHIFTED and isinstance(y, REAL)) or (not first_only and isinstance(x, REAL) and y == SHIFTED):
            return lambda x, y: shifted()


for function in operator.add, operator.iadd:
    keeps_shifted(function, first_only=False)
for function in operator.sub, operator.isub:
    keeps_shifted(function, first_only=True)


@lru_cache(maxsize=256)
def is_additive(function, kinds):
    """Whether function(s, ...) - s of a Frozen does not depend on s, by type inference. kinds: of its other arguments.
    """
    value_of = compiled_of(function)
    try:
        arguments = value_of.get_call_template((SHIFTED, *kinds), {})[2]  # *arrays are one
    except NumbaError:
        return False
    return value_of.overloads[tuple(arguments)].signature.return_type == SHIFTED
