"""Device memory that all calls use: counters, and scrap memory.

Each running kernel has two counters, by which its blocks draw their work. They are 0 whenever no kernel uses them: the
last block of a kernel resets them. Kernels that may run at the same time have different ones: those of a stream run one
after the other and share a pair, while a kernel captured in a graph, which may run at any time, gets its own pair.
Scrap memory takes results that are not read.
"""

import threading
from itertools import count

import cupy
import numpy as np

from .words.steps import SCRAP_BYTES

PAIR_BYTES = 8
STREAMS, CAPTURED = 1 << 12, 1 << 16  # pairs; after these the first ones are used again
PER_THREAD = 2  # the handle of every thread's own default stream


class Counters:
    """The counters of CuPy's current device."""

    def __init__(self):
        stream = cupy.cuda.Stream(non_blocking=True)  # the current one may be capturing
        with stream, cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc):
            self.memory = cupy.zeros((STREAMS + CAPTURED) * PAIR_BYTES + SCRAP_BYTES, np.uint8)
        stream.synchronize()
        self.first = self.memory.data.ptr
        self.scrap = self.first + (STREAMS + CAPTURED) * PAIR_BYTES
        self.of_streams, self.lock = {}, threading.Lock()
        self.captured = count()

    def of(self, stream, capturing):
        """The address of the pair for a kernel on this stream."""
        if stream == PER_THREAD:
            stream = stream, threading.get_ident()
        return self.first + PAIR_BYTES * self.number(stream, capturing)

    def number(self, stream, capturing):
        if capturing:
            return STREAMS + next(self.captured) % CAPTURED
        found = self.of_streams.get(stream)
        if found is None:
            with self.lock:
                found = self.of_streams.setdefault(stream, len(self.of_streams) % STREAMS)
        return found
