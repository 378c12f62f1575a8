"""Check what a user passes: numbers, flags, NumPy and CuPy arrays. Describe it, and refuse what does not fit.

Only `check_values` looks at the elements of arrays; all else looks at shapes, strides and addresses.
"""

import math
import operator
import sys
import warnings
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias, TypeVar

import ml_dtypes
import numpy as np

from .values import Value, address_of, is_foreign

DTYPES = tuple(map(np.dtype, ("float16", ml_dtypes.bfloat16, "float32", "float64")))
FLOATING = ", ".join(map(str, DTYPES))


class UserError(Exception):
    """The user's error, even where a pass raises it: no fault of numbattn's, see faults.py."""


class UserValueError(UserError, ValueError):
    """As a ValueError."""


class UserTypeError(UserError, TypeError):
    """As a TypeError."""


class DtypeError(TypeError, ValueError):
    """An array is of another dtype than those beside it."""


class Array(Protocol):
    """What type checkers know about arrays, NumPy's and CuPy's alike. At run time see `library`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def dtype(self) -> Any: ...
    def __getitem__(self, key: Any, /) -> Any: ...


MOST_AXES = 32  # that all of NumPy's functions take, and CuPy's arrays have
A = TypeVar("A", bound=Array)  # numpy.ndarray or cupy.ndarray: results are of the kind of the inputs
Integers: TypeAlias = int | Sequence[int] | Array
Floats: TypeAlias = float | Sequence[float] | Sequence[Sequence[float]] | Array


def dtype_of_sums(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of sums, of lse and of dlse, for arrays of this dtype."""
    return np.dtype("float64" if dtype == np.float64 else "float32")


def library(x: Any) -> str | None:
    """ "numpy" or "cupy" for their arrays, None for anything else. Imports neither."""
    kind: Any = type(x)
    return _library(kind)


@lru_cache
def _library(kind: Any) -> str | None:
    if issubclass(kind, np.ndarray) and not issubclass(kind, np.ma.MaskedArray | np.matrix):
        return "numpy"
    return "cupy" if kind.__module__.partition(".")[0] == "cupy" and hasattr(kind, "strides") else None


def dtype_of(x: Any) -> np.dtype[Any]:
    """The dtype of an array, NumPy's, CuPy's or a framework's, as NumPy knows it; that of objects for anything else."""
    dtype = x.dtype if is_foreign(x) or library(x) else np.dtype(object)
    if isinstance(dtype, np.dtype):
        return dtype
    try:
        return np.dtype(str(dtype).removeprefix("torch."))
    except TypeError:
        return np.dtype(object)  # keys of random numbers, quantised numbers


def words_for(x: Any) -> str:
    """What x is, for a message: "numpy.ndarray of float32", "torch.Tensor", Causal(), 'three', 3.5."""
    if isinstance(x, int | float | str | bytes | None):
        return repr(x)
    if library(x):
        return f"{library(x)}.ndarray of {words_for_dtype(x.dtype)}"
    if isinstance(x, type):
        return f"the class {x.__qualname__}"
    if isinstance(x, Value):
        return repr(x)
    kind = type(x)
    found = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__.startswith("jax") and hasattr(x, "aval"):
        found = "jax.Array" if kind.__module__.startswith("jaxlib") else "traced jax.Array"
    return f"{found} of {x.dtype}" if is_foreign(x) and hasattr(x, "dtype") else found


def arrays_for(x: Any) -> str:
    """Whose arrays an error about x may ask for: those of a framework come from numbattn.interop, which takes them."""
    return "" if is_foreign(x) else " of NumPy or CuPy"


def cast_of(name: str, dtype: np.dtype[Any], allowed: Sequence[np.dtype[Any]] = DTYPES) -> str:
    """How an array of numbers of another dtype can be passed, for an error; "" if that is not obvious."""
    native = dtype.newbyteorder("=")
    likely = native, np.dtype("float64" if dtype.kind == "f" else "float32")
    wanted = allowed[0] if len(allowed) == 1 else next((x for x in likely if x in allowed), None)
    if wanted is None or not (dtype.kind in "biuf" or dtype in DTYPES):
        return ""
    if _is_called_by_torch():
        return f"; pass {name}.to(torch.{wanted})"
    return f"; pass {name}.astype({'ml_dtypes' if wanted.kind == 'V' else 'np'}.{wanted})"


