"""Gradients as backprop returns them."""

from __future__ import annotations

import operator
from typing import Any, ClassVar


class Gradients(tuple[Any, ...]):
    """Named tuples that also have the gradient of the kernel.

    Attributes
    ----------
    kernel : array, None or tuple
        The gradient of the kernel's length, epsilon or scale, of its shape; None for a kernel without. For a sum or a
        product of kernels, and one with a factor, a tuple, with one for each; for Periodic one of period and length.
    factor : tuple or None
        For a sum of kernels, and for one with a factor, the gradients of factors, arrays of their shapes.
    ridge : array or None
        The gradient of a ridge.
    """

    _fields: ClassVar[tuple[str, ...]]
    kernel: Any
    factor: Any
    ridge: Any

    def __init_subclass__(cls) -> None:
        for at, name in enumerate(cls._fields):
            setattr(cls, name, property(operator.itemgetter(at)))

    def __new__(cls, *values: Any, kernel: Any = None, factor: Any = None, ridge: Any = None) -> Any:
        self = super().__new__(cls, values)
        self.kernel, self.factor, self.ridge = kernel, factor, ridge
        return self

    def __repr__(self) -> str:
        others = [(name, x) for name, x in vars(self).items() if name == "kernel" or x is not None]
        return f"{type(self).__name__}({', '.join(f'{name}={x!r}' for name, x in (*zip(self._fields, self), *others))})"

    def __getnewargs_ex__(self) -> Any:  # for copies and pickle
        return tuple(self), vars(self)


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


class SolveGradients(Gradients):
    """dx, db."""

    _fields = "dx", "db"
    dx: Any
    db: Any


class LogDeterminantGradients(Gradients):
    """dx alone."""

    _fields = ("dx",)
    dx: Any


def added(one: Any, other: Any) -> Any:
    """The sum of two gradients of a kernel."""
    if isinstance(one, tuple):
        return tuple(map(added, one, other))
    return one if one is None else (one + other)[...]  # an array, not NumPy's scalar
