"""A rank a GPU, all in this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..checks import integer
from .pieces import ZIGZAG
from .simulated import Simulated


class Devices(Simulated):
    """A rank a GPU, all of them driven by this process.

    Parameters
    ----------
    devices : list of int
        CuPy's numbers of the GPUs, one for each rank.
    order : "zigzag" or "contiguous", optional
        Whether each rank has an early and a late piece of a sequence, which shares out the work of causal masks
        equally, or one piece.

    Raises
    ------
    TypeError, ValueError
        For what are no such numbers, or no such order.

    Notes
    -----
    Everything happens on each device's current stream. Nothing waits for a device on the host.

    Examples
    --------
    >>> ring = nad.Devices([0, 1])                                                  # doctest: +SKIP
    >>> o, backprop = nad.attention_vjp(ring, *map(ring.split, (q, k, v)))          # doctest: +SKIP
    """

    def __init__(self, devices: Sequence[int], order: str = ZIGZAG) -> None:
        import cupy

        super().__init__(len(devices), order)
        self.devices, self.cupy = [integer("devices", device, low=0) for device in devices], cupy

    def _own(self, parts: list[Any]) -> list[Any]:
        """Each on its device, from another one or from the host."""
        found = []
        for rank, x in enumerate(parts):
            with self._at(rank):
                is_there = isinstance(x, self.cupy.ndarray)
                found.append(self._copied(x, x.device.id, self.devices[rank]) if is_there else self.cupy.asarray(x))
        return found

    def join(self, parts: Any, axis: int = -2) -> Any:
        with self._at(0):
            return super().join(parts, axis)

    def _all(self, parts: Any) -> list[Any]:
        """On the first device."""
        listed = zip(super()._all(parts), self.devices)
        return [self._copied(x, device, self.devices[0]) for x, device in listed]

    def _at(self, rank: int) -> AbstractContextManager[Any]:
        return self.cupy.cuda.Device(self.devices[rank])

    def _delivered(self, x: Any, source: int, to: int) -> Any:
        return self._copied(x, self.devices[source], self.devices[to])

    def _copied(self, x: Any, source: int, to: int) -> Any:
        """An array on another device, in the order of both devices' streams."""
        cuda = self.cupy.cuda
        with cuda.Device(source) as device:
            x = self.cupy.ascontiguousarray(x)
            ready = cuda.get_current_stream().record()
        with cuda.Device(to):
            stream = cuda.get_current_stream()
            stream.wait_event(ready)
            copy = self.cupy.empty(x.shape, x.dtype)
            copy.data.copy_from_device_async(x.data, x.nbytes, stream)
            copied = stream.record()
        with device:
            cuda.get_current_stream().wait_event(copied)    # before the memory of x has another use
        return copy
