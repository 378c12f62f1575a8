"""The windows of tokens along one axis of a grid."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

EDGES = "moved", "cut", "periodic"
Numbers = NDArray[np.int64]
Sizes = tuple[int, ...]


class AxisWindow(NamedTuple):
    """The windows along an axis of `size` tokens."""

    size: int
    window: int
    dilation: int
    stride: int
    causal: bool
    edges: str

    @property
    def is_periodic(self) -> bool:
        return self.edges == "periodic"


class Part(NamedTuple):
    """A grid, by the windows along its axes. Before its tokens come `extra` ones that see all and are seen by all."""

    axes: tuple[AxisWindow, ...]
    extra: int

    @property
    def tokens(self) -> int:
        return self.extra + math.prod(axis.size for axis in self.axes)

    @property
    def tokens_along(self) -> tuple[Any, ...]:
        """What says where its tokens are."""
        return self.extra, *[(axis.size, axis.dilation) for axis in self.axes]

    @property
    def places(self) -> Numbers:
        """Where each of the grid's tokens is, (axes, tokens)."""
        return np.indices([axis.size for axis in self.axes]).reshape(len(self.axes), -1)


class Seen(NamedTuple):
    """What the tokens of an axis see, by their coordinates. Places count the tokens of a residue class, one class after
    the other, so that windows are intervals of them."""

    place: Numbers
    begin: Numbers  # of the window, a place
    last: Numbers
    wrapped_begin: Numbers  # of what lies beyond a periodic edge, 1 to 0 if nothing does
    wrapped_last: Numbers
    period: Numbers  # tokens of the class, 0 unless the edges are periodic
    offset: Numbers  # j' - i' + window - 1 for the first token of the window


@lru_cache(maxsize=64)
def seen_along(axis: AxisWindow) -> Seen:
    """What the tokens of an axis see, by the rule of `Grid.window`."""
    n, window, d, s, causal, edges = axis
    i, residue = np.arange(n) // d, np.arange(n) % d
    count = (n - residue + d - 1) // d                                  # n', tokens of the class
    start = residue * (n // d) + np.minimum(residue, n % d)             # of the class, a place
    leader = np.minimum(i // s * s + (s - 1 if causal else s // 2), count - 1)
    begin = leader - window + 1 if causal else leader - window // 2
    offset = begin - i + window - 1
    if edges == "moved" and not causal:
        offset = (begin := np.clip(begin, 0, count - window)) - i + window - 1
    last = np.minimum(begin + window - 1, i) if causal else begin + window - 1
    wrapped_begin, wrapped_last, period = np.ones_like(i), np.zeros_like(i), np.zeros_like(i)
    if edges == "periodic":
        begin, period = begin % count, count
        beyond = begin + window - count
        wrapped_begin, wrapped_last = np.where(beyond > 0, start, 1), np.where(beyond > 0, start + beyond - 1, 0)
        last = np.minimum(begin + window, count) - 1
    elif edges == "cut" or causal:
        offset -= np.minimum(begin, 0)
        begin, last = np.maximum(begin, 0), np.minimum(last, count - 1)
    return Seen(start + i, start + begin, start + last, wrapped_begin, wrapped_last, period, offset)
