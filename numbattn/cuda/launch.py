"""Kernels on CuPy's current device and stream: the only file that talks to the driver.

    kernel = get_kernel(Key.of("package.module:factory", cc, head_dim=64))
    kernel.launch(blocks, view_of(q), scale)

A launch neither synchronises nor allocates nor copies: it may be captured in a CUDA graph.
"""

import math
import threading
from functools import lru_cache
from typing import NamedTuple

import cuda.core
import cupy
import numpy as np
from cuda.bindings import driver
from cuda.core._tensor_map import TensorMapL2Promotion, TensorMapSwizzle
from cuda.core.utils import StridedMemoryView

from .build import build
from .views import View, for_tensor_map

LARGEST_GRID = 2**31 - 1  # along x, the only axis used: y and z end at 65535
SWIZZLES = {
    0: TensorMapSwizzle.NONE,
    32: TensorMapSwizzle.SWIZZLE_32B,
    64: TensorMapSwizzle.SWIZZLE_64B,
    128: TensorMapSwizzle.SWIZZLE_128B,
}


class Device(NamedTuple):
    """What a plan needs to know of a GPU."""

    index: int
    cc: tuple  # (major, minor)
    multiprocessors: int
    shared: int  # bytes of shared memory that a block may have


def current_device():
    """The Device that is CuPy's current one."""
    return _device(cupy.cuda.runtime.getDevice())


@lru_cache
def _device(index):
    about = cupy.cuda.runtime.getDeviceProperties(index)
    cc = about["major"], about["minor"]
    return Device(index, cc, about["multiProcessorCount"], about["sharedMemPerBlockOptin"])


def device_of(array):
    """The index of the device that a CuPy array lies on."""
    return array.data.device_id


def is_capturing():
    """Whether CuPy's current stream records a CUDA graph."""
    return cupy.cuda.get_current_stream().is_capturing()


def pointer_of(array):
    """The address of a CuPy array."""
    return array.data.ptr


def view_of(array):
    """The View of a CuPy array."""
    return View(array.data.ptr, array.itemsize, array.shape, array.strides)


# ------------------------------------------------------------------------------------------------------------- launch
_kernels, _lock = {}, threading.Lock()


def get_kernel(key):
    """The Kernel of a Key on the current device, built and loaded when first asked for."""
    device = cupy.cuda.runtime.getDevice()
    kernel = _kernels.get((key, device))
    if kernel is None:
        with _lock:
            kernel = _kernels.get((key, device))
            if kernel is None:
                kernel = _kernels[key, device] = Kernel(build(key), device)
    return kernel


class Kernel:
    """A kernel that is loaded on one device."""

    def __init__(self, binary, device):
        _make_current(device)
        self.binary = binary
        self._kernel = cuda.core.ObjectCode.from_cubin(binary.cubin).get_kernel(binary.name)
        if binary.shared:  # more than 48 KB has to be asked for
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            device = driver.CUdevice(device)
            (result,) = driver.cuKernelSetAttribute(attribute, binary.shared, self._kernel.handle, device)
            if result != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"{binary.name}: {binary.shared} bytes of shared memory in a block: {result.name}")

    def launch(self, blocks, *arguments):
        """Start `blocks` blocks on CuPy's current stream. No blocks are no launch.

        Parameters
        ----------
        blocks : int
            0 <= blocks < 2**31
        *arguments
            As in the kernel's signature: a `View` for an array or a tensor map, a number for a scalar. An array that
            the signature declares contiguous has to be; the caller sees to it that views belong to this device.
        """
        wanted = len(self.binary.arguments)
        if len(arguments) != wanted:
            raise TypeError(f"{self.binary.name}: got {len(arguments)} arguments, expected {wanted}")
        views = [x for x in arguments if isinstance(x, View)]
        self.prepare(blocks, views)([0] * len(views), [x for x in arguments if not isinstance(x, View)])

    def prepare(self, blocks, views):
        """A launch with all but its addresses and numbers: launch(addresses, numbers).

        addresses : of the arrays, to which the pointers of their Views are added
        numbers : the other arguments
        """
        if not 0 <= blocks <= LARGEST_GRID:
            raise ValueError(f"{self.binary.name}: got {blocks} blocks, allowed 0 to {LARGEST_GRID}")
        name, views = self.binary.name, iter(views)
        template, pointers, scalars = [], [], []
        for i, (kind, *about) in enumerate(self.binary.arguments):
            if kind == "array":
                view = next(views)
                pointers.append((len(template) + 4, view.pointer.__add__))
                template += _array_parameters(name, i, view, *about)
            elif kind == "tensor_map":
                pointers.append((len(template), TensorMaps(next(views), *about).at))
                template.append(None)
            else:
                scalars.append((len(template), getattr(np, kind)))  # NumPy refuses integers that do not fit
                template.append(None)
        config = cuda.core.LaunchConfig(
            grid=max(blocks, 1), block=self.binary.threads, shmem_size=self.binary.shared,
            programmatic_stream_serialization=self.binary.overlaps,
        )  # fmt: skip

        lock = threading.Lock()  # until its tensor maps are copied into a launch, they are not to be used for another

        @lru_cache(maxsize=64)
        def with_numbers(*numbers):  # most calls come with those of the call before
            parameters = template.copy()
            for (at, convert), number in zip(scalars, numbers, strict=True):
                parameters[at] = convert(number)
            return parameters

        def launch(addresses, numbers):
            parameters = with_numbers(*numbers).copy()
            if not hasattr(_thread, "ready"):
                _make_current(cupy.cuda.runtime.getDevice())
            with lock:
                for (at, parameter), address in zip(pointers, addresses, strict=True):
                    parameters[at] = parameter(address)
                cuda.core.launch(_stream(cupy.cuda.get_current_stream().ptr), config, self._kernel, *parameters)

        return launch if blocks else _no_launch


