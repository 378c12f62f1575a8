"""Ranks that take turns in one process, on the arrays' own device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .driver import Together
from .messages import AllReduce, Exchange, Gather, Near, Wait
from .pieces import ZIGZAG, RankPlace


class Deadlock(RuntimeError):
    """Ranks that wait for each other for ever."""


class Simulated(Together):
    """Ranks that take turns in one process, to try out and test what several devices do.

    Parameters
    ----------
    ranks : int
    order : "zigzag" or "contiguous", optional
        Whether each rank has an early and a late piece of a sequence, which divides the work of causal masks equally,
        or one piece.

    Raises
    ------
    TypeError, ValueError
        For anything but a number of ranks or such an order.

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
        places = [RankPlace(rank, self.ranks, self.order) for rank in range(self.ranks)]
        turns = Turns(self, [work(place, *own, *others) for place, *own in zip(places, *lists)])
        try:
            return tuple(map(list, zip(*self._together(work.__name__, turns.results))))
        finally:
            turns.close()

    def _at(self, rank: int) -> AbstractContextManager[Any]:
        """A context in which a rank computes, on its device."""
        return nullcontext()

    def _near(self, values: list[Any], rank: int) -> list[Any]:
        """Masks and parts of scores, with their arrays where a rank computes."""
        return values

    def _begun(self, arrays: list[Any], source: int, to: int) -> Any:
        """Copies of one rank's arrays for another one, in flight."""
        return [self._delivered(x, source, to) for x in arrays]

    def _arrived(self, incoming: Any, outgoing: Any) -> list[Any]:
        """The copies sent to a rank. outgoing: of what it has sent itself."""
        return incoming

    def _delivered(self, x: Any, source: int, to: int) -> Any:
        """An array of one rank, for another one."""
        return x.copy(order="C")


class Turns:
    """The generators of all ranks. Each goes on until it has to wait for the others."""

    def __init__(self, ring: Simulated, generators: list[Any]) -> None:
        self.ring, self.generators = ring, generators
        self.waiting: list[Any] = [None] * len(generators)  # the message that each rank waits for an answer to
        self.done: dict[int, Any] = {}

    def results(self) -> list[Any]:
        ranks = range(len(self.generators))
        answers: dict[int, Any] = dict.fromkeys(ranks)
        while True:
            while answers:
                answers = self.turn(answers)
            if len(self.done) == len(ranks):
                return [self.done[rank] for rank in ranks]
            answers = dict(enumerate(self.meet()))

    def turn(self, answers: dict[int, Any]) -> dict[int, Any]:
        """Let each rank that has an answer go on until it asks again. Returns the answers that do not need the other
        ranks: their devices get work before these ranks go on."""
        found = {}
        for rank, answer in answers.items():
            with self.ring._at(rank):
                try:
                    message = self.generators[rank].send(answer)
                except StopIteration as end:
                    self.waiting[rank], self.done[rank] = None, end.value
                    continue
                if isinstance(message, Wait):
                    found[rank] = self.ring._arrived(*message.ticket)
                elif isinstance(message, Near):
                    found[rank] = self.ring._near(message.values, rank)
                else:
                    self.waiting[rank] = message
        return found

    def meet(self) -> list[Any]:
        """The answers to questions that all ranks ask together."""
        kinds = {type(message) for message in self.waiting}
        if kinds == {Gather}:
            return [[message.value for message in self.waiting]] * len(self.waiting)
        if kinds == {Exchange}:
            incoming = [self.ring._begun(self.waiting[message.source].arrays, message.source, rank)
                        for rank, message in enumerate(self.waiting)]  # fmt: skip
            return [(incoming[rank], incoming[message.to]) for rank, message in enumerate(self.waiting)]
        if kinds == {AllReduce}:
            return self.sums([list(of_ranks) for of_ranks in zip(*(message.arrays for message in self.waiting))])
        reasons = filter(None, map(self.reason, range(len(self.waiting))))
        raise Deadlock(f"these ranks wait for ever: {'; '.join(reasons)}")

    def sums(self, arrays: list[list[Any]]) -> list[list[Any]]:
        """For each rank, the sums over all ranks, in their order, of each array: arrays, even without axes."""
        answers = []
        for rank in range(len(self.waiting)):
            with self.ring._at(rank):
                answers.append([sum(self.ring._delivered(x, source, rank) for source, x in enumerate(of_ranks))[...]
                                for of_ranks in arrays])  # fmt: skip
        return answers

    def close(self) -> None:
        for generator in self.generators:
            generator.close()

    def reason(self, rank: int) -> str:
        """Why a rank waits, for an error."""
        message = self.waiting[rank]
        return "" if message is None else f"rank {rank} for all others to {type(message).__name__.lower()}"
