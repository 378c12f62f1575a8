"""What the interpreter's threads read and write: bytes that know who may touch them."""

from typing import NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

SHARED_BASE, GLOBAL_BASE = 1 << 10, 1 << 33  # beyond 32 bits: a truncated address is found
GAP = 256  # bytes that belong to nobody, between any two arrays
CHUNK, ROW, ATOM = 16, 128, 1024  # bytes: what a swizzle moves, within which, and what it repeats after
NOBODY, PEER = -1, -2  # in place of a thread; PEER: one of another block of the cluster


def bounds(array):
    """The address of its first byte, and that after its last one."""
    return byte_bounds(array) if array.size else (array.ctypes.data,) * 2


class AccessError(RuntimeError):
    """An access that is misaligned, lies outside of all arrays, or reads what nobody has written."""


class Places(NamedTuple):
    """Pieces of memory of one size, each aligned to it."""

    size: int
    rows: np.ndarray

    def of(self, x):
        """Their elements [..., size] of an array with an element for each byte."""
        return x.reshape(-1, self.size)[self.rows]

    def set(self, x, values):
        x.reshape(-1, self.size)[self.rows] = values


class Memory:
    """Bytes with holes: those that belong to an array, and those of them that have been written."""

    def __init__(self, nbytes, base):
        nbytes = -(-nbytes // GAP) * GAP  # so that it is rows of any size
        self.bytes, self.base, self.end = np.zeros(nbytes, np.uint8), base, 0
        self.owned, self.written = np.zeros(nbytes, bool), np.zeros(nbytes, bool)
        self.maps = {}  # address: TensorMap and the address of its array
        self.arrays = []  # each with what is to be added to its addresses outside

    def reserve(self, nbytes, align=256):
        """The address of fresh bytes, owned by nobody yet."""
        start = -(-(self.end + GAP) // align) * align
        self.end = start + nbytes
        if self.end + GAP > len(self.bytes):
            more = -(-self.end // GAP) * GAP + GAP
            self.bytes, self.owned, self.written = (
                np.concatenate([x, np.zeros(more, x.dtype)]) for x in (self.bytes, self.owned, self.written)
            )
        return start + self.base

    def add(self, array, written=True):
        """An array of any strides, with holes where it has some: its address and how to read it back.

        It lies in an array that was added before if it does so outside: add larger ones first.
        """
        low, high = bounds(array)
        shifts = [shift for other, shift in self.arrays if np.shares_memory(array, other)]
        at = array.ctypes.data + (shifts[0] if shifts else self.reserve(high - low) - low)
        self.arrays.append((array, at - array.ctypes.data))
        places = np.full(array.shape, at - self.base)
        for axis, stride in enumerate(array.strides):
            places += (np.arange(array.shape[axis]) * stride).reshape(-1, *[1] * (array.ndim - 1 - axis))
        places = places[..., None] + np.arange(array.itemsize)
        self.bytes[places] = np.ascontiguousarray(array)[..., None].view(np.uint8)
        self.owned[places], self.written[places] = True, written
        return at, lambda: self.bytes[places].view(array.dtype)[..., 0]

    def add_map(self, tensor_map, address):
        """The address of a tensor map."""
        at = self.reserve(128)
        self.maps[at] = tensor_map, address
        return at

    def places(self, address, size, what, read, parts=1):
        """The Places of accesses, after all checks.

        parts: of what is read, one of so many has to have been written, the others may be padding.
        """
        start = address.astype(np.int64) - self.base
        if (start % size).any():
            raise AccessError(f"{what}: misaligned by {int((start % size).max())} bytes of {size}")
        found = Places(size, start // size)
        if (start < 0).any() or (start >= len(self.bytes)).any() or not found.of(self.owned).all():
            raise AccessError(f"{what} outside of all arrays")
        if read:
            written = found.of(self.written)
            if not written.all() and not written.reshape(-1, parts, size // parts).all(2).any(1).all():
                raise AccessError(f"{what} reads what nobody has written")
        return found

    def write(self, places, values, threads):
        places.set(self.bytes, values)
        places.set(self.written, True)


class Shared(Memory):
    """A block's shared memory. The asynchronous units (TMA, wgmma) see what threads have stored only after a fence."""

    def __init__(self, nbytes):
        super().__init__(nbytes + 4096, SHARED_BASE)
        self.at = self.reserve(nbytes, ATOM)
        self.owned[self.at - self.base :][:nbytes] = True
        self.unfenced = np.full(len(self.bytes), NOBODY)  # the thread that stored it, and has not fenced it since
        self.users = np.zeros(len(self.bytes), np.int32)  # barriers, and products and copies on their way

    def write(self, places, values, threads):
        """By ordinary stores, one of the places for each thread."""
        self.demand_unused(places)
        super().write(places, values, threads)
        places.set(self.unfenced, threads[:, None])

    def fence(self, mask):
        self.unfenced[np.append(mask, [mask.any(), False])[self.unfenced]] = NOBODY

    def demand_unused(self, places):
        if places.of(self.users).any():
            raise AccessError("overwrites shared memory that a barrier, a product or a copy on its way uses")

    def places_of_units(self, address, what, read):
        """As `places`, of chunks that an asynchronous unit reads or writes."""
        found = self.places(address, CHUNK, what, read)
        threads = found.of(self.unfenced)
        if (threads != NOBODY).any():
            who = "the peer" if (threads == PEER).any() else f"thread {threads.max()}"
            raise AccessError(f"{what} touches what {who} stored without a fence.proxy.async since")
        if not read:
            self.demand_unused(found)
        return found


def swizzled(address, nbytes=ROW):
    """Where chunks of rows of so many bytes lie: bits 4 to 6 are changed by bits 7 to 9; none for 0 bytes."""
    return address ^ (address // ROW % max(1, nbytes // CHUNK) * CHUNK)


class TensorMap:
    """An array for the tensor memory accelerator: what a caller passes for a tensor map."""

    def __init__(self, array, box, swizzle=128):
        self.array, self.box, self.swizzle = array, tuple(box), swizzle
        *outer, last = array.strides
        row = self.box[-1] * array.itemsize
        if last != array.itemsize and array.shape[-1] > 1:
            raise AccessError(f"tensor map: the last axis has stride {last}")
        if any(stride % CHUNK or stride < 0 for stride in outer) or array.ctypes.data % CHUNK:
            raise AccessError(f"tensor map: strides {array.strides} or address are no multiples of {CHUNK}")
        if len(self.box) != array.ndim or not all(1 <= n <= 256 for n in self.box) or row % CHUNK:
            raise AccessError(f"tensor map: no box {self.box} of {array.dtype}")
        if swizzle and row > swizzle:
            raise AccessError(f"tensor map: rows of {row} bytes for a swizzle of {swizzle}")
        if swizzle and row != swizzle:
            raise NotImplementedError("boxes narrower than their swizzle")

    @property
    def nbytes(self):
        """Of a box."""
        return int(np.prod(self.box)) * self.array.itemsize

    def elements(self, start):
        """Offsets of a box's elements, in the order of the box, and which of them are inside of the array.

        start: of the box, along each axis, the last one first, as instructions have it.
        """
        index = np.indices(self.box) + np.reshape(start[::-1], (-1, *[1] * len(self.box)))
        shape, strides = (np.reshape(x, (-1, *[1] * len(self.box))) for x in (self.array.shape, self.array.strides))
        return (index * strides).sum(0).reshape(-1), ((index >= 0) & (index < shape)).all(0).reshape(-1)

    def chunks(self, address):
        """Addresses of a box's chunks in shared memory, in the order of the box."""
        align = 8 * self.swizzle or ROW
        if address % align:
            raise AccessError(f"a box at {address:#x}, which is no multiple of {align}")
        return swizzled(address + np.arange(0, self.nbytes, CHUNK), self.swizzle)
