"""A rank for each GPU, all in this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from itertools import permutations
from typing import Any, NamedTuple

from ..base.checks import integer, library, words_for
from .pieces import ZIGZAG
from .simulated import Simulated

SMALLEST_BLOCK = 1 << 16  # bytes: smaller blocks are faster to make contiguous first
LARGEST_STEP = (1 << 31) - 1  # bytes from one block to the next that a copy takes


class Transfer(NamedTuple):
    """Copies on their way to another device."""

    copies: list[Any]
    arrays: list[Any]  # that are copied, kept alive until then
    done: Any  # an event


class Devices(Simulated):
    """A rank for each GPU, all driven by this process.

    Parameters
    ----------
    devices : list of int
        CuPy's numbers of the GPUs, one for each rank.
    order : "zigzag" or "contiguous", optional
        Whether each rank has an early and a late piece of a sequence, which divides the work of causal masks equally,
        or one piece.

    Raises
    ------
    TypeError, ValueError
        For anything but such numbers or such an order.

    Notes
    -----
    Kernels run on each device's current stream, copies from another device on a stream of their own. The host does not
    wait for a device. Arrays in masks and scores may be NumPy's, or on any device: each call copies them to the others.
    Their gradients are on the same device if it is a rank's, else on the first rank's.

    Examples
    --------
    >>> ring = nad.Devices([0, 1])                                                  # doctest: +SKIP
    >>> o, backprop = nad.attention_vjp(ring, *map(ring.split, (q, k, v)))          # doctest: +SKIP
    """

    _library = "cupy"

    def __init__(self, devices: Sequence[int], order: str = ZIGZAG) -> None:
        import cupy

        if not hasattr(devices, "__len__") or not len(devices):
            raise TypeError(f"devices: got {words_for(devices)}, expected a list of CuPy's numbers of GPUs")
        super().__init__(len(devices), order)
        most = cupy.cuda.runtime.getDeviceCount() - 1
        self.devices, self.cupy = [integer("devices", device, 0, most) for device in devices], cupy
        self.streams = {}
        for device in self.devices:
            with cupy.cuda.Device(device):
                self.streams[device] = cupy.cuda.Stream(non_blocking=True)
        for device, other in permutations(self.streams, 2):
            self._let_reach(device, other)

    def _let_reach(self, device: int, other: int) -> None:
        """Let a device reach another one's memory, if it can: else copies go through the host."""
        runtime = self.cupy.cuda.runtime
        if runtime.deviceCanAccessPeer(device, other):
            with self.cupy.cuda.Device(device), suppress(runtime.CUDARuntimeError):  # raised if it is so already
                runtime.deviceEnablePeerAccess(other)

    def __reduce__(self) -> Any:
        return Devices, (self.devices, self.order)

    def _listed(self, name: str, parts: Any) -> list[Any]:
        listed = super()._listed(name, parts)
        for rank, (x, device) in enumerate(zip(listed, self.devices)):
            if library(x) not in (None, self._library):
                raise TypeError(f"{name}: got {words_for(x)}, expected arrays of {self._library} with Devices")
            if isinstance(x, self.cupy.ndarray) and x.device.id != device:
                raise ValueError(f"{name}: got an array of device {x.device.id} for rank {rank}, expected device "
                                 f"{device}")  # fmt: skip
        return listed

    def _own(self, parts: list[Any]) -> list[Any]:
        return self._together("split", self._spread, parts)

    def _spread(self, parts: list[Any]) -> list[Any]:
        """The parts, each on its rank's device, from another one or from the host."""
        found = []
        for rank, x in enumerate(parts):
            with self._at(rank):
                is_there = isinstance(x, self.cupy.ndarray)
                found.append(self._copied(x, x.device.id, self.devices[rank]) if is_there else self.cupy.asarray(x))
        return found

    def join(self, parts: Any, axis: int = -2) -> Any:
        with self._at(0):
            return super().join(parts, axis)

    def _brought_together(self, parts: list[Any]) -> list[Any]:
        """The parts on the first device."""
        return [self._copied(x, device, self.devices[0]) for x, device in zip(parts, self.devices)]

    def _abandon(self) -> None:
        """Wait for copies that nobody waits for any more: their memory is reused after this."""
        for stream in self.streams.values():
            stream.synchronize()

    def _at(self, rank: int) -> AbstractContextManager[Any]:
        return self.cupy.cuda.Device(self.devices[rank])

    def _near(self, values: list[Any], rank: int) -> list[Any]:
        return [value._mapped(lambda x: self._brought(x, self.devices[rank])) for value in values]

    def _brought(self, x: Any, to: int) -> Any:
        """An array on a device: itself if it is there, or on the host."""
        stays = not isinstance(x, self.cupy.ndarray) or x.device.id == to
        return x if stays else self._copied(x, x.device.id, to)

    def _of_score(self, grads: Any, saved: Any) -> tuple[Any, ...]:
        """The gradients of arrays in the score, each from the rank whose device has the array."""
        weights = [x for part in saved[0].share.given for x in part._weights]
        return tuple(grads[self._rank_of(x)][number] for number, x in enumerate(weights))

    def _rank_of(self, x: Any) -> int:
        """The first rank on an array's device; the first rank of all for an array elsewhere."""
        is_here = isinstance(x, self.cupy.ndarray) and x.device.id in self.devices
        return self.devices.index(x.device.id) if is_here else 0

    def _begun(self, arrays: list[Any], source: int, to: int) -> Transfer:
        return self._sent(arrays, self.devices[source], self.devices[to])

    def _arrived(self, incoming: Transfer, outgoing: Transfer) -> list[Any]:
        for transfer in (incoming, outgoing):  # the memory of what was sent may be reused after this
            self.cupy.cuda.get_current_stream().wait_event(transfer.done)
        return incoming.copies

    def _delivered(self, x: Any, source: int, to: int) -> Any:
        return self._copied(x, self.devices[source], self.devices[to])

    def _copied(self, x: Any, source: int, to: int) -> Any:
        """An array on another device, in the order of both devices' current streams."""
        transfer = self._sent([x], source, to)
        for device in (source, to):
            with self.cupy.cuda.Device(device):
                self.cupy.cuda.get_current_stream().wait_event(transfer.done)
        return transfer.copies[0]

    def _sent(self, arrays: list[Any], source: int, to: int) -> Transfer:
        """Copies on another device's second stream, after the kernels that wrote the arrays or used the memory."""
        cuda, stream = self.cupy.cuda, self.streams[to]
        with cuda.Device(source):
            blocks = [blocks_of(x) for x in arrays]
            packed = [x if own else self.cupy.ascontiguousarray(x) for x, own in zip(arrays, blocks)]
            made = cuda.get_current_stream().record()
        with cuda.Device(to):
            copies = [self.cupy.empty(x.shape, x.dtype) for x in arrays]
            for event in (made, cuda.get_current_stream().record()):
                stream.wait_event(event)
            for copy, x, own in zip(copies, packed, blocks):
                self._copy(copy, x, own, stream)
            return Transfer(copies, packed, stream.record())

    def _copy(self, copy: Any, x: Any, blocks: Blocks | None, stream: Any) -> None:
        if blocks is None:
            copy.data.copy_from_device_async(x.data, x.nbytes, stream)
        else:
            number, nbytes, step = blocks
            places, runtime = (copy.data.ptr, nbytes, x.data.ptr, step), self.cupy.cuda.runtime
            runtime.memcpy2DAsync(*places, nbytes, number, runtime.memcpyDefault, stream.ptr)


class Blocks(NamedTuple):
    """The contiguous blocks of an array, equally far apart in memory."""

    number: int
    nbytes: int
    step: int  # bytes from one to the next


def blocks_of(x: Any) -> Blocks | None:
    """The blocks that a copy engine moves in place; None for an array that is contiguous, or has to be made so."""
    if x.flags.c_contiguous:
        return None
    axes = [(n, stride) for n, stride in zip(x.shape, x.strides) if n > 1]
    nbytes = x.itemsize
    while axes[-1][1] == nbytes:
        nbytes *= axes.pop()[0]
    number, step = axes.pop()
    while axes and axes[-1][1] == number * step:
        number *= axes.pop()[0]
    is_fast = not axes and SMALLEST_BLOCK <= nbytes <= step <= LARGEST_STEP
    return Blocks(number, nbytes, step) if is_fast else None
