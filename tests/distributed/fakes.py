"""CuPy and NCCL of machines that are not there: NumPy arrays that say where they lie, streams that keep a list."""

import ctypes
import threading
from queue import Queue
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np


class Memory:
    def __init__(self, array):
        self.ptr, self.size = array.ctypes.data, array.nbytes

    def copy_from_device_async(self, source, nbytes, stream):
        stream.log.append(("copy", stream.name, nbytes))
        ctypes.memmove(self.ptr, source.ptr, nbytes)


class Array(np.ndarray):
    place = 0

    def __array_finalize__(self, x):
        self.place = getattr(x, "place", 0)

    @property
    def data(self):
        return Memory(self)

    @property
    def device(self):
        return SimpleNamespace(id=self.place)


class Event(int):
    """By the number of its line in the log."""

    done = True


class Stream(NamedTuple):
    name: str
    log: list

    @property
    def ptr(self):
        return self

    def record(self):
        self.log.append(("record", self.name))
        return Event(len(self.log) - 1)

    def wait_event(self, event):
        self.log.append(("wait", self.name, event))

    def synchronize(self):
        self.log.append(("synchronize", self.name))


class Runtime:
    """CUDA's. Only so many devices reach each other's memory, once."""

    class CUDARuntimeError(RuntimeError):
        pass

    memcpyDefault = 4

    def getDeviceCount(self):
        return 10

    def __init__(self, current, reachable=8):
        self.current, self.reachable, self.reached = current, reachable, set()

    def deviceCanAccessPeer(self, device, other):
        return max(device, other) < self.reachable

    def deviceEnablePeerAccess(self, other):
        pair = self.current[-1], other
        assert self.deviceCanAccessPeer(*pair)
        if pair in self.reached:
            raise self.CUDARuntimeError
        self.reached.add(pair)

    def memcpy2DAsync(self, to, to_step, source, step, nbytes, count, kind, stream):
        assert kind == self.memcpyDefault
        stream.log.append(("copy", stream.name, count * nbytes))
        for number in range(count):
            ctypes.memmove(to + number * to_step, source + number * step, nbytes)


class Cupy:
    """The module."""

    ndarray = Array

    def __init__(self):
        self.log, self.current = [], [0]
        self.cuda = SimpleNamespace(
            Device=self.device, get_current_stream=self.stream, Stream=self.second_stream, nccl=None,
            runtime=Runtime(self.current),
        )

    def device(self, number):
        return Device(self, number)

    def stream(self):
        return Stream(f"{self.current[-1]}", self.log)

    def second_stream(self, non_blocking, priority=0):
        assert non_blocking
        return Stream(f"second of {self.current[-1]}", self.log)

    def empty(self, shape, dtype):
        return self.placed(np.empty(shape, dtype))

    def ascontiguousarray(self, x):
        return self.placed(np.ascontiguousarray(x))

    asarray = ascontiguousarray

    def asnumpy(self, x):
        return np.array(x)

    def on(self, device, x):
        """A copy there."""
        with self.device(device):
            return self.placed(x.copy())

    def placed(self, x):
        x = x.view(Array)
        x.place = self.current[-1]
        return x


class Device(NamedTuple):
    cupy: Cupy
    id: int

    def __enter__(self):
        self.cupy.current.append(self.id)
        return self

    def __exit__(self, *error):
        self.cupy.current.pop()


class Nccl:
    """The module and the communicator of one rank, each of which is a thread; shared: by all of them."""

    NCCL_UINT8, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_SUM = range(4)

    def __init__(self, rank, shared):
        self.rank, self.shared, self.pending, self.aborted = rank, shared, [], False

    def rank_id(self):
        return self.rank

    def size(self):
        return self.shared.ranks

    def abort(self):
        self.aborted = True

    def groupStart(self):
        assert not self.pending

    def recv(self, ptr, count, kind, rank, stream):
        self.pending.append((ptr, count, rank))

    def send(self, ptr, count, kind, rank, stream):
        self.shared.sent[self.rank, rank].put(ctypes.string_at(ptr, count))

    def groupEnd(self):
        for ptr, count, rank in self.pending:
            found = self.shared.sent[rank, self.rank].get(timeout=60)
            assert len(found) == count
            ctypes.memmove(ptr, found, count)
        self.pending.clear()

    def allGather(self, ptr, out, count, kind, stream):
        found = b"".join(self.shared.of_all(self.rank, ctypes.string_at(ptr, count)))
        ctypes.memmove(out, found, len(found))

    def allReduce(self, ptr, out, count, kind, operation, stream):
        dtype = {self.NCCL_FLOAT32: np.float32, self.NCCL_FLOAT64: np.float64}[kind]
        found = self.shared.of_all(self.rank, ctypes.string_at(ptr, count * np.dtype(dtype).itemsize))
        total = sum(np.frombuffer(x, dtype) for x in found)
        ctypes.memmove(out, total.ctypes.data, total.nbytes)


class Shared:
    def __init__(self, ranks):
        self.ranks, self.rows, self.meetings = ranks, [None] * ranks, 0
        self.sent = {(one, other): Queue() for one in range(ranks) for other in range(ranks)}
        self.barrier = threading.Barrier(ranks, timeout=60)

    def of_all(self, rank, value):
        self.rows[rank] = value
        self.meetings += rank == 0
        self.barrier.wait()
        found = list(self.rows)
        self.barrier.wait()
        return found
