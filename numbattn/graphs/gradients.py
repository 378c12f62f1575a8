"""Gradients as backprop returns them: tuples by q, k and v, with those by arrays of edges as attributes."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

from .problem import AXES


class Gradients(tuple[Any, ...]):
    """Named tuples that also have gradients of edges.

    Attributes
    ----------
    bias, factor, k_edge, v_edge : arrays or None
        The gradients by these arrays, of their shapes and dtypes; None for one that is not given.
    score : tuple
        Those by the arrays in the score, in their order; None for one that is not wanted.
    """

    _fields: ClassVar[tuple[str, ...]]
    _others: ClassVar[tuple[str, ...]] = tuple(AXES)
    bias: Any
    factor: Any
    k_edge: Any
    v_edge: Any
    score: tuple[Any, ...]

    def __init_subclass__(cls) -> None:
        for at, name in enumerate(cls._fields):
            setattr(cls, name, property(operator.itemgetter(at)))

    def __new__(cls, *values: Any, **others: Any) -> Any:
        self = super().__new__(cls, values)
        vars(self).update({**dict.fromkeys(cls._others), "score": (), **others})
        return self

    @classmethod
    def _of(cls, found: dict[str, Any], *values: Any, **others: Any) -> Any:
        """Of gradients by the names of arrays, and further ones."""
        named = {name: x for name, x in found.items() if name in AXES or name == "score"}
        return cls(found["q"], found["k"], found["v"], *values, **named, **others)

    def __repr__(self) -> str:
        named = [*zip(self._fields, self), *vars(self).items()]
        return f"{type(self).__name__}({', '.join(f'{name}={x!r}' for name, x in named)})"

    def __getnewargs_ex__(self) -> Any:  # for copies and pickle
        return tuple(self), vars(self)


class GraphGradients(Gradients):
    """dq, dk, dv; or the tangents of these."""

    _fields = "dq", "dk", "dv"
    dq: Any
    dk: Any
    dv: Any


class GraphSecondGradients(Gradients):
    """gq, gk, gv, gdo: the gradients of a function of dq, dk, dv and of the gradients of edges.

    Attributes
    ----------
    dlse : array or None
        The gradient by dlse; None without a softmax.
    """

    _fields = "gq", "gk", "gv", "gdo"
    _others = *Gradients._others, "dlse"
    gq: Any
    gk: Any
    gv: Any
    gdo: Any
    dlse: Any
