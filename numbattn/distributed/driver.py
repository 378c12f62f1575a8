"""What all drivers share: they hold the ranks that sequences are split over, and run their generators."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import closing
from threading import Lock
from typing import Any, TypeVar

from ..base.checks import integer, library, number, words_for
from .facts import Agreed, agreed
from .joining import axis_of, check_parts, join
from .messages import Message, Near
from .pieces import ORDERS, RankPlace, joined, part_of, pieces_of

R = TypeVar("R")


class Interrupted(RuntimeError):
    """A call of this ring was interrupted on some rank, as by a time-out, Ctrl-C, or a function of the user's that does
    not compile. Ranks have to meet again, in `Ring.reset`, before they can go on."""


class Ring:
    """Ranks over which sequences are split.

    Parameters
    ----------
    order : "zigzag" or "contiguous"
        Whether each rank has an early and a late piece of a sequence, which divides the work of causal masks equally,
        or one piece.
    """

    ranks: int
    _interrupted = ""  # which call was interrupted, until ranks have met again

    def __init__(self, order: str) -> None:
        if order not in ORDERS:
            raise ValueError(f"order: got {order!r}, allowed {' or '.join(map(repr, ORDERS))}")
        self.order = order

    def split(self, x: Any, axis: int = -2) -> Any:
        """The parts of an array that every process holds whole.

        Parameters
        ----------
        x : array
        axis : int, optional
            The axis of the sequence.

        Returns
        -------
        list of arrays, or array
            A part for each rank, or, if ranks are processes, that of this one.

        Raises
        ------
        TypeError, ValueError
            For anything but an array with such an axis.
        """
        if library(x) is None:
            raise TypeError(f"x: got {words_for(x)}, expected an array of NumPy or CuPy")
        axis = axis_of(x, axis)
        return self._own([part_of(x, own, axis) for own in pieces_of(x.shape[axis], self.ranks, self.order)])

    def join(self, parts: Any, axis: int = -2) -> Any:
        """The inverse of `split`.

        Parameters
        ----------
        parts : list of arrays, or array
            As `split` returns them.
        axis : int, optional
            The axis of the sequence.

        Returns
        -------
        array
            The whole array, in every process.

        Raises
        ------
        TypeError, ValueError
            For anything but such parts, on all ranks.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Let ranks meet again after a call that was interrupted on some of them, as by a time-out or Ctrl-C. Until
        then every call raises `Interrupted`, on all ranks. All of them call this, interrupted or not.

        Raises
        ------
        TimeoutError
            If other ranks do not call it. Then it can be called again.

        Examples
        --------
        >>> ring.reset()                                                            # doctest: +SKIP
        """
        self._abandon()
        self._interrupted = ""

    def _together(self, name: str, work: Callable[..., R], *arguments: Any) -> R:
        """work(*arguments), in which all ranks do their part. If one is interrupted, they are no longer in step, and
        messages of different calls would meet."""
        self._check()
        try:
            return work(*arguments)
        except Agreed as agreed:
            raise agreed.error from None
        except BaseException:
            self._interrupted = self._interrupted or name  # first of all: a second Ctrl-C may come
            self._abandon()
            raise

    def _check(self) -> None:
        """Refuse a call after one that was interrupted."""
        if self._interrupted:
            raise interrupted(self._interrupted)

    def _abandon(self) -> None:
        """Give up exchanges in flight, so that their memory can be reused."""

    def _own(self, parts: list[Any]) -> Any:
        """This process's parts, of those of all ranks."""
        raise NotImplementedError

    def _run(self, work: Callable[..., Any], by_rank: dict[str, Any], *others: Any) -> Any:
        """The results of the generators work(place, *by_rank, *others)."""
        raise NotImplementedError

    def _of_score(self, grads: Any, saved: Any) -> tuple[Any, ...]:
        """The gradients of the score; grads, saved: of the ranks that this process holds."""
        raise NotImplementedError


