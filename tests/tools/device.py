"""A device without a GPU: numbattn.cuda.passes on NumPy arrays, its kernels simulated, or compiled and interpreted."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from numba.cuda import types
from numba.cuda.np.numpy_support import as_dtype

from numbattn.cuda import passes
from numbattn.cuda.launch import Device
from numbattn.cuda.views import View

from .launch import launch

HOPPER = Device(0, (9, 0), 132, 227 << 10)
TURING = Device(0, (7, 5), 40, 64 << 10)


@contextmanager
def on(device):
    """Inside, numbattn.cuda.passes takes NumPy arrays and runs its kernels here."""
    cupy = SimpleNamespace(
        empty=poisoned, zeros=np.zeros, asarray=np.asarray, stack=np.stack, broadcast_to=np.broadcast_to
    )  # fmt: skip
    with patch.multiple(
        passes, cupy=cupy, current_device=lambda: device, device_of=lambda array: device.index,
        is_capturing=lambda: False, view_of=view_of, get_kernel=Kernel,
    ):  # fmt: skip
        yield


def poisoned(shape, dtype):
    """Memory that shows if it is read before it is written."""
    return np.full(shape, np.nan if np.dtype(dtype).kind not in "iu" else 0xAA, dtype)


def view_of(array):
    return View(array.ctypes.data, array.itemsize, array.shape, array.strides)


class Kernel:
    def __init__(self, key):
        self.cc, self.source = key.cc, key.source()

    def launch(self, blocks, *arguments):
        """Arguments are put together again as the signature has them."""
        rest, source = iter(arguments), self.source
        arguments = [together(kind, rest) for kind in source.signature.args]
        assert next(rest, None) is None, "there are more arguments than the signature has"
        if blocks:
            launch(source.function, (blocks, 1, 1), source.threads, source.shared, *arguments, cc=self.cc)


def together(kind, rest):
    if isinstance(kind, types.BaseTuple):
        values = [together(part, rest) for part in kind]
        return kind.instance_class(*values) if isinstance(kind, types.BaseNamedTuple) else tuple(values)
    value = next(rest)
    return np.asarray(Memory(value, as_dtype(kind.dtype))) if isinstance(kind, types.Array) else as_dtype(kind).type(value)


class Memory:
    """A View as something NumPy reads."""

    def __init__(self, view, dtype):
        assert dtype.itemsize == view.itemsize
        self.__array_interface__ = {
            "version": 3, "typestr": dtype.str, "shape": view.shape, "strides": view.strides,
            "data": (view.pointer, False),
        }  # fmt: skip
