"""A process for each rank, with a GPU of its own, by NCCL."""

from __future__ import annotations

import pickle
import time
from typing import Any, NamedTuple

import numpy as np

from ..base.checks import words_for
from .driver import Interrupted, ProcessRing, seconds
from .messages import AllReduce, Exchange, Gather, Message, Wait
from .pieces import ZIGZAG

FIRST, ALWAYS = CHECKS = "first", "always"
MOST_KNOWN = 4096  # kinds of calls
NAP = 1e-4  # seconds between two checks whether a stream is done
HIGH = -1  # a stream's priority: its blocks start first


class Ticket(NamedTuple):
    """An exchange on NCCL's stream."""

    received: list[Any]
    sent: Any  # kept alive until then
    done: Any  # an event


class Nccl(ProcessRing):
    """A process for each rank, with a GPU of its own, by NCCL.

    All processes of the communicator make one, and call the same functions in the same order.

    Parameters
    ----------
    communicator : cupy.cuda.nccl.NcclCommunicator
    order : "zigzag" or "contiguous", optional
        Whether each rank has an early and a late piece of a sequence, which divides the work of causal masks equally,
        or one piece.
    check : "first" or "always"
        When ranks compare their arguments, for which the host waits: in the first call of a kind, as far as this rank
        can tell, or in every call. The same on all ranks.

    Raises
    ------
    TypeError, ValueError
        For anything but a communicator, such an order and such a check.

    Notes
    -----
    A ring has one call at a time: each thread needs its own, of a communicator of its own. A fork of the process cannot
    use it.

    Kernels run on CuPy's current stream, NCCL on one of the ring's. With ``check="first"`` the program has to ensure
    that ranks change to another kind of call together: if the length of a sequence changes, but not that of this rank's
    part, this rank does not know, and others wait for it. ``check="always"`` is for such programs, and for finding out
    why one hangs.

    If a call is interrupted, as by Ctrl-C, the communicator is aborted, and every call raises `Interrupted`. NCCL does
    not tell other ranks: they find out in `synchronize`. Then all of them need a new communicator, and a new ring.

    Examples
    --------
    >>> from cupy.cuda import nccl                                                  # doctest: +SKIP
    >>> ring = nad.Nccl(nccl.NcclCommunicator(ranks, unique_id, rank))              # doctest: +SKIP
    >>> o, backprop = nad.attention_vjp(ring, *map(ring.split, (q, k, v)))          # doctest: +SKIP
    """

    _library = "cupy"

    def __init__(self, communicator: Any, order: str = ZIGZAG, check: str = FIRST) -> None:
        import cupy
        from cupy.cuda import nccl

        super().__init__(order)
        if not hasattr(communicator, "rank_id"):
            raise TypeError(f"communicator: got {words_for(communicator)}, expected a cupy.cuda.nccl.NcclCommunicator")
        if check not in CHECKS:
            raise ValueError(f"check: got {check!r}, allowed {' or '.join(map(repr, CHECKS))}")
        self.cupy, self.nccl, self.communicator, self.check = cupy, nccl, communicator, check
        self.rank, self.ranks = communicator.rank_id(), communicator.size()
        self.stream, self.in_flight = cupy.cuda.Stream(non_blocking=True, priority=HIGH), 0
        self.known: dict[bytes, list[Any]] = {}  # what all ranks have said, by what this one said

    def synchronize(self, timeout: float = 600.0) -> None:
        """Wait until the current stream is done. Otherwise others would wait for ever for a rank that is gone.

        Parameters
        ----------
        timeout : float, optional
            After how many seconds to abort the communicator, which cannot be used any more then.

        Raises
        ------
        TimeoutError
            After that.

        Examples
        --------
        >>> o = nad.attention(ring, q, k, v)                                        # doctest: +SKIP
        >>> ring.synchronize(timeout=60)                                            # doctest: +SKIP
        """
        event, end = self.cupy.cuda.get_current_stream().record(), time.monotonic() + seconds("timeout", timeout)
        while not event.done:
            if time.monotonic() > end:
                self._interrupted = "synchronize"
                self._abandon()
                raise TimeoutError(f"rank {self.rank} has waited {timeout:g} s for all others")
            time.sleep(NAP)

    def reset(self) -> None:
        """Not possible: NCCL has no messages by which ranks could meet again.

        Raises
        ------
        Interrupted
            Always. Make a new communicator, and a new ring with it.
        """
        raise Interrupted("reset: NCCL cannot let ranks meet again, make a new NcclCommunicator on all of them, and a "
                          "new ring of it")  # fmt: skip

    def _abandon(self) -> None:
        """End NCCL's waiting: its memory is reused after this."""
        self.communicator.abort()
        self.stream.synchronize()

    def _answer(self, message: Message) -> Any:
        if isinstance(message, Gather):
            return self._gathered(message.value)
        if isinstance(message, Exchange):
            return self._exchanged([(message.to, x) for x in message.arrays],
                                   [(message.source, like) for like in message.expected])  # fmt: skip
        if isinstance(message, Wait):
            return self._arrived(message.ticket)
        return [self._summed(x) for x in message.arrays] if isinstance(message, AllReduce) else None

    def _exchanged(self, sent: list[Any], expected: list[Any]) -> Ticket:
        """Exchange (rank, array) for (rank, Like)."""
        sent = [(rank, self.cupy.ascontiguousarray(x)) for rank, x in sent]
        received = [(rank, self.cupy.empty(*like)) for rank, like in expected]
        stream, byte = self._second_stream(), self.nccl.NCCL_UINT8
        self.nccl.groupStart()
        try:
            for rank, x in received:
                self.communicator.recv(x.data.ptr, x.nbytes, byte, rank, stream)
            for rank, x in sent:
                self.communicator.send(x.data.ptr, x.nbytes, byte, rank, stream)
        finally:  # or the next call would be in the same group
            self.nccl.groupEnd()
        return Ticket([x for _, x in received], sent, self.stream.record())

    def _second_stream(self) -> int:
        """NCCL's stream, after earlier work on the current one, which wrote the arrays or used their memory. Later work
        on the current stream starts after NCCL's kernel: a persistent kernel would leave it no multiprocessor."""
        current = self.cupy.cuda.get_current_stream()
        self.stream.wait_event(current.record())
        if not self.in_flight:  # it would wait for exchanges in flight, too
            current.wait_event(self.stream.record())
        self.in_flight += 1
        return self.stream.ptr

    def _arrived(self, ticket: Ticket) -> list[Any]:
        """The arrays received. After this the memory of what was sent may be reused."""
        self.cupy.cuda.get_current_stream().wait_event(ticket.done)
        self.in_flight -= 1
        return ticket.received

    def _summed(self, x: Any) -> Any:
        kind = self.nccl.NCCL_FLOAT64 if x.dtype == np.float64 else self.nccl.NCCL_FLOAT32
        total, x = self.cupy.empty(x.shape, x.dtype), self.cupy.ascontiguousarray(x)  # which has an axis at least
        stream = self._second_stream()
        self.communicator.allReduce(x.data.ptr, total.data.ptr, x.size, kind, self.nccl.NCCL_SUM, stream)
        return self._arrived(Ticket([total], x, self.stream.record()))[0]

    def _gathered(self, value: Any) -> list[Any]:
        """The values of all ranks; the host need not wait if this rank has given the same value before."""
        own = pickle.dumps(value)
        if self.check == ALWAYS or own not in self.known:
            sizes = self._all_of(np.array([len(own)], np.int64)).ravel()
            padded = np.zeros(sizes.max(), np.uint8)
            padded[: len(own)] = np.frombuffer(own, np.uint8)
            rows = self._all_of(padded)
            if len(self.known) >= MOST_KNOWN:
                del self.known[next(iter(self.known))]  # the same on all ranks: each has gathered as often
            self.known[own] = [pickle.loads(row[:size]) for row, size in zip(rows, sizes)]
        return self.known[own]

    def _all_of(self, x: Any) -> Any:
        """The arrays of all ranks, of one shape, as rows: from the host and to it."""
        own, found = self.cupy.asarray(x), self.cupy.empty((self.ranks, x.size), x.dtype)
        stream = self._second_stream()
        self.communicator.allGather(own.data.ptr, found.data.ptr, x.nbytes, self.nccl.NCCL_UINT8, stream)
        self._arrived(Ticket([found], own, self.stream.record()))
        self.synchronize()
        return self.cupy.asnumpy(found)
