"""Kernels of your own in the tile language: `launch` runs one on CuPy arrays, or simulates it on NumPy arrays."""

import dis
from functools import cache, lru_cache, wraps
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from ..base.checks import words_for
from ..scores.element import Identity
from . import tile
from .build import GivenSource, Source, TensorMapArgument, check_plain
from .compiler import from_dtype, types
from .tile import INDEX, bfloat16, simulate
from .tile.alignment import layout_of
from .tile.boxes import Place
from .tile.layout import Layout
from .tile.pipeline import Pipeline
from .views import View, fits_tensor_map
from .words.numbers import NUMBERS
from .words.steps import At, Plan, Step

NO_NUMBERS = [0] * len(NUMBERS)


class TensorMap(NamedTuple):
    """An argument of `launch` whose tiles a kernel moves by TMA, in boxes of this extent: see `tile.tma_load`.

    The box is that of the tiles in shared memory, ``tile.box``. The array's rows start at multiples of 16 bytes.
    """

    array: Any
    box: tuple
    swizzle: int = 128


class FromCall:
    """A number that comes with each call, by its name in NUMBERS, in place of an argument of a Step."""

    def __init__(self, given: str, dtype: Any) -> None:
        self.given, self.dtype = given, dtype


def launch(kernel: Any, grid: Any, threads: int, shared_bytes: int, *arguments: Any) -> None:
    """Run a kernel: compiled, on CuPy's current device and stream, or simulated, if all arrays are NumPy's.

    Nothing waits for the GPU. Compiled in are the kernel, what it captures, and the dtypes and numbers of axes of its
    arguments; the binary is kept on disk.

    Parameters
    ----------
    kernel : function
        In the words of `numbattn.cuda.tile`.
    grid : int, or tuple of up to three
        Number of blocks along each axis, see `tile.block_index`.
    threads : int
        In a block, 1 to 1024.
    shared_bytes : int
        Dynamic shared memory of a block, ``SharedMemory().nbytes``.
    arguments : arrays, TensorMap, numbers, tuples of arrays and numbers
        Arrays of any strides; bfloat16 is that of ml_dtypes.

    Raises
    ------
    TypeError
        For NumPy arrays together with CuPy arrays, or an argument that kernels do not take.
    ValueError
        For an array on another device, a TensorMap of an array that TMA cannot move, a grid or threads out of range,
        fewer threads than a layout has, or less shared memory than its places take.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn.cuda.kernel import launch
    >>> from numbattn.cuda.tile import block_index, load, save, simt
    >>> TILE = simt(8, 16, 32, 4, 1)                        # 8 x 16 elements in a block of 32 threads
    >>> def double(x, y):
    ...     save(y, 2 * load(x, TILE, 8 * block_index()), 8 * block_index())
    >>> x = np.ones((16, 16), np.float32)
    >>> y = np.zeros_like(x)
    >>> launch(double, 2, TILE.threads, 0, x, y)
    >>> float(y.min()), float(y.max())
    (2.0, 2.0)
    """
    grid, described = padded(grid), Described.of(arguments)
    libraries = {type(x).__module__.partition(".")[0] for x in described.arrays.values()}
    if libraries == {"cupy"}:
        from .launch import current_gpu

        run(current_gpu(), kernel, grid, threads, shared_bytes, arguments, described)
    elif libraries == {"numpy"}:
        check_launch(kernel, grid, threads, shared_bytes)
        simulate(kernel, grid, threads, shared_bytes, *map(_array, arguments))
    else:
        raise TypeError(f"arguments: got arrays of {', '.join(sorted(libraries))}, expected all of NumPy or all of "
                        "CuPy")


def check_launch(kernel, grid, threads, shared_bytes):
    if len(grid) > 3 or min(grid) < 1:
        raise ValueError(f"grid: got {grid}, expected at least one block along each of up to three axes")
    if not 1 <= threads <= 1024:
        raise ValueError(f"threads: got {threads}, expected 1 to 1024")
    if isinstance(kernel, FunctionType):
        check_block(kernel, threads, shared_bytes)


def padded(grid):
    """A grid along all three axes."""
    return (grid, 1, 1) if isinstance(grid, int) else (*grid, *(1,) * (3 - len(grid)))


@lru_cache(maxsize=1024)
def check_block(kernel, threads, shared_bytes):
    """Refuse a block that is too small for the layouts and places that a kernel captures."""
    for x in captured(kernel, set()):
        if isinstance(x, Layout) and x.holders > threads:
            raise ValueError(f"threads: got {threads}, expected {x.holders} or more, to which the layout "
                             f"{x} deals a tile")
        if isinstance(x, Place | Pipeline) and x.end > shared_bytes:
            raise ValueError(f"shared_bytes: got {shared_bytes}, expected {x.end} or more, where {x} ends")


