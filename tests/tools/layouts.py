"""Arrays that lie as they like, up to the end of their memory."""

import ctypes
import mmap

import numpy as np
from numpy.lib.stride_tricks import as_strided

ODD = 0, 1, 3, -8, 4096, -12345  # strides of axes of length 1, which nobody may use


def guarded(nbytes):
    """Bytes, all of them 255, before a page that nobody may read: who reads beyond their end crashes."""
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)
    memory[:size] = 255
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data + size), mmap.PAGESIZE, 0)
    return memory[size - nbytes : size]


def laid(rng, x, dtypes=(), is_written=False):
    """x in some layout and in one of these dtypes that has its values: axes in any order, backwards, in steps, within
    something wider, and with one element along an axis whose elements are equal; unaligned; read-only. Around its
    elements there is NaN, or -1. is_written: a call writes to it, so that no two elements may share memory."""
    fits = [dtype for dtype in dtypes if np.array_equal(x.astype(dtype).astype(object), x.astype(object))]
    x = x.astype(fits[rng.integers(len(fits))]) if fits else x
    chances = rng.random((5, x.ndim))
    is_same = [n > 1 and chance < 0.8 and not is_written and (x == x.take([0], axis)).all()
               for axis, (n, chance) in enumerate(zip(x.shape, chances[0]))]  # fmt: skip
    own = x[tuple([slice(1 if same else None) for same in is_same])]
    strides, nbytes = [0] * x.ndim, x.itemsize
    for axis in rng.permutation(x.ndim) if rng.random() < 0.5 else reversed(range(x.ndim)):
        step, margin = 1 + (chances[1, axis] < 0.15), 3 * (chances[2, axis] < 0.15)
        strides[axis], nbytes = nbytes * step, nbytes * (own.shape[axis] * step + margin)
    shift = int(rng.integers(x.itemsize)) if rng.random() < 0.1 else 0
    extent = sum((n - 1) * stride for n, stride in zip(own.shape, strides)) + x.itemsize
    memory = guarded(shift + int(extent if x.size else 0))[shift:]
    flipped = tuple([slice(None, None, -1 if chance < 0.2 else None) for chance in chances[3]])
    y = as_strided(memory[: x.itemsize * bool(x.size)].view(x.dtype), own.shape, strides)[(*flipped, ...)]
    y[...] = own
    strides = [0 if same else rng.choice(ODD) if n == 1 and chance < 0.5 else stride
               for same, n, chance, stride in zip(is_same, x.shape, chances[4], y.strides)]  # fmt: skip
    return as_strided(y, x.shape, strides, writeable=is_written or rng.random() < 0.7)
