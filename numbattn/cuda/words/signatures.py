"""The types of kernels' arguments, and a kernel's signature, which follows from the arguments of its Spec."""

from types import SimpleNamespace

import numpy as np

from ..compiler import types
from ..tile import INDEX
from .numbers import NUMBERS


def array_type(dtype, ndim, layout="A"):
    """Numba's type of an array, of any strides unless its layout is "C". bfloat16, which it does not know, is passed as
    uint16."""
    name = np.dtype(dtype).name
    return types.Array(getattr(types, {"bfloat16": "uint16", "bool": "boolean"}.get(name, name)), ndim, layout)


def several(kind, count):
    """The type of a tuple of `count` of this kind."""
    return types.UniTuple(kind, int(count)) if count else types.Tuple(())


class CompiledIn(SimpleNamespace):
    """What the types of a kernel's arguments depend on: what is compiled in, parameters of its factory by name.

    dtype: of matrices; dtypes: by name, of matrices with another one; sums: the dtype of statistics and of numbers that
    are not integers.
    """

    def dtype_of(self, name):
        return self.dtypes.get(name, self.dtype)

    def matrix(self, name):
        """The type of a matrix (batch, heads, rows, features)."""
        return array_type(self.dtype_of(name), 4)

    def sums_of(self, ndim):
        """The type of an array of sums."""
        return array_type(self.sums, ndim)


def signature_of(kernel, arguments, dtype=None, sums=None, dtypes=None, **about):
    """The signature of a kernel with a parameter for each of these arguments of a Spec; numbers are names.

    dtype, sums, dtypes, about: see CompiledIn.
    """
    names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    numbers = [isinstance(argument, str) and argument for argument in arguments]
    if len(names) != len(numbers) or any(number not in (False, name) for name, number in zip(names, numbers)):
        raise TypeError(f"{kernel.__qualname__}: got parameters {', '.join(names)}, expected one for each of "
                        f"{', '.join(map(str, arguments))}")
    dtypes = {name: np.dtype(of_name) for name, of_name in (dtypes or {}).items()}
    about = CompiledIn(dtype=dtype, sums=sums, dtypes=dtypes, **about)
    return types.void(*[type_of(argument, about) for argument in arguments])


def type_of(argument, about):
    """The type of an argument of a Spec; about: a CompiledIn."""
    if isinstance(argument, str):
        return getattr(types, np.dtype(about.sums).name) if NUMBERS.get(argument) is float else INDEX
    if isinstance(argument, tuple):
        return types.Tuple.from_types([type_of(x, about) for x in argument])
    return argument.type(about)
