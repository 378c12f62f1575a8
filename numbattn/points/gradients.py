"""Gradients as backprop returns them."""

from __future__ import annotations

import operator
from typing import Any, ClassVar


class Gradients(tuple[Any, ...]):
    """Named tuples that also have the gradient of the kernel.

    Attributes
    ----------
    kernel : array, None or tuple
        The gradient of the kernel's length or epsilon, of its shape; None for a kernel without. For a sum of kernels,
        and for one with a factor, a tuple, with one for each.
    """

    _fields: ClassVar[tuple[str, ...]]
    kernel: Any

    def __init_subclass__(cls) -> None:
        for at, name in enumerate(cls._fields):
            setattr(cls, name, property(operator.itemgetter(at)))

    def __new__(cls, *values: Any, kernel: Any = None) -> Any:
        self = super().__new__(cls, values)
        self.kernel = kernel
        return self

    def __repr__(self) -> str:
        named = [*zip(self._fields, self), ("kernel", self.kernel)]
        return f"{type(self).__name__}({', '.join(f'{name}={x!r}' for name, x in named)})"

    def __getnewargs_ex__(self) -> Any:  # for copies and pickle
        return tuple(self), {"kernel": self.kernel}


class ProductGradients(Gradients):
    """dx, dy, db."""

    _fields = "dx", "dy", "db"
    dx: Any
    dy: Any
    db: Any


class LogsumexpGradients(Gradients):
    """dx, dy, dw."""

    _fields = "dx", "dy", "dw"
    dx: Any
    dy: Any
    dw: Any


class SinkhornGradients(Gradients):
    """dx, dy, da, db."""

    _fields = "dx", "dy", "da", "db"
    dx: Any
    dy: Any
    da: Any
    db: Any
