"""A rank a process, each with a GPU, by NCCL."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from ..checks import words_for
from .driver import Apart
from .messages import Exchange, Gather, Like, Message, Sum, Wait
from .pieces import ZIGZAG

FIRST, ALWAYS = CHECKS = "first", "always"


class Nccl(Apart):
    """A rank a process, each with a GPU of its own, by NCCL.

    All processes of the communicator make one, and call the same functions in the same order.

    Parameters
    ----------
    communicator : cupy.cuda.nccl.NcclCommunicator
    order : "zigzag" or "contiguous", optional
        Whether each rank has an early and a late piece of a sequence, which shares out the work of causal masks
        equally, or one piece.
    check : "first" or "always"
        When ranks compare what they were given, for which the host waits: in the first call of a kind, as far as this
        rank can tell, or in every call.

    Raises
    ------
    TypeError, ValueError
        For what is no communicator, no such order or no such check.

    Notes
    -----
    Everything happens on CuPy's current stream. With ``check="first"`` it is for the program to see to that ranks go on
    to other kinds together: where the length of a sequence changes, but not that of this rank's part, this rank does
    not know, and others wait for it. ``check="always"`` is for such programs, and to find out why one hangs.

    Examples
    --------
    >>> from cupy.cuda import nccl                                                  # doctest: +SKIP
    >>> ring = nad.Nccl(nccl.NcclCommunicator(ranks, unique_id, rank))              # doctest: +SKIP
    >>> o, backprop = nad.attention_vjp(ring, *map(ring.split, (q, k, v)))          # doctest: +SKIP
    """

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
        self.known: dict[bytes, list[Any]] = {}  # what all ranks have said, by what this one said

    def _all(self, parts: Any) -> list[Any]:
        kinds = [Like(*kind) for kind in self._gathered((parts.shape, parts.dtype))]
        found = [self.cupy.empty(*kind) for kind in kinds]
        self._exchange([(other, parts) for other in range(self.ranks)], list(enumerate(found)))
        return found

    def _answer(self, message: Message) -> Any:
        if isinstance(message, Gather):
            return self._gathered(message.value)
        if isinstance(message, Exchange):
            found = [self.cupy.empty(*like) for like in message.expected]
            self._exchange([(message.to, x) for x in message.arrays], [(message.source, x) for x in found])
            return found
        if isinstance(message, Wait):
            return message.ticket
        return [self._summed(x) for x in message.arrays] if isinstance(message, Sum) else None

    def _exchange(self, sent: list[Any], received: list[Any]) -> None:
        """Of arrays (rank, array) each; the stream keeps the order, with what has made them and what reads them."""
        stream, byte = self.cupy.cuda.get_current_stream().ptr, self.nccl.NCCL_UINT8
        sent = [(rank, self.cupy.ascontiguousarray(x)) for rank, x in sent]
        self.nccl.groupStart()
        for rank, x in received:
            self.communicator.recv(x.data.ptr, x.nbytes, byte, rank, stream)
        for rank, x in sent:
            self.communicator.send(x.data.ptr, x.nbytes, byte, rank, stream)
        self.nccl.groupEnd()

    def _summed(self, x: Any) -> Any:
        kind = self.nccl.NCCL_FLOAT64 if x.dtype == np.float64 else self.nccl.NCCL_FLOAT32
        x, total = self.cupy.ascontiguousarray(x), self.cupy.empty(x.shape, x.dtype)
        stream = self.cupy.cuda.get_current_stream().ptr
        self.communicator.allReduce(x.data.ptr, total.data.ptr, x.size, kind, self.nccl.NCCL_SUM, stream)
        return total

    def _gathered(self, value: Any) -> list[Any]:
        """The values of all ranks; for those that this rank has given before the host need not wait."""
        own = pickle.dumps(value)
        if self.check == ALWAYS or own not in self.known:
            sizes = self._all_of(np.array([len(own)], np.int64)).ravel()
            padded = np.zeros(sizes.max(), np.uint8)
            padded[: len(own)] = np.frombuffer(own, np.uint8)
            rows = self._all_of(padded)
            self.known[own] = [pickle.loads(row[:size]) for row, size in zip(rows, sizes)]
        return self.known[own]

    def _all_of(self, x: Any) -> Any:
        """Of an array on the host a row for each rank, there."""
        own, found = self.cupy.asarray(x), self.cupy.empty((self.ranks, x.size), x.dtype)
        stream = self.cupy.cuda.get_current_stream().ptr
        self.communicator.allGather(own.data.ptr, found.data.ptr, x.nbytes, self.nccl.NCCL_UINT8, stream)
        return self.cupy.asnumpy(found)
