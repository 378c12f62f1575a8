"""Parts of a score in a call whose rows have positions: functions of these, which read them from arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np

from ..base.forks import cached_property
from ..base.values import Memo, sum_broadcast
from ..functions.frozen import ORDERS
from ..functions.positions import of_distance, of_score, positions_of
from .distance import DistancePart
from .element import FunctionPart, Identity
from .parts import Part

PLACED = Memo("placed")  # parts with positions, by the frame that has these


def takes_positions(part: Part) -> bool:
    """Whether a part takes positions for rows."""
    return isinstance(part, FunctionPart | DistancePart)


def placed(part: Part, frame: Any, shape: tuple[int, ...], dtype: Any, place: Any = ()) -> Part:
    """A part in a call with this frame, a masks.Positions, and S of this shape and this dtype of sums. It is kept for
    later calls at the same place; None: nothing is kept."""
    if isinstance(part, Placed) or not takes_positions(part):
        return part
    if getattr(part, "offset", None) is not None:
        raise ValueError(f"score: got {part} {frame._words}, expected it without an offset")
    key = frame, shape, dtype, place
    found = None if place is None else PLACED.get(part, key)
    if found is None:
        found = Placed(part, frame, shape, dtype)
        if place is not None:
            PLACED.keep(part, key, found)
    return cast(Part, found)


@dataclass(frozen=True, eq=False, repr=False)
class Placed(FunctionPart):
    """A part, a function of its own or one by distance, with positions in place of rows."""

    part: Any
    frame: Any
    shape: tuple[int, ...]  # of S
    dtype: Any  # of sums

    @cached_property
    def _places(self) -> tuple[Any, ...]:
        return cast(tuple[Any, ...], self.frame._arrays_for(self.shape))

    @cached_property
    def _own(self) -> tuple[Any, ...]:
        """The part's arrays as the function reads them."""
        return tuple(map(self._as_read, self.part._weights))

    def _as_read(self, x: Any) -> Any:
        """An array of a part by distance, or its tangent, (batch, heads, entries), where batch and heads may be 1."""
        if isinstance(self.part, FunctionPart):
            return x
        *lead, heads, entries = self._by_matrix(x.shape)
        whole = np.broadcast_to(self._padded(x).astype(self.dtype, copy=False), (*lead, heads, entries))
        return whole.reshape(math.prod(lead), heads, entries)

    def _padded(self, x: Any) -> Any:
        """An array of a part by distance with all batch axes, of size 1 where it lacks one, and an axis of entries."""
        entries = x.shape[x.ndim - self.part._own_axes :] or (1,)
        lead = x.shape[: x.ndim - self.part._own_axes]
        return x.reshape((1,) * (max(len(self.shape) - 2, 2) - len(lead)) + lead + entries)

    def _by_matrix(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape as it is read: either all elements of the batch have arrays of their own, or they share one."""
        *lead, heads, entries = self._padded(np.broadcast_to(np.float32(0), shape)).shape
        shared = math.prod(lead) == 1
        return *(lead if shared else self.shape[: len(lead)]), heads, entries

    @cached_property
    def _identity(self) -> Identity:  # type: ignore[override]
        positions = positions_of(self._places)
        if isinstance(self.part, FunctionPart):
            return _identity_of(self.part._identity, positions)
        return _identity_by_distance(cast(Any, type(self.part)), positions)

    # ------------------------------------------------------------------------------------- what the function looks up
    @property
    def _looked_up(self) -> tuple[Any, ...]:
        return *self._places, *self._own

    @property
    def _counted(self) -> tuple[bool, ...]:
        return (False,) * len(self._places) + self._wanted

    def _arrays(self) -> dict[str, Any]:
        return {f"arrays[{number}]": x for number, x in enumerate(self._looked_up)}

    def _mapped(self, function: Callable[[Any], Any]) -> Placed:
        return self

    # ----------------------------------------------------------------------------------- what a call sees of the part
    @property
    def _function(self) -> Callable[..., Any]:
        return self.part._function if isinstance(self.part, FunctionPart) else self._identity.function.python

    @property
    def _weights(self) -> tuple[Any, ...]:
        return cast(tuple[Any, ...], self.part._weights)

    @property
    def _wanted(self) -> tuple[bool, ...]:
        return cast(tuple[bool, ...], self.part._wanted)

    @property
    def _is_linear(self) -> bool:  # type: ignore[override]
        return cast(bool, self.part._is_linear)

    @property
    def _wants_gradient(self) -> bool:
        return any(self._wanted)

    def _asking(self, wanted: Sequence[bool]) -> Placed:
        return replace(self, part=self.part._asking(wanted))

    def _fit(self, batch: tuple[int, ...], seqlen_q: int, seqlen_k: int) -> None:
        """The part has been fitted."""

    def _tangent(self, tangents: Sequence[Any], dtype: Any, backward: bool) -> Any:
        return super()._tangent([x if x is None else self._as_read(x) for x in tangents], dtype, backward)

    def _gradients(self, found: Any, lead: tuple[int, ...] = ()) -> tuple[Any, ...]:
        grads = super()._gradients(found, lead)
        if isinstance(self.part, FunctionPart):
            return grads
        return tuple([self._summed(grad, x, lead) for grad, x in zip(grads, self._weights)])

    def _summed(self, grad: Any, x: Any, lead: tuple[int, ...]) -> Any:
        if grad is None:
            return None
        whole = sum_broadcast(grad.reshape(*lead, *self._by_matrix(x.shape)), (*lead, *self._padded(x).shape))
        return whole.reshape((*lead, *x.shape))

    def __repr__(self) -> str:
        return repr(self.part)


@lru_cache(maxsize=256)
def _identity_of(identity: Identity, positions: Any) -> Identity:
    """The Identity of functions of positions, as those of rows."""
    made: Identity = object.__new__(Identity)
    made.key = tuple([None if function is None else of_score(function, positions, f"Score {order}")
                      for order, function in zip(ORDERS, identity.key)])  # fmt: skip
    made.function = made.key[0]
    return made


@lru_cache(maxsize=16)
def _identity_by_distance(kind: type[DistancePart], positions: Any) -> Identity:
    made: Identity = object.__new__(Identity)
    made.key = of_distance(kind._reading(_clip), positions), None, None
    made.function = made.key[0]
    return made


def _clip(x, low, high):  # type: ignore[no-untyped-def]
    return min(max(x, low), high)