def _is_called_by_torch() -> bool:
    """Whether tensors were given, which numbattn.interop.torch passes on as arrays."""
    frame: Any = sys._getframe(1)
    while frame and not frame.f_globals.get("__name__", "").startswith("numbattn.interop.torch"):
        frame = frame.f_back
    return frame is not None


def no_floats(name: str, dtype: np.dtype[Any]) -> TypeError:
    """The error for an array of no floating dtype."""
    return TypeError(f"{name}: got {dtype}, allowed {FLOATING}{cast_of(name, dtype)}")


def other_dtype(name: str, dtype: np.dtype[Any], wanted: np.dtype[Any], of: str) -> DtypeError:
    """The error for an array that is not of the dtype of another one."""
    return DtypeError(f"{name}: got {dtype}, expected {wanted}, the dtype of {of}{cast_of(name, dtype, (wanted,))}")


def words_for_dtype(dtype: np.dtype[Any]) -> str:
    """What it is, for a message: "float32", and of the other byte order with how to cast it."""
    return str(dtype) if dtype.isnative else f'{dtype}, which x.astype(x.dtype.newbyteorder("=")) casts'


def number(name: str, value: Any, instead: str = "") -> float:
    """As a float; instead: what takes an array of a framework, which as a float would have no gradient."""
    if type(value) is float:
        return value
    is_number = hasattr(value, "__float__") or hasattr(value, "__index__")
    if is_foreign(value) and (value.ndim or not type(value).__module__.startswith("jaxlib")):  # where none is traced
        raise TypeError(f"{name}: got {words_for(value)}, expected a number of Python{instead}")
    if isinstance(value, bool | np.bool_) or not is_number:
        raise TypeError(f"{name}: got {words_for(value)}, expected a number")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: got {words_for(value)}, expected a number") from None
    except OverflowError:
        raise ValueError(f"{name}: got {value}, allowed are floats") from None


def integer(name: str, value: Any, low: int | None = None, high: int | None = None, instead: str = "") -> int:
    """As an int; instead: what takes one that a framework traces."""
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}: got {value}, expected an integer")
    try:
        found = value if type(value) is int else operator.index(value)  # which would make torch.compile's a constant
    except TypeError:
        instead = instead * is_foreign(value)
        raise TypeError(f"{name}: got {words_for(value)}, expected an integer{instead}") from None
    if (low is not None and found < low) or (high is not None and found > high):
        allowed = f"{low} or more" if high is None else f"{low} to {_power(high)}"
        raise ValueError(f"{name}: got {found}, allowed {allowed}")
    return found


def _power(n: int) -> int | str:
    """n, or in words such as 2**64 - 1 where it is large and of that form."""
    bits = n.bit_length()
    return f"2**{bits} - 1" if bits > 31 and n == 2**bits - 1 else n


def integers(name: str, value: Any) -> Any:
    """An int, or an integer array as it is; lists become NumPy arrays."""
    if isinstance(value, int | np.integer):
        return integer(name, value, -(2**63), 2**63 - 1)
    array = _array_of(name, value)
    if array is not value and not array.size:  # NumPy takes an empty list for floats
        array = array.astype(np.int64)
    if dtype_of(array).kind not in "iu":
        raise TypeError(f"{name}: got {words_for(value)}, expected an int or an integer array{arrays_for(value)}")
    check_axes(name, array)
    return array if array.ndim or is_foreign(array) else int(array)


def own(name: str, array: Any) -> Any:
    """An integer array, where numbattn.interop does not take a framework's either."""
    if is_foreign(array):
        raise TypeError(f"{name}: got {words_for(array)}, expected an int or an integer array of NumPy or CuPy")
    return array


def integer_array(name: str, value: Any, shape: str) -> Any:
    """An integer array of at least one axis."""
    array = integers(name, value)
    if isinstance(array, int) or not array.ndim:
        raise ValueError(f"{name}: got a number, expected an array {shape}")
    return array


