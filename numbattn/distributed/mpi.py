"""A process for each rank, by MPI: NumPy arrays on one machine or on many.

All messages are point-to-point: collective operations cannot be cancelled. A tag holds the kind of a message and the
epoch in which it was sent: after an interrupted call ranks meet in the next epoch, and nobody takes earlier messages
for new ones.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from ..base.checks import words_for
from .driver import Interrupted, ProcessRing, interrupted, seconds
from .messages import AllReduce, Exchange, Gather, Message, Wait
from .pieces import ZIGZAG

LONGEST_NAP = 1e-3  # seconds between two checks whether something has arrived
FACTS, ARRAYS, END = KINDS = range(3)  # of messages; the last one says that its sender has left the epoch
UNFINISHED: list[list[Any]] = []  # requests of all rings, even deleted ones: MPI uses their memory until they are done


class Mpi(ProcessRing):
    """A process for each rank, by mpi4py, for NumPy arrays: ``mpiexec -n 4 python program.py``.

    All processes of the communicator make one, and call the same functions in the same order.

    Parameters
    ----------
    communicator : mpi4py.MPI.Intracomm
        It is duplicated, so that other messages do not interfere. MPI has a limited number of duplicates: make one
        ring and keep it.
    order : "zigzag" or "contiguous", optional
        Whether each rank has an early and a late piece of a sequence, which divides the work of causal masks equally,
        or one piece.
    timeout : float, optional
        After how many seconds without an answer a waiting rank raises a TimeoutError.

    Raises
    ------
    TypeError, ValueError
        For anything but a communicator, a number above 0, or such an order.

    Notes
    -----
    A ring has one call at a time: each thread needs its own. A fork of the process cannot use it.

    If a call is interrupted on one rank, as by a time-out or Ctrl-C, others that wait in it or begin the next one raise
    `Interrupted`, and so does every call until all ranks have called `reset`. If one rank skips a whole call, and the
    next one looks the same, this goes unnoticed: such a program has to call `reset`, too.

    Examples
    --------
    >>> from mpi4py import MPI                                                      # doctest: +SKIP
    >>> ring = nad.Mpi(MPI.COMM_WORLD)                                              # doctest: +SKIP
    >>> o, backprop = nad.attention_vjp(ring, *map(ring.split, (q, k, v)))          # doctest: +SKIP
    """

    _library = "numpy"

    def __init__(self, communicator: Any, order: str = ZIGZAG, timeout: float = 600.0) -> None:
        super().__init__(order)
        if not hasattr(communicator, "Improbe"):
            raise TypeError(f"communicator: got {words_for(communicator)}, expected an mpi4py.MPI.Intracomm")
        if not communicator or communicator.Is_inter():
            got = "an Intercomm" if communicator else "COMM_NULL"
            raise ValueError(f"communicator: got {got}, expected an mpi4py.MPI.Intracomm that this process is in")
        self.timeout = seconds("timeout", timeout)
        self.communicator = communicator.Dup()
        self.rank, self.ranks = communicator.Get_rank(), communicator.Get_size()
        self._others = [rank for rank in range(self.ranks) if rank != self.rank]
        self._epoch = 0
        self._received: list[Any] = []  # requests, each of which keeps its memory
        self._sent: list[Any] = []
        UNFINISHED.extend([self._received, self._sent])

    # ----------------------------------------------------------------------------------------------------- what travels
    def _answer(self, message: Message) -> Any:
        if isinstance(message, Gather):
            return self._gathered(message.value)
        if isinstance(message, Exchange):
            return self._begun(message)
        if isinstance(message, Wait):
            requests, arrays, source = message.ticket
            self._finish(requests, f"arrays of rank {source}")
            return arrays
        return [self._summed(x) for x in message.arrays] if isinstance(message, AllReduce) else None

    def _begun(self, message: Exchange) -> Any:
        """Requests, the arrays that are to arrive, and the rank that sends them."""
        given = list(map(_bytes_of, message.arrays))
        arrays = [np.empty(like.shape, like.dtype) for like in message.expected]
        requests = self._receive(list(map(_bytes_of, arrays)), repeat(message.source), ARRAYS)
        return requests + self._send(given, repeat(message.to), ARRAYS), arrays, message.source

    def _gathered(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        own = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = [np.array([own.size]) for _ in range(self.ranks)]
        self._swap([sizes[self.rank]] * self.ranks, sizes, FACTS)
        found = [np.empty(size, np.uint8) for size in sizes]
        self._swap([own] * self.ranks, found, FACTS)
        found[self.rank] = own
        return [pickle.loads(x.tobytes()) for x in found]

    def _summed(self, x: Any) -> Any:
        """The sum over ranks: each adds up a part of the array for all, in the order of the ranks."""
        total = np.empty(x.size, x.dtype)
        given, sums = (np.array_split(flat, self.ranks) for flat in (np.ravel(x), total))
        found = [np.empty_like(sums[self.rank]) for _ in range(self.ranks)]
        self._swap(given, found, ARRAYS)
        found[self.rank] = given[self.rank]
        sums[self.rank][...] = sum(found)
        self._swap([sums[self.rank]] * self.ranks, sums, ARRAYS)
        return total.reshape(x.shape)

    def _swap(self, given: Sequence[Any], found: Sequence[Any], kind: int) -> None:
        """Send each other rank one of the arrays `given`, and receive one from each in `found`."""
        theirs, own = ([_bytes_of(of_rank[rank]) for rank in self._others] for of_rank in (given, found))
        requests = self._receive(own, self._others, kind)
        self._finish(requests + self._send(theirs, self._others, kind), "all others")

    def _receive(self, memory: Iterable[Any], ranks: Iterable[int], kind: int) -> list[Any]:
        return self._started(self._received, self.communicator.Irecv, memory, ranks, kind)

    def _send(self, memory: Iterable[Any], ranks: Iterable[int], kind: int) -> list[Any]:
        return self._started(self._sent, self.communicator.Isend, memory, ranks, kind)

    def _started(
        self, held: list[Any], start: Any, memory: Iterable[Any], ranks: Iterable[int], kind: int
    ) -> list[Any]:
        """Start requests. No Python code runs until a list holds them, so that Ctrl-C loses none."""
        before = len(held)
        held.extend(map(start, memory, ranks, repeat(self._tag(kind))))
        return held[before:]

    def _tag(self, kind: int) -> int:
        return len(KINDS) * self._epoch + kind

    def _finish(self, requests: list[Any], what: str) -> None:
        """Wait up to `timeout`: MPI itself would wait for ever for a process that is gone."""
        end, nap = time.monotonic() + self.timeout, 1e-6
        while not all(request.Test() for request in requests):
            self._listen()
            if time.monotonic() > end:
                raise TimeoutError(f"rank {self.rank} has waited {self.timeout:g} s for {what}")
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP)
        _sweep(self._received)
        _sweep(self._sent)

    # ------------------------------------------------------------------------------------------- calls that end halfway
    def reset(self) -> None:
        self._check_alone()
        with self._in_a_call:
            self._interrupted = self._interrupted or "reset"  # until all ranks have come
            self._abandon()
            while self._interrupted:
                self._epoch += 1
                try:
                    self._meet()
                    self._interrupted = ""
                except Interrupted:  # another rank has waited here before, and left
                    self._abandon()
                except BaseException:
                    self._abandon()
                    raise

    def _meet(self) -> None:
        """Wait for all ranks, then receive and discard earlier messages, to free their memory."""
        from mpi4py.MPI import BYTE, Status

        self._gathered(None)
        status = Status()
        for tag in range(self._tag(0)):
            while message := self.communicator.Improbe(tag=tag, status=status):
                self._received.extend(map(message.Irecv, [np.empty(status.Get_count(BYTE), np.uint8)]))

    def _check(self) -> None:
        super()._check()
        self._listen()

    def _listen(self) -> None:
        """Notice that another rank has left the epoch."""
        if self.communicator.Iprobe(tag=self._tag(END)):
            from mpi4py.MPI import Status

            status = Status()
            self.communicator.Probe(tag=self._tag(END), status=status)
            raise interrupted(f"that of rank {status.Get_source()}")

    def _abandon(self) -> None:
        """Tell all others, and cancel what can be cancelled."""
        self._send(repeat(np.empty(0)), self._others, END)
        for request in reversed(self._received):  # else the next one, of another size, would get its message
            if not request.Test():
                request.Cancel()
        _sweep(self._received)
        _sweep(self._sent)


def _sweep(requests: list[Any]) -> None:
    """Drop requests that are done, with their memory."""
    requests[:] = [request for request in requests if not request.Test()]


def _bytes_of(x: Any) -> Any:
    """An array as MPI takes it, whatever its dtype."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)
