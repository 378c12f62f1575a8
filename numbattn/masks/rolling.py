"""Rolling caches: which row has which token, and the rows that a query sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..base.values import Held, for_queries, given
from .bands import Causal, First, Window
from .base import Interval, Mask
from .logic import All, AnyOf


class Ring(NamedTuple):
    """The rows of a rolling cache: the first tokens of a sequence have rows of their own, later ones take turns."""

    first: int  # tokens with rows of their own
    size: int  # rows of the others
    window: int  # tokens before a query, its own included, that it sees besides the first ones

    @property
    def capacity(self) -> int:
        return self.first + self.size

    def rows(self, token: Any) -> Any:
        """The rows of tokens, given by their numbers in a sequence."""
        return np.where(token < self.first, token, self.first + (token - self.first) % self.size)

    def tokens(self, row: Any, count: Any) -> Any:
        """Which of `count` tokens rows below that number have: the last one of those that take turns."""
        return np.where(row < self.first, row, count - 1 - (count - 1 - row) % self.size)

    def lasts(self, token: Any, count: Any) -> Any:
        """Whether tokens have rows when there are `count`: whether no later one has taken theirs."""
        return (token < self.first) | (token >= count - self.size)

    @property
    def seen(self) -> tuple[Mask, ...]:
        """The masks, of positions, whose `&` says what a query sees."""
        near = Window(self.window - 1, 0)
        return Causal(), near | First(self.first) if self.first else near

    def rows_seen(self, keys: Any, queries: Any) -> tuple[Mask, ...]:
        """The same, of rows, for queries whose own tokens are the last ones, in their order. With one row for each
        token that a query sees there is nothing to hide."""
        if self.size == self.window:
            return ()
        one, other = (All((Turns(keys, queries, self, number),)) for number in range(2))
        return (AnyOf((one, other)),)


@dataclass(frozen=True, eq=False, repr=False)
class Turns(Mask):
    """The rows that a query sees: all but those of the size - window tokens after its own, which hold these, or tokens
    that have left its window. Two intervals are left, of which this is the one of this number."""

    keys: Any  # how many tokens there are, over the batch axes
    queries: Any  # how many of a call's queries are theirs
    ring: Ring
    number: int

    _is_of_rows = True

    def _intervals(self, i: Any, seqlen_k: Any) -> tuple[Interval, ...]:
        first, size, window = self.ring
        after = i + 1 + for_queries(self.keys - self.queries)
        hidden = self.ring.rows(after)
        end = hidden + size - window
        begins_again = end > first + size
        if self.number == 0:
            return (Interval(0, np.where(begins_again, first, hidden)),)
        return (Interval(np.where(begins_again, end - size, end), np.where(begins_again, hidden, first + size)),)

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        return given(keys=self.keys, queries=self.queries)
