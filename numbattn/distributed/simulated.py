"""Ranks that take turns in one process, on the arrays' own device."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .driver import Together
from .messages import Exchange, Gather, Sum, Wait
from .pieces import ZIGZAG
from .share import Place


class Deadlock(RuntimeError):
    """Ranks that wait for each other for ever."""


class Simulated(Together):
    """Ranks that take turns in one process: to try out and to test what several devices do.

    Parameters
    ----------
    ranks : int
    order : "zigzag" or "contiguous", optional
        Whether each rank has an early and a late piece of a sequence, which shares out the work of causal masks
        equally, or one piece.

    Raises
    ------
    TypeError, ValueError
        For what is no number of ranks, or no such order.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import distributed as nad
    >>> ring = nad.Simulated(2)
    >>> x = np.arange(100.0)[:, None]
    >>> parts = ring.split(x)
    >>> [part.shape for part in parts]
    [(36, 1), (64, 1)]
    >>> np.array_equal(ring.join(parts), x)
    True
    """

    def __init__(self, ranks: int, order: str = ZIGZAG) -> None:
        super().__init__(ranks, order)

    def _run(self, work: Callable[..., Any], by_rank: dict[str, Any], *others: Any) -> Any:
        """A list of each result, by rank."""
        lists = [[None] * self.ranks if x is None else self._listed(name, x) for name, x in by_rank.items()]
        places = [Place(rank, self.ranks, self.order) for rank in range(self.ranks)]
        turns = Turns(self, [work(place, *own, *others) for place, *own in zip(places, *lists)])
        return tuple(map(list, zip(*turns.results())))

    def _at(self, rank: int) -> AbstractContextManager[Any]:
        """Where a rank computes."""
        return nullcontext()

    def _delivered(self, x: Any, source: int, to: int) -> Any:
        """An array of one rank, for another one."""
        return x.copy(order="C")


class Turns:
    """The generators of all ranks, each of which goes on until it has to wait."""

    def __init__(self, ring: Simulated, generators: list[Any]) -> None:
        self.ring, self.generators = ring, generators
        self.waiting: list[Any] = [None] * len(generators)  # the message that each rank waits for an answer to
        self.sent: dict[Any, deque[Any]] = defaultdict(deque)  # by (source, to), lists of arrays that have not arrived
        self.done: dict[int, Any] = {}

    def results(self) -> list[Any]:
        ranks = range(len(self.generators))
        for rank in ranks:
            self.go_on(rank, None)
        while len(self.done) < len(ranks):
            if self.meet():
                continue
            ready = [rank for rank in ranks if isinstance(self.waiting[rank], Wait) and self.has_arrived(rank)]
            if not ready:
                raise Deadlock(f"these ranks wait for ever: {'; '.join(filter(None, map(self.reason, ranks)))}")
            for rank in ready:
                self.go_on(rank, self.sent[self.waiting[rank].ticket, rank].popleft())
        return [self.done[rank] for rank in ranks]

    def go_on(self, rank: int, answer: Any) -> None:
        """Until the next message that has to be waited for."""
        with self.ring._at(rank):
            try:
                message = self.generators[rank].send(answer)
                while isinstance(message, Exchange):
                    message = self.generators[rank].send(self.begun(rank, message))
                self.waiting[rank] = message
            except StopIteration as end:
                self.waiting[rank], self.done[rank] = None, end.value

    def begun(self, rank: int, message: Exchange) -> int | None:
        """Who sends what the rank will wait for, if anyone does."""
        if message.arrays:
            arrays = [self.ring._delivered(x, rank, message.to) for x in message.arrays]
            self.sent[rank, message.to].append(arrays)
        return message.source if message.expected else None

    def has_arrived(self, rank: int) -> bool:
        source = self.waiting[rank].ticket
        return source is None or bool(self.sent[source, rank])

    def meet(self) -> bool:
        """Answer what all ranks ask for together, if they do."""
        kinds = {type(message) for message in self.waiting}
        if kinds == {Gather}:
            answers = [[message.value for message in self.waiting]] * len(self.waiting)
        elif kinds == {Sum}:
            arrays = zip(*(message.arrays for message in self.waiting))
            answers = self.sums([list(of_ranks) for of_ranks in arrays])
        else:
            return False
        for rank, answer in enumerate(answers):
            self.go_on(rank, answer)
        return True

    def sums(self, arrays: list[list[Any]]) -> list[list[Any]]:
        """For each rank, of each array that all ranks have: in the order of the ranks."""
        answers = []
        for rank in range(len(self.waiting)):
            with self.ring._at(rank):
                answers.append([sum(self.ring._delivered(x, source, rank) for source, x in enumerate(of_ranks))
                                for of_ranks in arrays])  # fmt: skip
        return answers

    def reason(self, rank: int) -> str:
        """Why a rank waits, for an error."""
        message = self.waiting[rank]
        if message is None:
            return ""
        if isinstance(message, Wait):
            return f"rank {rank} for arrays of rank {message.ticket}"
        return f"rank {rank} for all others to {type(message).__name__.lower()}"