def captured(function, known):
    """What a kernel refers to, and its device functions in turn, except the words of the language."""
    known.add(function)
    code, around = function.__code__, function.__globals__
    names = {x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL"}
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    for x in _flat([*cells, *[around[name] for name in names if name in around]]):
        if not isinstance(x, FunctionType):
            yield x
        elif x not in known and not x.__module__.startswith(tile.__name__):
            yield from captured(x, known)


class Described(NamedTuple):
    """Arguments of a launch."""

    about: tuple  # what a Program depends on in each of them
    arrays: dict  # by name
    moved: bool  # whether TMA moves tiles of any

    @classmethod
    def of(cls, arguments):
        kinds, arrays = [], {}
        about = tuple([described(x, kinds, arrays) for x in arguments])
        return cls(about, arrays, TensorMap in kinds)


def described(x, kinds, arrays):
    """What a Program depends on in an argument, whose kind, or those of its parts, and arrays by name are added to
    these: in one walk, for which each launch on a GPU waits."""
    kind = type(x)
    if isinstance(x, tuple) and kind is not TensorMap:
        return kind, *[described(part, kinds, arrays) for part in x]
    name, box = f"argument {len(kinds)}", ()
    kinds.append(kind)
    if is_number(x):
        return kind, x
    if kind is TensorMap:
        x, *box = x
    if not hasattr(x, "strides"):
        raise TypeError(f"{name}: got {words_for(x)}, expected an array, a number or a tuple of these")
    arrays[name] = x
    return kind, *box, x.shape, x.strides, x.dtype


def run(gpu, kernel, grid, threads, shared_bytes, arguments, known=None):
    """`launch` on a launch.GPU. known: the Described of the arguments, if there is one."""
    about, arrays, moved = known or Described.of(arguments)
    addresses, odd = gpu.addresses(arrays)
    if odd and moved:
        raise ValueError("TensorMap: got arrays at addresses that are no multiples of 16 bytes")
    key = kernel, grid, threads, shared_bytes, about
    program = gpu.programs.get(key)
    if program is None:
        check_launch(kernel, grid, threads, shared_bytes)
        program = loaded(gpu, kernel, grid, threads, shared_bytes, arguments)
        gpu.keep(key, program)
    program.launch([*addresses, gpu.scrap], NO_NUMBERS, gpu.stream().ptr)


def loaded(gpu, kernel, grid, threads, shared_bytes, arguments):
    """A Program for arrays like these, whose addresses it takes, and for these numbers."""
    names = [f"argument {i}" for i, x in enumerate(_flat(arguments)) if not is_number(x)]
    plan = plan_of(gpu.device, kernel, grid, threads, shared_bytes, arguments)
    return gpu.load(plan, tuple(names), np.float32)


def plan_of(device, kernel, grid, threads, shared_bytes, arguments):
    """A Plan of one step."""
    flat = [*_flat(arguments)]
    maps = tuple(TensorMapArgument(i, x.box, x.swizzle) for i, x in enumerate(flat) if isinstance(x, TensorMap))
    for x in flat:
        if isinstance(x, TensorMap) and not fits_tensor_map(layout_of(x.array, 0)):
            raise ValueError(f"TensorMap: got an array of shape {x.array.shape} and strides {x.array.strides}, "
                             "expected contiguous rows that start at multiples of 16 bytes")
    given = tuple(x if is_number(x) else At(f"argument {i}", _view(_array(x))) for i, x in enumerate(flat))
    step = step_of(device, kernel, grid, threads, shared_bytes, map(type_of, arguments), given, tensor_maps=maps)
    return Plan((), (), (step,), False, False)


def step_of(device, kernel, grid, threads, shared_bytes, kinds, given, blocks=1, tensor_maps=()):
    """A Step. kinds: the types of the kernel's arguments; given: the arguments, tuples flat."""
    source = Source(kernel, types.void(*kinds), threads, blocks, shared=shared_bytes, tensor_maps=tensor_maps)
    cc = (*device.cc, "a") if device.cc == (9, 0) else device.cc
    return Step(GivenSource(source, cc, getattr(kernel, "made_by", ())), None, grid, tuple(given))


def kernel_factory(make):
    """Decorate a function that returns a kernel, or a tuple that begins with one, so that calls with equal arguments
    make it once, and that it is found on the disk by these."""

    @cache
    @wraps(make)
    def made(*arguments):
        found = make(*arguments)
        kernel = found[0] if isinstance(found, tuple) else found
        kernel.made_by = f"{make.__module__}:{make.__qualname__}", plain(arguments)
        check_plain("kernel_factory", kernel.made_by)
        return found

    return made


def plain(x):
    """With dtypes by their names, and Identities by their digests."""
    if isinstance(x, tuple):
        return tuple(map(plain, x))
    if isinstance(x, Identity):
        return x.digest
    return x.name if isinstance(x, np.dtype) else x


def type_of(x):
    """The type of an argument in a kernel: arrays of any strides, bfloat16 as uint16, np.int32 as an index."""
    if isinstance(x, TensorMap):
        return types.uint64
    if isinstance(x, tuple):
        named = hasattr(x, "_fields")
        parts = [type_of(part) for part in x]
        return types.NamedTuple(parts, type(x)) if named else types.Tuple.from_types(parts)
    if isinstance(x, FromCall):
        return from_dtype(np.dtype(x.dtype))
    if is_number(x):
        return INDEX if isinstance(x, np.int32) else from_dtype(np.asarray(x).dtype)
    dtype = np.dtype(np.uint16) if x.dtype == bfloat16 else x.dtype
    return types.Array(from_dtype(dtype), x.ndim, "A")


def is_number(x):
    return isinstance(x, (int, float, np.generic))


def _array(x):
    return x.array if isinstance(x, TensorMap) else x


def _view(array):
    return View(0, array.itemsize, array.shape, array.strides)


def _flat(arguments):
    for x in arguments:
        if isinstance(x, tuple) and not isinstance(x, TensorMap):
            yield from _flat(x)
        else:
            yield x

