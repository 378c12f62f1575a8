"""Which of its two meanings every word of the tile language has: decided once, here, when the package is imported.

A primitive is defined twice, one below the other: as plain Python, which says what ONE thread does, and as a lowering,
which says the same in LLVM. On a GPU the name is bound to the lowering, under NUMBA_ENABLE_CUDASIM=1 to plain Python.
Kernels and device functions are ordinary Python over those names and never ask which it is.
"""

import functools
import inspect

from numba.cuda.core import config
from numba.cuda.extending import intrinsic, register_jitable

SIMULATED = bool(config.ENABLE_CUDASIM)


class primitive:
    """Decorates the plain meaning of a word; its `lowering` decorates the other one.

    A lowering takes the types of the arguments and returns the signature and emit(builder, *values), which emits code
    and returns the LLVM value of the result, None for no result.
    """

    def __init__(self, meaning):
        self.meaning = meaning

    def lowering(self, lower):
        if SIMULATED:
            return self.meaning

        def definition(typingctx, *types):
            found = lower(*types)
            if found is None:
                return None
            signature, emit = found

            def generate(context, builder, signature, values):
                result = emit(builder, *values)
                return context.get_dummy_value() if result is None else result

            return signature, generate

        functools.update_wrapper(definition, self.meaning)
        del definition.__wrapped__
        context = inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        definition.__signature__ = inspect.Signature([context, *inspect.signature(lower).parameters.values()])
        return intrinsic(definition)


def device(function):
    """A function over tiles that kernels may call: inlined on a GPU, itself in the simulator."""
    return function if SIMULATED else register_jitable(forceinline=True)(function)
