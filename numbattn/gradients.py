"""The gradients of q, k and v, of their own shapes."""

from __future__ import annotations

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
        """The same, but for these of dq, dk, dv and score."""
        return Gradients(**{**self._asdict(), "score": self.score, **values})

    def __repr__(self) -> str:
        return f"Gradients(dq={self.dq!r}, dk={self.dk!r}, dv={self.dv!r}, score={self.score!r})"

    def __getnewargs__(self) -> Any:  # for copies and pickle
        return *self, self.score


def sum_to(x: Any, shape: tuple[int, ...]) -> Any:
    """A gradient (..., heads, rows, columns) of a broadcast input, summed to the input's own shape."""
    if x.shape == shape:
        return x
    own = (1,) * (x.ndim - len(shape)) + shape
    groups = own[-3], x.shape[-3] // max(own[-3], 1)
    return sum_broadcast(x.reshape(*x.shape[:-3], *groups, *x.shape[-2:]).sum(axis=-3), shape)
