"""Tensors as arrays of NumPy and CuPy in the same memory, and back; CuPy on torch's streams and in its memory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import ml_dtypes
import numpy as np
import torch

from ...checks import dtype_of

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NOWHERE = nullcontext()


def on_device(x: Any) -> Any:
    """Inside, CuPy has torch's device, its current stream there, and its allocator."""
    return on_gpu(x.device) if x.is_cuda else NOWHERE


@contextmanager
def on_gpu(device: Any) -> Any:
    cuda = import_module("cupy").cuda
    stream = stream_of(device.index, torch.cuda.current_stream(device).cuda_stream)

    def malloc(nbytes: int) -> Any:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        ALLOCATED[memory.data_ptr()] = memory
        return pointer_to(memory, nbytes)

    with cuda.Device(device.index), stream, cuda.using_allocator(malloc):
        yield


ALLOCATED: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by address, what CuPy has of torch's allocator


class Borrowed(NamedTuple):
    """A stream of torch's, for CuPy."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


@lru_cache
def stream_of(device: int, address: int) -> Any:
    """CuPy's stream with this address."""
    cuda = import_module("cupy").cuda
    with cuda.Device(device):
        return cuda.Stream.from_external(Borrowed(address)) if address else cuda.Stream.null


def pointer_to(x: Any, nbytes: int) -> Any:
    """CuPy's pointer to the memory of a tensor, which it keeps."""
    cuda = import_module("cupy").cuda
    return cuda.MemoryPointer(cuda.UnownedMemory(x.data_ptr(), nbytes, x, x.device.index), 0)


def arrays_of(tensors: Iterable[Any]) -> list[Any]:
    """The arrays in the memory of tensors."""
    return [x if x is None else array_of(x.detach()) for x in tensors]


def array_of(x: Any) -> Any:
    if x.is_cuda:
        return cupy_array_of(x)
    return x.view(torch.int16).numpy().view(BFLOAT16) if x.dtype is torch.bfloat16 else x.numpy()


def cupy_array_of(x: Any) -> Any:
    """By address: DLPack, which would wait for streams, takes several times as long."""
    cupy, dtype = import_module("cupy"), dtype_of(x)
    strides = tuple([stride * dtype.itemsize for stride in x.stride()])
    nbytes = x.untyped_storage().nbytes() - x.storage_offset() * dtype.itemsize
    return cupy.ndarray(tuple(x.shape), dtype, pointer_to(x, nbytes), strides)


def tensors_of(arrays: Iterable[Any]) -> tuple[Any, ...]:
    """The tensors in the memory of arrays."""
    return tuple([x if x is None else tensor_of(x) for x in arrays])


def tensor_of(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == BFLOAT16 else torch.from_numpy(x)
    memory = ALLOCATED.get(x.data.mem.ptr)
    if memory is None or not x.size:
        return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16) if x.dtype == BFLOAT16 else torch.from_dlpack(x)
    first, size = x.data.ptr - x.data.mem.ptr, x.itemsize
    whole = memory[first : first + (memory.numel() - first) // size * size].view(getattr(torch, str(x.dtype)))
    return whole.as_strided(x.shape, [stride // size for stride in x.strides])
