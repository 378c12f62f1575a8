"""A user's mask function, compiled: whether a query sees a key, and what that depends on."""

from functools import lru_cache

from numba import types
from numba.core.errors import NumbaError
from numba.extending import models, register_model

from .derivative import compiled_of
from .element import place, refuse_failing
from .errors import naming, truth_of
from .strict import compiled
from .wide import seen


@lru_cache(maxsize=512)
def truth_element(function):
    """(batch, head, i, j, arrays) of a Frozen, compiled when it is called: whether key j is visible to query i."""
    of_user = compiled_of(function)

    @compiled
    def test(batch, head, i, j, arrays):
        return truth_of(of_user(place(batch), place(head), place(i), place(j), *seen(arrays)))

    return test


@lru_cache(maxsize=512)
def check(function, kinds):
    """Raise a TypeError if a Frozen may raise an error, print or allocate memory, or returns anything but a boolean,
    called with arrays of these types."""
    test, arguments = truth_element(function), (*[types.int64] * 4, types.Tuple(kinds))
    with naming(function.python, of="mask"):
        test.compile(arguments)
    refuse_failing(test.overloads[arguments], "Where function", function)


class Unread(types.Type):
    """An argument that can only be passed on."""

    def __init__(self):
        super().__init__("Unread")


UNREAD = Unread()
register_model(Unread)(models.OpaqueModel)


@lru_cache(maxsize=256)
def reads(function, kinds):
    """Whether a Frozen reads batch, and whether it reads head, by type inference. kinds: of its arrays."""
    of_user, others = compiled_of(function), (types.int64, types.int64, types.Tuple(kinds))

    @compiled
    def call(batch, head, i, j, arrays):
        return of_user(batch, head, i, j, *seen(arrays))

    def works_with(batch, head):
        try:
            call.compile((batch, head, *others))
        except NumbaError:
            return False
        return True

    if works_with(UNREAD, UNREAD):
        return False, False
    return not works_with(UNREAD, types.int64), not works_with(types.int64, UNREAD)