def floats(name: str, value: Any) -> Any:
    """A floating array as it is; numbers and lists become NumPy arrays."""
    if dtype_of(value) in DTYPES:
        check_axes(name, value)
        return value
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        value = number(name, value)
    array = np.asarray(value) if isinstance(value, float | np.generic) else _array_of(name, value)
    if array is not value and array.dtype.kind in "iu":
        array = array.astype(np.float64)
    if not library(array) or array.dtype not in DTYPES:
        raise TypeError(f"{name}: got {words_for(value)}, expected a number or an array{arrays_for(value)}: {FLOATING}")
    check_axes(name, array)
    return array


def _array_of(name: str, value: Any) -> Any:
    """A list as a NumPy array; anything else as it is."""
    if not isinstance(value, list | tuple | range):
        return value
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: got {words_for(value)}, of which NumPy makes no array: {error}") from None


def check_axes(name: str, array: Any) -> None:
    """Refuse more axes than NumPy can compute with."""
    if array.ndim > MOST_AXES:
        raise ValueError(f"{name}: got {array.ndim} axes, at most {MOST_AXES}")


def flag(name: str, value: Any) -> bool:
    """As a bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}: got {words_for(value)}, expected True or False")
    return bool(value)


def shape_of(name: str, value: Iterable[int]) -> tuple[int, ...]:
    """A shape, (..., seqlen_q, seqlen_k), as a tuple of ints."""
    try:
        shape = tuple(integer(name, n, low=0) for n in value)
    except TypeError:
        raise TypeError(f"{name}: got {words_for(value)}, expected (..., seqlen_q, seqlen_k), integers") from None
    if len(shape) < 2:
        raise ValueError(f"{name}: got {shape}, expected (..., seqlen_q, seqlen_k)")
    return shape


def check_array(name: str, array: Any, dtype: Any, ndim: int = 2) -> None:
    """Refuse anything but an array of this dtype."""
    if dtype_of(array) != dtype:
        raise TypeError(f"{name}: got {words_for(array)}, expected an array of {np.dtype(dtype)}{arrays_for(array)}")
    if array.ndim < ndim:
        raise ValueError(f"{name}: got the shape {array.shape}, expected (..., rows, columns)")
    check_axes(name, array)


def refuse_foreign(of: str, values: Iterable[Value]) -> None:
    """Refuse values with arrays of a framework where NumPy or CuPy computes."""
    for value in values:
        if name := value._foreign:
            raise TypeError(f"{of}: {type(value).__name__} {name}: got {words_for(value._arrays()[name])}, expected an "
                            "array of NumPy or CuPy; those of frameworks go with the functions of numbattn.interop")


FRAMEWORKS = {"torch": "torch", "jax": "jax", "jaxlib": "jax"}  # the module in interop/ of a package's arrays


def same_library(taker: str = "attention", /, **arrays: Any) -> str:
    """The library that all of them are of. taker: what takes them, where it is not attention, as numbattn.points."""
    found = list(map(library, arrays.values()))
    if None in found:
        name, x = next((name, x) for (name, x), lib in zip(arrays.items(), found) if lib is None)
        of = FRAMEWORKS.get(type(x).__module__.partition(".")[0])
        advice = f"pass np.asarray({name}), or cupy.from_dlpack({name}) on a GPU"
        advice = {
            "attention": f"attention of those is in numbattn.interop.{of}",
            "numbattn.points": f"product, logsumexp and sinkhorn of those are in numbattn.interop.{of}.points; else "
                               f"{advice}",
        }.get(taker, f"{taker} takes no others: {advice}")
        raise TypeError(f"{name}: got {words_for(x)}, expected a numpy.ndarray or a cupy.ndarray"
                        + (f"; {advice}" if of else ""))
    if len(set(found)) > 1:
        raise TypeError("arrays of NumPy and CuPy do not mix: "
                        + ", ".join(f"{name} is a {lib}.ndarray" for name, lib in zip(arrays, found)))
    return str(found[0])


def check_values(name: str, array: Any, largest: float, rising: bool = False) -> None:
    """Refuse a NumPy array with integers beyond 0 to `largest`.

    rising: whether they are offsets of sequences, which must not decrease along the last axis.
    """
    if not array.size:
        return
    if not 0 <= array.min() <= array.max() <= largest:
        allowed = "0 or more" if largest == math.inf else f"0 to {largest}"
        raise ValueError(f"{name}: got values from {array.min()} to {array.max()}, allowed {allowed}")
    falls = array[..., 1:] < array[..., :-1]
    if rising and falls.any():
        one, other = array[..., :-1][falls][0], array[..., 1:][falls][0]
        raise ValueError(f"{name}: got {one} before {other}, expected offsets that do not decrease")
    if rising:
        _warn_of_lengths(name, array, largest)


def _warn_of_lengths(name: str, offsets: Any, length: float) -> None:
    """Warn of what are most likely lengths, for an array of this length."""
    first, last = offsets[..., :1], offsets[..., -1:]
    if first.all() and (last != length).all() and (offsets.sum(-1) <= length).all():
        warn(f"{name}: got offsets from {first.min()} to {last.max()} for {length} tokens: "
             "lengths were given, most likely; offsets are np.cumsum([0, *lengths])")


def needed(module: str, by: str, of: str) -> Any:
    """A module `of` packages that numbattn does without elsewhere, or that imports one of these."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} not found. {by} needs pip install {of}", name=error.name) from None


