"""A rank a process, by MPI: NumPy arrays on one machine or on many."""

from __future__ import annotations

import pickle
import time
from itertools import accumulate
from typing import Any

import numpy as np

from ..checks import library, number, words_for
from .driver import Apart
from .messages import Exchange, Gather, Message, Sum, Wait
from .pieces import ZIGZAG

LONGEST_NAP = 1e-3  # seconds between two looks whether something has arrived


class Mpi(Apart):
    """A rank a process, by mpi4py, for NumPy arrays: ``mpiexec -n 4 python program.py``.

    All processes of the communicator make one, and call the same functions in the same order.

    Parameters
    ----------
    communicator : mpi4py.MPI.Comm
        It is duplicated: messages of others do not get in between.
    order : "zigzag" or "contiguous", optional
        Whether each rank has an early and a late piece of a sequence, which shares out the work of causal masks
        equally, or one piece.
    timeout : float, optional
        After how many seconds without an answer a rank that waits raises a TimeoutError.

    Raises
    ------
    TypeError, ValueError
        For what is no communicator or number, or no such order.

    Examples
    --------
    >>> from mpi4py import MPI                                                      # doctest: +SKIP
    >>> ring = nad.Mpi(MPI.COMM_WORLD)                                              # doctest: +SKIP
    >>> o, backprop = nad.attention_vjp(ring, *map(ring.split, (q, k, v)))          # doctest: +SKIP
    """

    def __init__(self, communicator: Any, order: str = ZIGZAG, timeout: float = 600.0) -> None:
        super().__init__(order)
        if not hasattr(communicator, "Iallgatherv"):
            raise TypeError(f"communicator: got {words_for(communicator)}, expected an mpi4py.MPI.Comm")
        self.timeout = number("timeout", timeout)
        self.communicator = communicator.Dup()
        self.rank, self.ranks = communicator.Get_rank(), communicator.Get_size()

    def _all(self, parts: Any) -> list[Any]:
        return self._gathered(parts)

    def _answer(self, message: Message) -> Any:
        if isinstance(message, Gather):
            return self._gathered(message.value)
        if isinstance(message, Exchange):
            return self._begun(message)
        if isinstance(message, Wait):
            requests, arrays, _, source = message.ticket
            self._finish(requests, f"arrays of rank {source}")
            return arrays
        return [self._summed(x) for x in message.arrays] if isinstance(message, Sum) else None

    def _begun(self, message: Exchange) -> Any:
        """Requests, the arrays that are to arrive, those on their way, and of whom."""
        sent = [_bytes_of(x) for x in message.arrays]
        arrays = [np.empty(like.shape, like.dtype) for like in message.expected]
        requests = [self.communicator.Irecv(_bytes_of(x), source=message.source) for x in arrays]
        requests += [self.communicator.Isend(x, dest=message.to) for x in sent]
        return requests, arrays, sent, message.source

    def _gathered(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        own = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.empty(self.ranks, np.int64)
        self._finish([self.communicator.Iallgather(np.array([own.size], np.int64), sizes)], "all others")
        counts, found = sizes.tolist(), np.empty(sizes.sum(), np.uint8)
        starts = list(accumulate([0, *counts]))
        self._finish([self.communicator.Iallgatherv(own, [found, (counts, starts[:-1])])], "all others")
        return [pickle.loads(found[first : first + count].tobytes()) for first, count in zip(starts, counts)]

    def _summed(self, x: Any) -> Any:
        total = np.empty_like(x, order="C")
        self._finish([self.communicator.Iallreduce(np.ascontiguousarray(x), total)], "all others")
        return total

    def _finish(self, requests: list[Any], what: str) -> None:
        """Wait, as long as `timeout` allows: MPI itself would wait for ever for a process that is gone."""
        end, nap = time.monotonic() + self.timeout, 1e-6
        while not all(request.Test() for request in requests):
            if time.monotonic() > end:
                raise TimeoutError(f"rank {self.rank} has waited {self.timeout:g} s for {what}")
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP)


def _bytes_of(x: Any) -> Any:
    """An array as MPI takes it, whatever its dtype."""
    if library(x) != "numpy":
        raise TypeError(f"q: got {words_for(x)}, expected arrays of NumPy with Mpi")
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)
