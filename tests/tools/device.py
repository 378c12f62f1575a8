"""A device without a GPU: the CUDA kernels on NumPy arrays, simulated, or compiled and interpreted."""

import re
import zlib
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from itertools import count
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np

from numbattn.base import backends, cache
from numbattn.call.passes import ARRAYS
from numbattn.cuda.build import GivenSource, compile_ptx, digest_of
from numbattn.cuda.compiler import as_dtype, types
from numbattn.cuda.kernels import LARGE_BACKWARD, LARGE_FORWARD
from numbattn.cuda.passes import Passes
from numbattn.cuda.plan.planner import DEVICES
from numbattn.cuda.tile import INDEX, simulate
from numbattn.cuda.tile.alignment import VECTOR_BYTES, ArrayLayout, alignment
from numbattn.cuda.views import fits_tensor_map, for_tensor_map
from numbattn.cuda.words.numbers import NUMBERS
from numbattn.cuda.words.steps import SCRAP_BYTES, At

from . import ptx
from .launch import simulated
from .ptx import interpret

HOPPER, AMPERE, TURING = DEVICES[9, 0], DEVICES[8, 0], DEVICES[7, 5]
BY_UNIT = {"CUDA cores": TURING, "tensor cores": AMPERE, "warpgroups": HOPPER}
MATRICES = {*ARRAYS, "c"}
ACCESS = re.compile(r"(ld|st|atom|red)\.\S*global|cp\.async")


def execute(key, source, grid, *arguments):
    """A kernel in the world of the test."""
    if simulated():
        simulate(source.function, grid, source.threads, source.shared, *arguments, cluster=source.cluster)
    else:
        interpret(compiled(key), grid, source.threads, source.shared, *arguments)


@contextmanager
def on(device, execute=execute, small=False):
    """Inside, numbattn takes NumPy arrays for a device's and runs the CUDA kernels here, or has others execute them.

    small: whether small matrices have kernels of their own, as they have on a device that is there. Else those for
    matrices of any size take these, too: a test needs few elements.
    """
    gpu, routes = GPU(device, execute), {} if small else {"forward": LARGE_FORWARD, "backward": LARGE_BACKWARD}
    with patch.dict(backends.BACKENDS, numpy=Passes(lambda: gpu, **routes)):
        yield gpu
    assert not gpu.counts.any(), "a kernel has left counters that are not 0"


@contextmanager
def planned(device):
    """Inside, calls on NumPy arrays are planned as for a device's, and no more: their results are 0. Yields the keys of
    their kernels."""
    keys = {}

    def load(plan, names, sum_dtype):
        keys.update({step.key: None for step in plan.steps})
        return Program(plan._replace(steps=()), names, None)

    with on(device, small=True) as gpu:
        gpu.empty, gpu.load = gpu.zeros, load
        yield keys


class GPU:
    """What numbattn.cuda.launch.GPU is on a GPU."""

    zeros = staticmethod(np.zeros)

    def __init__(self, device, execute=execute):
        self.device, self.execute, self.programs = device, execute, {}
        self.keep = self.programs.__setitem__
        self.counts, self.memory = np.zeros(2, np.uint32), np.zeros(SCRAP_BYTES, np.uint8)
        self.scrap = self.memory.ctypes.data

    @staticmethod
    def empty(shape, dtype):
        """Memory that shows if it is read before it is written."""
        return np.full(shape, np.nan if np.dtype(dtype).kind not in "iu" else 0xAA, dtype)

    def pair(self, shape, dtype):
        return self.empty(shape, dtype), self.empty(shape, dtype)

    @staticmethod
    def addresses(arrays):
        found = [x.ctypes.data for x in arrays.values()]
        return found, any(address % VECTOR_BYTES for address in found)

    def temporaries(self, plan):
        """An array each: what reads or writes beyond one shows."""
        arrays = {x.name: (self.zeros if x.is_zero else self.empty)(x.shape, x.dtype) for x in plan.temporaries}
        return SimpleNamespace(arrays=arrays, addresses=self.addresses(arrays)[0])

    def counters(self, stream, capturing):
        return self.counts.ctypes.data

    def stream(self):
        return SimpleNamespace(ptr=0, is_capturing=lambda: False, synchronize=lambda: None)

    def scratch_memory(self, capturing):
        return nullcontext()

    def load(self, plan, names, sum_dtype):
        for step in plan.steps if self.execute is execute and not simulated() else ():
            compiled(step.key)                                  # where a GPU does it, too
        return Program(plan, names, self.execute)


