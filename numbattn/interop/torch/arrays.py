"""Tensors as NumPy and CuPy arrays in the same memory, and back; CuPy on torch's streams and in its memory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.utils.dlpack import to_dlpack

from ...base import teams
from ...base.checks import dtype_of, words_for
from ...call.problem import refuse_cache
from ..streams import library, stream_of

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ON_CPU = teams.OnThreadsOf(teams.of_torch)
TENSORS = {torch.Tensor, torch.nn.Parameter}  # whose memory is their own


def on_device(x: Any) -> Any:
    """Inside, CPU kernels run on torch's threads, and CuPy has torch's device, its current stream there, and its
    allocator."""
    return on_gpu(x.device.index) if x.is_cuda else ON_CPU


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
    return [x if x is None else array_of(x) for x in tensors]


def array_of(x: Any) -> Any:
    """The array in the memory of a tensor; in new memory where a conjugate's imaginary part is to be negated, and for
    torch's own zeros, which are in none."""
    if x.is_neg() or x._is_zerotensor():
        x = x.detach().clone()
    if x.is_cuda:
        return cupy_array_of(x)
    if x.dtype is torch.bfloat16:
        return array_of(x.detach().view(torch.int16)).view(BFLOAT16)
    if type(x) not in TENSORS or x.layout is not torch.strided or numpy_dtype(x.dtype).hasobject:
        return x.detach().numpy()  # or torch's own error
    return np.from_dlpack(Lent(x))


class Lent:
    """A tensor for NumPy. After `x.numpy()` its storage could never be resized, and Python's part of DLPack is slow."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return to_dlpack(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


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


def check(**tensors: Any) -> None:
    """Refuse what is no tensor, and tensors that are no array of numbers in memory."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            refuse_cache(x)
            raise TypeError(f"{name}: got {words_for(x)}, expected a torch.Tensor")
        if not (x.is_cpu or x.is_cuda):
            raise TypeError(f"{name}: got a tensor on the device {x.device}, expected one of a CPU or of CUDA")
        if x.is_nested:
            raise TypeError(f"{name}: got a nested tensor, expected a dense one: pass {name}.values(), and "
                            f"mask=numbattn.Segments({name}.offsets()) for jagged ones")  # fmt: skip
        if x.layout is not torch.strided:
            raise TypeError(f"{name}: got a tensor of the layout {x.layout}, expected a dense one: "
                            f"pass {name}.to_dense()")  # fmt: skip
