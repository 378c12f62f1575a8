"""The two meanings of every word of the tile language.

A primitive is defined twice, one below the other: in plain Python, which says what ONE thread does, and as a lowering,
which says the same in LLVM. Its name is the Python function. A kernel that calls it runs in plain Python, thread by
thread, under `simulate`; in the same kernel the compiler finds the lowering. So kernels and device functions are
ordinary Python, and one process may simulate what it then compiles.
"""

import inspect
from itertools import chain
from types import CodeType

import numpy as np

from ..compiler import define, inlined


class primitive:
    """Decorate the plain meaning of a word; `lowering` of the result decorates the other one.

    A lowering takes the types of the arguments and returns the signature and emit(builder, *values), which emits code
    and returns the LLVM value of the result, None for no result.
    """

    def __init__(self, meaning):
        self.meaning = meaning

    def lowering(self, lower):
        def with_context(context, *types):
            found = lower(*types)
            if found is None:
                return None
            signature, emit = found
            return signature, lambda context, builder, *values: emit(builder, *values)

        context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(lower).parameters.values()
        with_context.__signature__ = inspect.Signature([context, *parameters])
        return self.calling(with_context)

    def calling(self, lower):
        """Like `lowering`, for a word that calls a function it is given: the compiler's contexts come first, for both.
        """
        define(self.meaning, lower)
        return self.meaning


def device(function):
    """Decorate a function over tiles that kernels may call; the compiler inlines it.

    Functions of one definition that read equal values are one function, which is compiled once.

    >>> @device
    ... def softplus(x):
    ...     return log(exp(x) + 1)
    >>> show(softplus)[0].round(4)
    array([0.6931, 1.3133, 2.1269, 3.0486], dtype=float32)
    """
    try:
        key = _meaning(function)
    except (TypeError, ValueError):  # reads what may change, or what is defined after it
        return inlined(function)
    if key not in _known:
        _known[key] = inlined(function)
    return _known[key]


_known = {}  # for good, as Numba's registries keep what is registered


def _meaning(function):
    """What a function is made of. Raises an error where that may change."""
    code, known = function.__code__, function.__globals__
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    read = tuple((name, known[name]) for name in _names(code) if name in known)
    defaults = function.__defaults__, tuple((function.__kwdefaults__ or {}).items())
    key = function.__module__, code, _typed(defaults), _typed(cells), _typed(read)
    hash(key)
    return key


def _names(code):
    """The names that a function reads, and those that functions within it read."""
    within = (_names(x) for x in code.co_consts if isinstance(x, CodeType))
    return chain(code.co_names, chain.from_iterable(within))


def _typed(x):
    """A value with its type: 1 and 1.0 are equal otherwise, as 0.0 and -0.0 are."""
    if isinstance(x, tuple):
        return type(x), tuple(map(_typed, x))
    return type(x), repr(x) if isinstance(x, (float, np.floating)) else x
