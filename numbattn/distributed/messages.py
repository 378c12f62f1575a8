"""The messages that a rank's generator yields, and the answers to them. Drivers carry them out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Gather(NamedTuple):
    """Answered by a list of the values of all ranks, small ones that can be pickled."""

    value: Any


class Near(NamedTuple):
    """Answered by these masks and parts of scores, with their arrays where the rank computes."""

    values: list[Any]


class Like(NamedTuple):
    """An array to be received."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Exchange(NamedTuple):
    """Send arrays to one rank, and receive others of another one; answered by a ticket for `Wait`.

    All ranks exchange together, so that each is sent what it expects. It need not wait for later work on a device.
    Nobody writes to the arrays before the Wait.
    """

    to: int
    arrays: list[Any]
    source: int
    expected: list[Like]


class Wait(NamedTuple):
    """Answered by the arrays that the Exchange has received. Those that it has sent are no longer read then."""

    ticket: Any


class AllReduce(NamedTuple):
    """Answered by the sum of each of the arrays over all ranks."""

    arrays: list[Any]


Message = Gather | Near | Exchange | Wait | AllReduce
