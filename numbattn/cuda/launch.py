"""Plans on CuPy's current device and stream: the only file that talks to the driver.

    program = current_gpu().load(plan, names, sum_dtype)
    program.launch(addresses, numbers, stream)

A call neither synchronises nor allocates nor copies: it may be captured in a CUDA graph.
"""

import ctypes
import math
import os
import struct
import threading
from contextlib import nullcontext
from ctypes import byref, c_int, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache, partial

import cupy
import numpy as np

from ..base.checks import UserValueError
from .build import build
from .counters import Counters
from .tile.alignment import VECTOR_BYTES
from .views import for_tensor_map
from .words.numbers import NUMBERS
from .words.spec import Device
from .words.steps import At

LARGEST_GRID, LARGEST_OTHER = 2**31 - 1, 65535  # along x; along y and z
USUAL_MEMORY = nullcontext()
PROGRAMS = 4096  # how many a device keeps
WORD = 8  # bytes
FORMATS = {"int32": "i", "uint32": "I", "int64": "q", "uint64": "Q", "float32": "f", "float64": "d"}


# ------------------------------------------------------------------------------------------------------------- device
class GPU:
    """A device, and what all calls on it share."""

    empty = cupy.ndarray  # what cupy.empty calls
    zeros = staticmethod(cupy.zeros)

    def __init__(self, index):
        about = cupy.cuda.runtime.getDeviceProperties(index)
        cc = about["major"], about["minor"]
        self.device = Device(index, cc, about["multiProcessorCount"], about["sharedMemPerBlockOptin"])
        self.index, self.programs, self.lock = index, {}, threading.Lock()
        counters = Counters()
        self.scrap, self.counters = counters.scrap, counters.of

    def addresses(self, arrays):
        """Addresses of arrays by name, which have to lie on this device, and what is odd about any of them."""
        found, odd = [], 0
        for name, x in arrays.items():
            memory = x.data
            if memory.device_id != self.index:
                raise UserValueError(f"{name}: got an array of device {memory.device_id}, expected device "
                                     f"{self.index}, CuPy's current one")
            address = memory.ptr
            odd |= address
            found.append(address)
        return found, odd % VECTOR_BYTES

    def load(self, plan, names, sum_dtype):
        """The Program of a Plan for arrays of these names."""
        return Program(self.index, plan, names, sum_dtype)

    def keep(self, key, program):
        """Among `programs`."""
        with self.lock:
            while len(self.programs) >= PROGRAMS:
                del self.programs[next(iter(self.programs))]
            self.programs[key] = program

    @staticmethod
    def pair(shape, dtype):
        """Two new arrays that share memory: a CUDA graph goes on to write both where one is kept."""
        nbytes = -(-math.prod(shape) * dtype.itemsize // VECTOR_BYTES) * VECTOR_BYTES
        memory = cupy.cuda.alloc(2 * nbytes)
        return cupy.ndarray(shape, dtype, memory), cupy.ndarray(shape, dtype, memory + nbytes)

    @staticmethod
    def temporaries(plan):
        return Temporaries(plan)

    stream = staticmethod(cupy.cuda.get_current_stream)

    @staticmethod
    def scratch_memory(capturing):
        """Allocate a call's own arrays from CuPy's pool, or in a capture from the graph, which keeps them."""
        return cupy.cuda.using_allocator(cupy.cuda.malloc_async) if capturing else USUAL_MEMORY


class Temporaries:
    """Temporary arrays of a Plan, in one block of memory: in calls on small arrays each allocation counts."""

    def __init__(self, plan):
        self.plan, (nbytes, zeros, offsets) = plan, plan.workspace
        self.memory = memory = cupy.cuda.alloc(nbytes)
        if zeros:
            memory.memset_async(0, zeros)
        start = memory.ptr
        self.addresses = [start + offset for offset in offsets]

    @property
    def arrays(self):
        """By name."""
        return {
            name: cupy.ndarray(shape, dtype, self.memory + offset)
            for (name, shape, dtype, _), offset in zip(self.plan.temporaries, self.plan.workspace.offsets)
        }


def current_gpu():
    """The GPU of CuPy's current device."""
    return _gpu(cupy.cuda.runtime.getDevice())


_gpu = lru_cache(GPU)  # if two threads are first, the last GPU stays


# ------------------------------------------------------------------------------------------------------------ kernels
_kernels, _lock = {}, threading.RLock()


def get_kernel(key, device):
    """The LoadedKernel of a Key on a device, built and loaded when first asked for."""
    kernel = _kernels.get((key, device))
    if kernel is None:
        with _lock:
            kernel = _kernels.get((key, device))
            if kernel is None:
                kernel = _kernels[key, device] = LoadedKernel(build(key), device)
    return kernel


class LoadedKernel:
    """A kernel that is loaded."""

    def __init__(self, binary, device):
        self.binary, self.handle, library = binary, c_void_p(), c_void_p()
        call("cuLibraryLoadData", byref(library), binary.cubin, None, None, 0, None, None, 0)
        call("cuLibraryGetKernel", byref(self.handle), library, binary.name.encode())
        if binary.shared:  # more than 48 KB has to be asked for
            try:
                call("cuKernelSetAttribute", MAX_DYNAMIC_SHARED_SIZE_BYTES, binary.shared, self.handle, device)
            except RuntimeError as error:
                raise RuntimeError(f"{binary.name}: {binary.shared} bytes of shared memory: {error}") from None


# ----------------------------------------------------------------------------------------------------------- programs
class Program(threading.local):
    """A Plan, and its launches for arrays of these names and the plan's temporaries: `launch` is that of the Launches
    which each thread has, since each runs the __init__ of a threading.local."""

    def __init__(self, device, plan, names, sum_dtype):
        cupy.cuda.runtime.setDevice(device)  # a thread that has only used a pool's memory has no context yet
        self.plan, self.launch = plan, Launches(device, plan, plan.names(names), sum_dtype).launch


class Launches:
    """The launches of a Plan in one thread, for arrays of these names.

    The driver reads parameters in place: the addresses and numbers of a call are written to `memory`, all others stay
    as they are.
    """

    def __init__(self, device, plan, names, sum_dtype):
        self.names = names
        views = {(x.array, x.view.pointer) for step in plan.steps for x in step.arguments if isinstance(x, At)}
        self.moved = sorted((names.index(name), pointer) for name, pointer in views if pointer)
        count = len(names) + len(self.moved)
        self.words = {(i, 0): i for i in range(len(names))}
        self.words |= {moved: len(names) + i for i, moved in enumerate(self.moved)}
        self.slots, offset = {}, 0
        for name, given in NUMBERS.items():
            kind = np.dtype(sum_dtype if given is float else given).name
            size = struct.calcsize(FORMATS[kind])
            offset += -offset % size
            self.slots[name] = kind, count * WORD + offset
            offset += size
        self.memory = ctypes.create_string_buffer(count * WORD + offset)
        self.addresses = (c_uint64 * count).from_buffer(self.memory)
        layout = struct.Struct("".join(FORMATS[kind] for kind, _ in self.slots.values()))
        self.write_numbers = partial(layout.pack_into, self.memory, count * WORD)
        kernels = [get_kernel(step.key, device) for step in plan.steps]
        self.configs = [Config.of(step.blocks, kernel.binary) for step, kernel in zip(plan.steps, kernels)]
        self.constants, self.tensor_maps, self.stream, self.numbers = [], {}, None, None
        self.calls = [
            (byref(config), kernel.handle, self.parameters_of(step, kernel.binary))
            for config, kernel, step in zip(self.configs, kernels, plan.steps)
        ]
        self.maps, self.launch_kernel = list(self.tensor_maps.values()), driver().cuLaunchKernelEx

    def launch(self, addresses, numbers, stream):
        """Launch all steps on a stream: addresses of the arrays in order, NUMBERS in order, which are written unless
        they are the same object as before."""
        if self.moved:
            addresses += [addresses[i] + pointer for i, pointer in self.moved]
        self.addresses[:] = addresses
        if numbers is not self.numbers:
            self.numbers = None  # in case a signal raises in between
            self.write_numbers(*numbers)
            self.numbers = numbers
        for tensor_map, i in self.maps:
            if tensor_map.address != addresses[i]:
                tensor_map.move(addresses[i])
        if stream != self.stream:
            self.stream = None
            for config in self.configs:
                config.stream = stream
            self.stream = stream
        for config, kernel, parameters in self.calls:
            if result := self.launch_kernel(config, kernel, parameters, None):
                raise_for("cuLaunchKernelEx", result)

    def parameters_of(self, step, binary):
        """Pointers to the parameters of a kernel."""
        found = []
        for i, ((kind, *about), x) in enumerate(zip(binary.arguments, step.arguments, strict=True)):
            if kind == "array":
                found += self.array(f"{binary.name}, argument {i}", x, *about)
            elif kind == "tensor_map":
                found.append(self.tensor_map(x, *about))
            elif isinstance(x, str):
                expected, offset = self.slots[x]
                if kind != expected:
                    raise TypeError(f"{binary.name}, argument {i}: {x} is {expected}, the signature says {kind}")
                found.append(ctypes.addressof(self.memory) + offset)
            else:
                found.append(self.constant(x, kind))
        return (c_void_p * len(found))(*found)

    def array(self, argument, x, ndim, itemsize):
        """An array as Numba's kernels take it: two owners, size, item size, address, shape, strides."""
        view = x.view
        if len(view.shape) != ndim or view.itemsize != itemsize:
            raise TypeError(f"{argument}: got {len(view.shape)} axes of {view.itemsize} bytes, "
                            f"expected {ndim} axes of {itemsize} bytes")
        before, after = (0, 0, math.prod(view.shape), itemsize), (*view.shape, *view.strides)
        address = ctypes.addressof(self.memory) + WORD * self.word_of(x)
        return [*map(self.constant, before), address, *map(self.constant, after)]

    def word_of(self, x):
        """The word of `memory` that has the address of a View."""
        return self.words[self.names.index(x.array), x.view.pointer]

    def constant(self, number, kind="int64"):
        memory = ctypes.create_string_buffer(struct.pack(FORMATS[kind], number), WORD)
        self.constants.append(memory)
        return ctypes.addressof(memory)

    def tensor_map(self, x, *how):
        key = x, *how
        if key not in self.tensor_maps:
            self.tensor_maps[key] = EncodedTensorMap(x.view, *how), self.word_of(x)
        tensor_map, _ = self.tensor_maps[key]
        return tensor_map.pointer.value


class Config(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = (
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
        ("attributes", c_void_p), ("attribute_count", c_uint),
    )  # fmt: skip

    @classmethod
    def of(cls, blocks, binary):
        grid = (blocks, 1, 1) if isinstance(blocks, int) else blocks
        if not 0 < grid[0] <= LARGEST_GRID or not all(0 < count <= LARGEST_OTHER for count in grid[1:]):
            raise ValueError(f"{binary.name}: got {blocks} blocks, allowed 1 to {LARGEST_GRID}, "
                             f"along other axes 1 to {LARGEST_OTHER}")
        overlaps = ctypes.addressof(OVERLAPS) if binary.overlaps else None
        return cls(grid, (binary.threads, 1, 1), binary.shared, None, overlaps, int(binary.overlaps))


class Attribute(ctypes.Structure):
    """CUlaunchAttribute"""

    _fields_ = ("id", c_int), ("padding", c_int), ("value", c_int * 16)


PROGRAMMATIC_STREAM_SERIALIZATION = 6
OVERLAPS = Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,))


