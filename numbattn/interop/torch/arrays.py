"""Tensors as NumPy and CuPy arrays in the same memory, and back; CuPy on torch's streams and in its memory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ...checks import dtype_of
from ..streams import library, stream_of

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NOWHERE = nullcontext()


def on_device(x: Any) -> Any:
    """Inside, CuPy has torch's device, its current stream there, and its allocator."""
    return on_gpu(x.device.index) if x.is_cuda else NOWHERE


@contextmanager
def on_gpu(device: int) -> Any:
    cuda, stream = library().cuda, stream_of(device, torch._C._cuda_getCurrentRawStream(device))
    with cuda.Device(device), stream, cuda.using_allocator(allocator_of(device)):
        yield


@lru_cache
def allocator_of(device: int) -> Any:
    """Torch's allocator for CuPy."""
    place = torch.device("cuda", device)

    def malloc(nbytes: int) -> Any:
        return pointer_to(torch.empty(nbytes, dtype=torch.uint8, device=place), nbytes, device)

    return malloc


def pointer_to(x: Any, nbytes: int, device: int) -> Any:
    """CuPy's pointer to the memory of a tensor, which it keeps."""
    cuda = library().cuda
    return cuda.MemoryPointer(cuda.UnownedMemory(x.data_ptr(), nbytes, x, device), 0)


def arrays_of(tensors: Iterable[Any]) -> list[Any]:
    """The arrays in the memory of tensors."""
    return [x if x is None else array_of(written(x.detach())) for x in tensors]


def written(x: Any) -> Any:
    """The same, its elements in memory: those of a conjugate's imaginary part are to be negated, and torch's own zeros
    are in none."""
    return x.clone() if x.is_neg() or x._is_zerotensor() else x


def array_of(x: Any) -> Any:
    if x.is_cuda:
        return cupy_array_of(x)
    return x.view(torch.int16).numpy().view(BFLOAT16) if x.dtype is torch.bfloat16 else x.numpy()


def cupy_array_of(x: Any) -> Any:
    """The CuPy array, by address: DLPack, which would wait for streams, takes several times as long."""
    dtype = numpy_dtype(x.dtype)
    strides = tuple([stride * dtype.itemsize for stride in x.stride()])
    nbytes = x.untyped_storage().nbytes() - x.storage_offset() * dtype.itemsize
    return library().ndarray(tuple(x.shape), dtype, pointer_to(x, nbytes, x.device.index), strides)


@lru_cache(None)
def numpy_dtype(dtype: Any) -> Any:
    return dtype_of(torch.empty(0, dtype=dtype))


@lru_cache(None)
def torch_dtype(dtype: Any) -> Any:
    return getattr(torch, str(dtype))


def tensors_of(arrays: Iterable[Any]) -> tuple[Any, ...]:
    """The tensors in the memory of arrays."""
    return tuple([x if x is None else tensor_of(x) for x in arrays])


def tensor_of(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == BFLOAT16 else torch.from_numpy(x)
    memory = getattr(x.data.mem, "_owner", None)
    if not isinstance(memory, torch.Tensor) or memory.dtype is not torch.uint8 or not x.size:
        return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16) if x.dtype == BFLOAT16 else torch.from_dlpack(x)
    first, size = x.data.ptr - x.data.mem.ptr, x.itemsize
    if first or memory.numel() % size:
        memory = memory[first : first + (memory.numel() - first) // size * size]
    return memory.view(torch_dtype(x.dtype)).as_strided(x.shape, [stride // size for stride in x.strides])