def warn(message: str) -> None:
    """A UserWarning at the line that called numbattn. NumPy is in between where its errstate decorates a call."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("numbattn", "numpy"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def overlap(x: Any, y: Any) -> bool:
    """Whether two arrays share an element."""
    if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
        return np.shares_memory(x, y)  # which compares addresses first, in a tenth of the time
    (first, end), (other_first, other_end) = _extent(x), _extent(y)
    return first < other_end and other_first < end and np.shares_memory(_memory(x), _memory(y))


def _extent(x: Any) -> tuple[int, int]:
    """The addresses [first, end) between which an array's elements lie."""
    first = address_of(x)
    if not x.size:
        return first, first
    steps = [stride * (n - 1) for stride, n in zip(x.strides, x.shape)]
    return first + sum(s for s in steps if s < 0), first + sum(s for s in steps if s > 0) + x.itemsize


def overlaps_itself(x: Any) -> bool:
    """Whether two elements of an array share memory."""
    if x.flags.c_contiguous:
        return False
    steps = sorted((abs(stride), n) for stride, n in zip(x.strides, x.shape) if n > 1)
    end = x.itemsize  # of the memory of the axes so far
    for step, n in steps:
        if step < end:
            break
        end += step * (n - 1)
    else:
        return False
    offsets = sum(np.ix_(*(np.arange(n) * step for step, n in steps)))  # axes may be interleaved all the same
    return x.size > 0 and bool(np.diff(np.sort(offsets, axis=None)).min() < x.itemsize)


def check_apart(name: str, x: Any) -> None:
    """Refuse an array whose elements share memory."""
    if overlaps_itself(x):
        raise ValueError(f"{name}: got strides {x.strides} for the shape {x.shape}: elements share memory")


def check_writable(name: str, x: Any) -> None:
    """Refuse a NumPy array that is read-only."""
    if isinstance(x, np.ndarray) and not x.flags.writeable:
        raise ValueError(f"{name}: got a read-only array")


def lies_within_rows(x: Any, whole: Any) -> bool:
    """Whether x is whole[..., first:end]."""
    step = whole.strides[-1]
    if x.strides != whole.strides or not step:
        return False
    first, rest = divmod(address_of(x) - address_of(whole), step)
    return not rest and 0 <= first <= whole.shape[-1] - x.shape[-1]


def _memory(x: Any) -> Any:
    """x, or for a CuPy array a NumPy array at the same addresses, for comparing them: NumPy compares them without
    reading any, CuPy would ask the device."""
    if isinstance(x, np.ndarray):
        return x
    about = {"version": 3, "typestr": f"|V{x.itemsize}", "shape": x.shape, "strides": x.strides}
    return np.asarray(SimpleNamespace(__array_interface__={**about, "data": (x.data.ptr, True)}))
