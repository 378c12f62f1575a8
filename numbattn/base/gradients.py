"""Gradients of q, k and v, of their own shapes, and those of a function of these."""

from __future__ import annotations

import math
import operator
from typing import Any

from .checks import A
from .values import sum_broadcast


class Gradients(tuple[A, A, A]):
    """dq, dk, dv: a named tuple of three, which carries the gradients of the score.

    Attributes
    ----------
    dq, dk, dv : arrays
    score : tuple
        The gradients of the arrays in `score`, in their order; None for one that is not wanted.
    """

    _fields = "dq", "dk", "dv"  # so libraries that look into named tuples, as JAX does, look into it
    dq: A = property(operator.itemgetter(0))  # type: ignore[assignment]
    dk: A = property(operator.itemgetter(1))  # type: ignore[assignment]
    dv: A = property(operator.itemgetter(2))  # type: ignore[assignment]
    score: tuple[A | None, ...]

    def __new__(cls, dq: A, dk: A, dv: A, score: tuple[A | None, ...] = ()) -> Gradients[A]:
        self = super().__new__(cls, (dq, dk, dv))
        self.score = score
        return self

    def _asdict(self) -> dict[str, A]:
        """The three by name."""
        return dict(zip(self._fields, self))

    def _replace(self, **values: Any) -> Gradients[A]:
        """A copy with these of dq, dk, dv and score replaced."""
        return Gradients(**{**self._asdict(), "score": self.score, **values})

    def __repr__(self) -> str:
        return f"Gradients(dq={self.dq!r}, dk={self.dk!r}, dv={self.dv!r}, score={self.score!r})"

    def __getnewargs__(self) -> Any:  # for copies and pickle
        return *self, self.score


class SecondGradients(tuple[A, A, A, A]):
    """gq, gk, gv, gdo: the gradients of a function of dq, dk and dv, a named tuple of four.

    Attributes
    ----------
    gq, gk, gv, gdo : arrays
        By q, k, v and do.
    dlse : array
        By dlse.
    score : tuple
        By the arrays in `score`, in their order; None for one whose gradient is not wanted.
    """

    _fields = "gq", "gk", "gv", "gdo"
    gq: A = property(operator.itemgetter(0))  # type: ignore[assignment]
    gk: A = property(operator.itemgetter(1))  # type: ignore[assignment]
    gv: A = property(operator.itemgetter(2))  # type: ignore[assignment]
    gdo: A = property(operator.itemgetter(3))  # type: ignore[assignment]
    dlse: A
    score: tuple[A | None, ...]

    def __new__(
        cls, gq: A, gk: A, gv: A, gdo: A, dlse: A | None = None, score: tuple[A | None, ...] = ()
    ) -> SecondGradients[A]:
        self = super().__new__(cls, (gq, gk, gv, gdo))
        self.dlse, self.score = dlse, score  # type: ignore[assignment]
        return self

    def __repr__(self) -> str:
        named = [*zip(self._fields, self), ("dlse", self.dlse), ("score", self.score)]
        return f"SecondGradients({', '.join(f'{name}={x!r}' for name, x in named)})"

    def __getnewargs__(self) -> Any:  # for copies and pickle
        return *self, self.dlse, self.score


def sum_to(x: Any, shape: tuple[int, ...]) -> Any:
    """A gradient (..., heads, rows, columns) of a broadcast input, summed to the input's own shape."""
    if x.shape == shape:
        return x
    if x.size == math.prod(shape):
        return x.reshape(shape)
    own = (1,) * (x.ndim - len(shape)) + shape
    groups = own[-3], x.shape[-3] // max(own[-3], 1)
    return sum_broadcast(x.reshape(*x.shape[:-3], *groups, *x.shape[-2:]).sum(axis=-3), shape)