# -------------------------------------------------------------------------------------------------------- tensor maps
UNSIGNED = {1: 0, 2: 1, 4: 2, 8: 4}  # CUtensorMapDataType by bytes: only bits are copied; out of bounds is 0
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}


class EncodedTensorMap:
    """A tensor map, passed by value: boxes of a View for the tensor memory accelerator.

    Parameters
    ----------
    view : View
        At most 5 axes, the last one contiguous; the pointer and all other strides multiples of 16 bytes.
    box : tuple of int
        The extent of a box along each axis, 1 to 256.
    swizzle : int, optional
        0, 32, 64 or 128 bytes; a row of the box has no more.
    l2_promotion : int, optional
        0, 64, 128 or 256 bytes, which the L2 cache fetches at once.
    """

    def __init__(self, view, box, swizzle=128, l2_promotion=256):
        self.encoding = for_tensor_map(view), box, swizzle, l2_promotion
        self.memory = ctypes.create_string_buffer(192)  # the tensor map is 128 of these bytes, aligned to 64
        self.pointer = c_void_p(-(-ctypes.addressof(self.memory) // 64) * 64)
        self.address, self.replace = None, driver().cuTensorMapReplaceAddress

    def move(self, address):
        """Move it to memory at another address, in a fraction of the time that a new tensor map takes."""
        known, self.address = self.address, None  # in case a signal raises in between
        if known is None:
            self.encode(address)
        elif result := self.replace(self.pointer, c_void_p(address)):
            raise_for("cuTensorMapReplaceAddress", result)
        self.address = address

    def encode(self, address):
        view, box, swizzle, l2_promotion = self.encoding
        axes = len(view.shape)
        call(
            "cuTensorMapEncodeTiled", self.pointer, UNSIGNED[view.itemsize], axes, c_void_p(address),
            (c_uint64 * axes)(*reversed(view.shape)), (c_uint64 * (axes - 1))(*reversed(view.strides[:-1])),
            (c_uint32 * axes)(*reversed(box)), (c_uint32 * axes)(*[1] * axes), 0, SWIZZLES[swizzle],
            L2_PROMOTIONS[l2_promotion], 0,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- driver
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute


@cache
def driver():
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def call(function, *arguments):
    """Call a function of the driver's."""
    if result := getattr(driver(), function)(*arguments):
        raise_for(function, result)


def raise_for(function, result):
    name = ctypes.c_char_p()
    driver().cuGetErrorName(result, byref(name))
    raise RuntimeError(f"{function}: {name.value.decode() if name.value else result}")