class Program:
    def __init__(self, plan, names, execute):
        self.plan, self.names, self.execute = plan, plan.names(names), execute

    def launch(self, addresses, numbers, stream):
        addresses, numbers = (dict(zip(*x, strict=True)) for x in ((self.names, addresses), (NUMBERS, numbers)))
        for step in self.plan.steps:
            run(step, addresses, numbers, self.execute)


def run(step, addresses, numbers, execute):
    """A step, its arguments put together again as the signature has them."""
    source, given, numbered = step.key.source(), iter(step.arguments), count()
    promised = dict(getattr(step.key, "parameters", ())).get("nbytes", 0)
    tensor_maps = {found.argument: found for found in source.tensor_maps}

    def view():
        at = next(given)
        assert isinstance(at, At)
        found = at.view._replace(pointer=at.view.pointer + addresses[at.array])
        if at.array in MATRICES and len(found.shape) == 4:      # what is promised holds for each of them
            held = alignment(layout_of(found))
            assert held >= promised, f"{step.key.name}: {promised} bytes are promised of {at.array}, {held} are held"
        return found

    def argument(kind):
        if isinstance(kind, types.BaseTuple):
            values = [argument(part) for part in kind]
            return kind.instance_class(*values) if isinstance(kind, types.BaseNamedTuple) else tuple(values)
        tensor_map = tensor_maps.get(next(numbered))
        if tensor_map:
            return mapped(view(), tensor_map)
        if isinstance(kind, types.Array):
            array = np.asarray(Memory(view(), as_dtype(kind.dtype)))
            assert array.ndim == kind.ndim, f"{step.key.name}: got {array.ndim} axes, expected {kind.ndim}"
            return array
        number = next(given)
        dtype = np.int32 if kind == INDEX else as_dtype(kind).type
        return dtype(numbers[number] if isinstance(number, str) else number)

    arguments = [argument(kind) for kind in source.signature.args]
    assert next(given, None) is None, "there are more arguments than the signature has"
    grid = (step.blocks, 1, 1) if isinstance(step.blocks, int) else step.blocks
    assert min(grid) > 0, f"{step.key.name}: got {grid} blocks"  # as a GPU does
    execute(step.key, source, grid, *arguments)


@lru_cache(maxsize=8)  # of 20 MB each
def compiled(key):
    source = key.source()
    text = kept_ptx(key, source)
    if source.overlaps and key.cc >= (9, 0):
        before, waits, _ = text.partition("griddepcontrol.wait")
        assert waits, f"{key} does not wait for the kernel before it"
        assert not ACCESS.search(before), f"{key} does not wait for the kernel before it"
    return ptx.Kernel(text)


def kept_ptx(key, source):
    """The PTX of a Key. It is kept on disk as binaries are: workers share it, and runs while no source changes."""
    if isinstance(key, GivenSource):
        return compile_ptx(source, key.cc)
    name = digest_of(key)
    kept = cache.read("ptx", name)
    if kept is None:
        kept = cache.Entry({}, zlib.compress(compile_ptx(source, key.cc).encode(), 1))
        cache.write("ptx", name, *kept)
    return zlib.decompress(kept.code).decode()


def mapped(view, tensor_map):
    """What a tensor map is here; its bits are the kernel's to name."""
    view = for_tensor_map(view)
    assert fits_tensor_map(layout_of(view)), f"TMA cannot move {view}"
    array = np.asarray(Memory(view, np.dtype(f"u{view.itemsize}")))
    return array if simulated() else ptx.TensorMap(array, tensor_map.box, tensor_map.swizzle)


def layout_of(view):
    return ArrayLayout(view.shape, view.strides, np.dtype(f"u{view.itemsize}"), view.pointer)


class Memory:
    """A View as something NumPy reads."""

    def __init__(self, view, dtype):
        assert dtype.itemsize == view.itemsize
        self.__array_interface__ = {
            "version": 3, "typestr": dtype.str, "shape": view.shape, "strides": view.strides,
            "data": (view.pointer, False),
        }  # fmt: skip
