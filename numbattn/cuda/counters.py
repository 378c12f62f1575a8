"""Device memory that all calls use: counters, and scrap memory.

Each running kernel has counters, by which its blocks draw their work, or count what is done. They are 0 whenever no
kernel uses them: the last block that needs one resets it. Kernels that may run at the same time have different ones:
those of a stream run one after the other and share theirs, while a kernel captured in a graph, which may run at any
time, gets its own. Scrap memory takes results that are not read.
"""

import threading

import cupy
import numpy as np

from .words.steps import MOST_COUNTERS, SCRAP_BYTES

COUNTER_BYTES = 4
STREAMS = 1 << 12  # with counters of their own; after these the first ones are used again
CAPTURED = 1 << 18  # counters, likewise
PER_THREAD = 2  # the handle of every thread's own default stream


class Counters:
    """The counters of CuPy's current device."""

    def __init__(self):
        nbytes = (STREAMS * MOST_COUNTERS + CAPTURED) * COUNTER_BYTES
        stream = cupy.cuda.Stream(non_blocking=True)  # the current one may be capturing
        with stream, cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc):
            self.memory = cupy.zeros(nbytes + SCRAP_BYTES, np.uint8)
        stream.synchronize()
        self.first = self.memory.data.ptr
        self.scrap = self.first + nbytes
        self.of_streams, self.captured, self.lock = {}, 0, threading.Lock()

    def of(self, stream, capturing, count=2):
        """The address of so many counters for a kernel on this stream."""
        number = self.number_captured(count) if capturing else self.number(stream)
        return self.first + COUNTER_BYTES * number

    def number(self, stream):
        """The number of a stream's first counter."""
        if stream == PER_THREAD:
            stream = stream, threading.get_ident()
        found = self.of_streams.get(stream)
        if found is None:
            with self.lock:
                found = self.of_streams.setdefault(stream, len(self.of_streams) % STREAMS)
        return MOST_COUNTERS * found

    def number_captured(self, count):
        """The number of the first of so many counters that no other kernel has."""
        with self.lock:
            first = self.captured if self.captured + count <= CAPTURED else 0
            self.captured = first + count
        return STREAMS * MOST_COUNTERS + first