class Together(Ring):
    """All ranks are in this process: arrays come in lists, one for each rank."""

    def __init__(self, ranks: int, order: str) -> None:
        super().__init__(order)
        self.ranks = integer("ranks", ranks, low=1)

    def join(self, parts: Any, axis: int = -2) -> Any:
        listed = self._listed("parts", parts)
        axis = check_parts(listed, axis, self.order)
        return self._together("join", lambda: joined(self._brought_together(listed), self.order, axis))

    def _own(self, parts: list[Any]) -> list[Any]:
        return parts

    def _brought_together(self, parts: list[Any]) -> list[Any]:
        """The parts where they can be joined in one array."""
        return parts

    def _of_score(self, grads: Any, saved: Any) -> tuple[Any, ...]:
        """The gradients of the first rank: all have the same."""
        return grads[0]

    def _listed(self, name: str, parts: Any) -> list[Any]:
        if not isinstance(parts, list | tuple) or len(parts) != self.ranks:
            raise TypeError(f"{name}: got {words_for(parts)}, expected a list of {self.ranks}, a part for each rank")
        return list(parts)


class ProcessRing(Ring):
    """Each rank is a process: it has its own parts."""

    rank: int
    _library: str  # of the arrays that can travel

    def __init__(self, order: str) -> None:
        super().__init__(order)
        self._process, self._in_a_call = os.getpid(), Lock()

    def __reduce__(self) -> Any:
        raise TypeError(f"ring: {type(self).__name__} can be neither pickled nor copied; make one in each process")

    def join(self, parts: Any, axis: int = -2) -> Any:
        return self._run(join, {"parts": parts}, axis)

    def _own(self, parts: list[Any]) -> Any:
        return parts[self.rank]

    def _run(self, work: Callable[..., Any], by_rank: dict[str, Any], *others: Any) -> Any:
        self._check_alone()
        place, wrong = RankPlace(self.rank, self.ranks, self.order), self._refused(by_rank)
        running = agreed(place, wrong) if wrong else work(place, *by_rank.values(), *others)
        with self._in_a_call, closing(running) as generator:
            return self._together(work.__name__, self._result, generator)

    def _check_alone(self) -> None:
        """Refuse a second call at the same time, and a forked process: messages of both would mix."""
        if os.getpid() != self._process:
            raise RuntimeError(f"ring: made in process {self._process}, of which this is a fork; MPI, NCCL and CUDA "
                               "do not survive a fork")  # fmt: skip
        if self._in_a_call.locked():
            raise RuntimeError("ring: a call of it has not ended, in another thread or under this signal's handler; "
                               "each thread needs a ring of its own")  # fmt: skip

    def _refused(self, by_rank: dict[str, Any]) -> TypeError | None:
        """The error for an array that cannot travel."""
        for name, x in by_rank.items():
            if library(x) and (library(x) != self._library or x.dtype.hasobject):
                return TypeError(f"{name}: got {words_for(x)}, expected arrays of {self._library}, of numbers, with "
                                 f"{type(self).__name__}")  # fmt: skip
        return None

    def _result(self, generator: Generator[Message, Any, Any]) -> Any:
        answer = None
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


def checked(ring: Any) -> Ring:
    """The first argument of every function."""
    if not isinstance(ring, Ring):
        raise TypeError(f"ring: got {words_for(ring)}, expected Simulated, Devices, Nccl or Mpi")
    return ring


def interrupted(what: str) -> Interrupted:
    """The error after this was interrupted."""
    return Interrupted(f"a call of this ring has ended halfway: {what}. All ranks have to call its reset(), or make a "
                       "new ring")  # fmt: skip


def seconds(name: str, value: Any) -> float:
    """How long to wait."""
    found = number(name, value)
    if not found > 0:
        raise ValueError(f"{name}: got {found:g}, allowed are seconds above 0")
    return found