def _array_parameters(name, i, view, ndim, itemsize):
    """What an array is to a kernel of Numba's: two owners, size, size of an item, address, shape, strides."""
    if len(view.shape) != ndim or view.itemsize != itemsize:
        raise TypeError(f"{name}: got {len(view.shape)} axes of {view.itemsize} bytes as argument {i}, "
                        f"expected {ndim} axes of {itemsize} bytes")
    return 0, 0, math.prod(view.shape), itemsize, None, *view.shape, *view.strides


def _no_launch(addresses, numbers):
    """No blocks."""


@lru_cache
def _stream(pointer):
    return cuda.core.Stream.from_handle(pointer)


_thread = threading.local()


def _make_current(device):
    """A thread that has only used memory out of CuPy's pool has no context yet: give it the device's primary one."""
    result, context = driver.cuCtxGetCurrent()
    if result != driver.CUresult.CUDA_SUCCESS or not int(context):
        cuda.core.Device(device).set_current()
    _thread.ready = True


# -------------------------------------------------------------------------------------------------------- tensor maps
class TensorMaps:
    """The tensor maps of a View whose pointer counts from an address, by address.

    To give one that has long been unused a new address takes a fourth of the time that it takes to make one.
    """

    KEPT = 16

    def __init__(self, view, box, swizzle):
        self.view, self.box, self.swizzle, self.found = for_tensor_map(view), box, swizzle, {}

    def at(self, address):
        found = self.found.pop(address, None)
        if found is None:
            view = self.view._replace(pointer=address + self.view.pointer)
            if len(self.found) < self.KEPT:
                found = tensor_map(view, self.box, self.swizzle)
            else:
                found = self.found.pop(next(iter(self.found)))
                found.replace_address(_Memory(view))
        self.found[address] = found  # the last one: the first has been unused for longest
        return found


def tensor_map(view, box, swizzle=128):
    """A tensor map: boxes of a View for the tensor memory accelerator, to pass to a kernel by value.

    Parameters
    ----------
    view : View
        At most 5 axes, the last one contiguous; the pointer and all other strides multiples of 16 bytes.
    box : tuple of int
        The extent of a box along each axis, 1 to 256.
    swizzle : int, optional
        0, 32, 64 or 128 bytes; a row of the box has no more.
    """
    return StridedMemoryView.from_cuda_array_interface(_Memory(view), stream_ptr=-1).as_tensor_map(
        box, swizzle=SWIZZLES[swizzle], l2_promotion=TensorMapL2Promotion.L2_256B
    )


class _Memory:
    """A View as something cuda.core reads. A tensor map refers to what it was made of: from an array, it would keep the
    array's memory for as long as it is cached."""

    def __init__(self, view):
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": view.shape,
            "typestr": f"<u{view.itemsize}",  # bits are bits: what lies outside becomes 0 either way
            "data": (view.pointer, False),
            "strides": view.strides,
            "stream": None,
        }
