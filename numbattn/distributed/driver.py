"""What all drivers share: they hold the ranks over which sequences are split, and run their generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..checks import integer, library, words_for
from .messages import Message, Near
from .pieces import ORDERS, joined, part_of, pieces_of
from .share import Place


class Ring:
    """Ranks over which sequences are split.

    Parameters
    ----------
    order : "zigzag" or "contiguous"
        Whether each rank has an early and a late piece of a sequence, which shares out the work of causal masks
        equally, or one piece.
    """

    ranks: int

    def __init__(self, order: str) -> None:
        if order not in ORDERS:
            raise ValueError(f"order: got {order!r}, allowed {' or '.join(map(repr, ORDERS))}")
        self.order = order

    def split(self, x: Any, axis: int = -2) -> Any:
        """The parts of an array, of which every process holds all.

        Parameters
        ----------
        x : array
        axis : int, optional
            That of the sequence.

        Returns
        -------
        list of arrays, or array
            A part for each rank, or, where ranks are processes, that of this one.

        Raises
        ------
        TypeError, ValueError
            For what is no array, or has no such axis.
        """
        if library(x) is None:
            raise TypeError(f"x: got {words_for(x)}, expected an array of NumPy or CuPy")
        axis = _axis(x, axis)
        return self._own([part_of(x, own, axis) for own in pieces_of(x.shape[axis], self.ranks, self.order)])

    def join(self, parts: Any, axis: int = -2) -> Any:
        """The inverse of `split`.

        Parameters
        ----------
        parts : list of arrays, or array
            What `split` returns.
        axis : int, optional
            That of the sequence.

        Returns
        -------
        array
            All of it, in every process.

        Raises
        ------
        TypeError, ValueError
            For what are no such parts.
        """
        found = self._all(parts)
        return joined(found, self.order, _axis(found[0], axis))

    def _own(self, parts: list[Any]) -> Any:
        """Of the parts of all ranks those that this process holds."""
        raise NotImplementedError

    def _all(self, parts: Any) -> list[Any]:
        raise NotImplementedError

    def _run(self, work: Callable[..., Any], by_rank: dict[str, Any], *others: Any) -> Any:
        """The results of the generators work(place, *by_rank, *others)."""
        raise NotImplementedError

    def _of_score(self, grads: Any, saved: Any) -> tuple[Any, ...]:
        """The gradients of the score; grads, saved: of the ranks that this process holds."""
        raise NotImplementedError


class Together(Ring):
    """All ranks are in this process: of each array there is a list."""

    def __init__(self, ranks: int, order: str) -> None:
        super().__init__(order)
        self.ranks = integer("ranks", ranks, low=1)

    def _own(self, parts: list[Any]) -> list[Any]:
        return parts

    def _all(self, parts: Any) -> list[Any]:
        return self._listed("parts", parts)

    def _of_score(self, grads: Any, saved: Any) -> tuple[Any, ...]:
        """The first rank's: all have the same."""
        return grads[0]

    def _listed(self, name: str, parts: Any) -> list[Any]:
        if not isinstance(parts, list | tuple) or len(parts) != self.ranks:
            raise TypeError(f"{name}: got {words_for(parts)}, expected a list of {self.ranks}, a part for each rank")
        return list(parts)


class Apart(Ring):
    """Each rank is a process: it has its own parts."""

    rank: int

    def _own(self, parts: list[Any]) -> Any:
        return parts[self.rank]

    def _all(self, parts: Any) -> list[Any]:
        raise NotImplementedError

    def _run(self, work: Callable[..., Any], by_rank: dict[str, Any], *others: Any) -> Any:
        generator, answer = work(Place(self.rank, self.ranks, self.order), *by_rank.values(), *others), None
        while True:
            try:
                message, answer = generator.send(answer), None
            except StopIteration as end:
                return end.value
            answer = message.values if isinstance(message, Near) else self._answer(message)

    def _of_score(self, grads: Any, saved: Any) -> tuple[Any, ...]:
        return grads

    def _answer(self, message: Message) -> Any:
        """Carry out what the generator asks for."""
        raise NotImplementedError


def _axis(x: Any, axis: int) -> int:
    found = integer("axis", axis, -x.ndim, x.ndim - 1)
    return found % x.ndim
