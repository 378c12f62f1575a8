"""CuPy on the streams of frameworks."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple


@lru_cache(None)
def library() -> Any:
    """CuPy, imported only when an array is on a GPU."""
    return import_module("cupy")


class Borrowed(NamedTuple):
    """A framework's stream, for CuPy."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


@lru_cache
def stream_of(device: int, address: int) -> Any:
    """CuPy's stream with this address."""
    cuda = library().cuda
    with cuda.Device(device):
        return cuda.Stream.from_external(Borrowed(address)) if address else cuda.Stream.null
