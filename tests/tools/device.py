"""A device without a GPU: numbattn.cuda.passes on NumPy arrays, its kernels simulated, or compiled and interpreted."""

from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from numba.cuda import types
from numba.cuda.np.numpy_support import as_dtype

from numbattn import api
from numbattn.cuda import passes
from numbattn.cuda.build import compile_ptx
from numbattn.cuda.launch import Device
from numbattn.cuda.tile import SIMULATED, simulate
from numbattn.cuda.views import for_tensor_map

from . import ptx
from .ptx import interpret

HOPPER = Device(0, (9, 0), 132, 227 << 10)
TURING = Device(0, (7, 5), 40, 64 << 10)


@contextmanager
def on(device):
    """Inside, numbattn takes NumPy arrays for CuPy's and runs the CUDA kernels here."""
    cupy = SimpleNamespace(
        empty=poisoned, zeros=np.zeros, asarray=np.asarray, stack=np.stack, broadcast_to=np.broadcast_to
    )  # fmt: skip
    counts = np.zeros(2, np.uint32)
    with patch.object(api, "_backend", lambda problem: passes), patch.multiple(
        passes, cupy=cupy, current_device=lambda: device, device_of=lambda array: device.index,
        counters=lambda index, capturing: counts.ctypes.data, is_capturing=lambda: False,
        pointer_of=lambda array: array.ctypes.data, get_kernel=Kernel,
    ):  # fmt: skip
        forget()
        try:
            yield
            assert not counts.any(), "a kernel has left counters behind that are not 0"
        finally:
            forget()


def poisoned(shape, dtype):
    """Memory that shows if it is read before it is written."""
    return np.full(shape, np.nan if np.dtype(dtype).kind not in "iu" else 0xAA, dtype)


def forget():
    """Launches are prepared for a device by its numbers: none of ours is to be used on a real one."""
    passes._launches.cache_clear()
    passes._delta_launches.cache_clear()


class Kernel:
    def __init__(self, key):
        self.key, self.source = key, key.source()

    def prepare(self, blocks, views):
        """Arguments are put together again as the signature has them."""
        source = self.source
        tensor_maps = {found.argument: found for found in source.tensor_maps}

        def start(addresses, numbers):
            moved = (view._replace(pointer=view.pointer + at) for view, at in zip(views, addresses, strict=True))
            numbers = iter(numbers)
            arguments = [
                mapped(next(moved), tensor_maps[i]) if i in tensor_maps else together(kind, moved, numbers)
                for i, kind in enumerate(source.signature.args)
            ]
            assert next(numbers, None) is None, "there are more numbers than the signature has"
            if not blocks:
                return
            if SIMULATED:
                simulate(source.function, (blocks, 1, 1), source.threads, source.shared, *arguments)
            else:
                interpret(compiled(self.key), (blocks, 1, 1), source.threads, source.shared, *arguments)

        return start


@lru_cache(maxsize=64)
def compiled(key):
    return ptx.Kernel(compile_ptx(key.source(), key.cc))


def mapped(view, tensor_map):
    """What a tensor map is here; its bits are the kernel's to name."""
    array = np.asarray(Memory(for_tensor_map(view), np.dtype(f"u{view.itemsize}")))
    return array if SIMULATED else ptx.TensorMap(array, tensor_map.box, tensor_map.swizzle)


def together(kind, views, numbers):
    if isinstance(kind, types.BaseTuple):
        values = [together(part, views, numbers) for part in kind]
        return kind.instance_class(*values) if isinstance(kind, types.BaseNamedTuple) else tuple(values)
    if isinstance(kind, types.Array):
        return np.asarray(Memory(next(views), as_dtype(kind.dtype)))
    return as_dtype(kind).type(next(numbers))


class Memory:
    """A View as something NumPy reads."""

    def __init__(self, view, dtype):
        assert dtype.itemsize == view.itemsize
        self.__array_interface__ = {
            "version": 3, "typestr": dtype.str, "shape": view.shape, "strides": view.strides,
            "data": (view.pointer, False),
        }  # fmt: skip
