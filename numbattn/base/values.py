"""Values: the frozen dataclasses that masks and scores are. Two are equal if their numbers are equal and their arrays
are the same objects: a pickled copy, which has copies of the arrays, is unequal.

Also what both do with NumPy and CuPy arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from .forks import cached_property

R = TypeVar("R")
V = TypeVar("V", bound="Value")
FRAMEWORKS = "torch", "jax", "jaxlib", "autograd"  # packages whose arrays values may hold, for numbattn.interop
MOST_KNOWN = 32  # entries of a Memo, and of what is `remembered`


class Held(NamedTuple):
    """An array that a value holds, with the shape it must have after the batch axes and the largest value allowed."""

    name: str
    array: Any
    shape: tuple[int, ...]
    largest: Any = None  # math.inf: any that is not negative
    rising: bool = False  # whether it must not decrease along its last axis


@dataclass(frozen=True)
class Placeholder:
    """Stands for an array that is given later, so that values can be compared without their arrays."""

    number: int  # among the arrays of a call's mask and score
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def ndim(self) -> int:
        return len(self.shape)


def is_foreign(x: Any) -> bool:
    """Whether x is an array that only numbattn.interop takes, of one of its frameworks, or stands for one."""
    if isinstance(x, np.ndarray):  # JAX has a subclass of it
        return False
    return isinstance(x, Placeholder) or (type(x).__module__.partition(".")[0] in FRAMEWORKS and hasattr(x, "shape"))


class Value:
    """The base of a frozen dataclass."""

    _axis_of_queries: int | None = None  # of its arrays: along it a device may hold only the rows of its own queries
    _own_axes: int | None = None  # how many axes its first array has after those of the batch; None: it is not by batch
    _is_private = False  # whether nobody else has its arrays, so that they do not change

    def _arrays(self) -> dict[str, Any]:
        """Its own arrays by the names of their fields, without those of its parts."""
        return {name: x for name, x in vars(self).items() if hasattr(x, "shape")}

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        """Arrays over all batch axes."""
        return ()

    def _axes_of_arrays(self) -> dict[str, int]:
        """How many axes each array over the batch axes has after them, by its name."""
        found = {held.name: len(held.shape) for held in self._held(1, 1)}
        return found if self._own_axes is None else {next(iter(self._arrays())): self._own_axes, **found}

    @cached_property
    def _all_arrays(self) -> list[Any]:
        """All its arrays, those of its parts, too."""
        return list(self._arrays().values())

    @cached_property
    def _on_host(self) -> list[Any]:
        """The NumPy arrays: their elements are read, and may change from call to call."""
        return [x for x in self._all_arrays if isinstance(x, np.ndarray)]

    def _like(self: V, array: Any) -> V:
        """The value with all its arrays in the library of `array`, NumPy or CuPy; itself if they are already."""
        return self._mapped(lambda x: moved(x, array))

    def _mapped(self: V, function: Callable[[Any], Any]) -> V:
        """The value with each of its arrays mapped by a function; itself if no array changes."""
        copies = {name: copy for name, x in self._arrays().items() if (copy := function(x)) is not x}
        if not all(x.ndim for x in copies.values()):  # one without axes may become a number
            return replace(cast(Any, self), **copies)
        if not copies:
            return self
        made = object.__new__(type(self))  # without checks, which take longer
        vars(made).update(self.__getstate__(), **copies)
        return made

    @cached_property
    def _foreign(self) -> str | None:
        """The name of an array that numbattn's own functions do not take, if there is one."""
        return next(iter([name for name, x in self._arrays().items() if is_foreign(x)]), None)

    def _key(self) -> tuple[Any, ...]:
        names: Any = type(self).__dataclass_fields__  # type: ignore[attr-defined]
        return type(self), *[identity(getattr(self, name)) for name in names]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Value) and self._key() == other._key())

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self._key())

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickle, without what is cached: a hash is valid only in its own process."""
        names: Any = type(self).__dataclass_fields__  # type: ignore[attr-defined]
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        values = ((field.name, getattr(self, field.name)) for field in fields(cast(Any, self)) if field.init)
        inside = ", ".join(f"{name}={shown(x)}" for name, x in values if x is not None)
        return f"{type(self).__name__}({inside})"

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


def identity(x: Any) -> Any:
    """What a field is compared by: for an array, which object it is."""
    return ("array", id(x)) if hasattr(x, "shape") and not isinstance(x, Placeholder) else x


class Taken(Value):
    """A Value that holds a function as it was when the Value was made, and so do its copies. Pickle stores the function
    itself, which is then taken anew."""

    def __copy__(self: V) -> V:
        return self

    def __deepcopy__(self: V, memo: dict[int, Any]) -> V:
        return self._mapped(lambda x: deepcopy(x, memo))


class Memo:
    """What a caller has found out about values, by key; it is stored with each value, and freed with it.

    What depends on the elements of an array is only for values whose arrays are all on a GPU: nobody reads those, and
    all else of a value stays as it is.
    """

    def __init__(self, name: str) -> None:
        self.name = f"_{name}"

    def get(self, value: Value, key: Any) -> Any:
        known = value.__dict__.get(self.name)
        return None if known is None else known.get(key)

    def keep(self, value: Value, key: Any, found: Any) -> None:
        _keep(vars(value).setdefault(self.name, {}), key, found, MOST_KNOWN)


def remembered(known: dict[Any, R], key: Any, find: Callable[[], R], most: int = MOST_KNOWN) -> R:
    """known[key], or what find() finds, kept there beside `most` others at most. Another thread may clear it."""
    found = known.get(key)
    if found is None:
        found = find()
        _keep(known, key, found, most)
    return found


def _keep(known: dict[Any, Any], key: Any, found: Any, most: int) -> None:
    if len(known) >= most:
        known.clear()
    known[key] = found


def kinds(base: type[V]) -> list[type[V]]:
    """All classes that derive from one, and itself; each once, even where two of its bases do."""
    return list(dict.fromkeys([base, *(kind for child in base.__subclasses__() for kind in kinds(child))]))


def given(**arrays: Any) -> tuple[Held, ...]:
    """The arrays that are not None, over the batch axes alone."""
    return tuple(Held(name, array, ()) for name, array in arrays.items() if array is not None)


def address_of(x: Any) -> int:
    """Where a NumPy or CuPy array begins."""
    return int(x.__array_interface__["data"][0] if isinstance(x, np.ndarray) else x.data.ptr)


def moved(x: Any, array: Any) -> Any:
    """An array in the library of another one: itself if it is already."""
    if isinstance(x, np.ndarray) == isinstance(array, np.ndarray):
        return x
    return np.asarray(x, like=array) if isinstance(x, np.ndarray) else x.get()


def filled(value: float, shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
    """An array of one number, in the library of another array. With CuPy, `ones` and `full` do not take like=, and
    `full_like` takes shape=() for the shape of the other one."""
    found = np.empty(shape, dtype, like=like)
    found[...] = value
    return found


def rounded(x: Any, dtype: Any) -> Any:
    """x in this dtype; numbers too small for it become 0, whatever NumPy's error state says."""
    if x.dtype == dtype:
        return x
    with np.errstate(under="ignore"):
        return x.astype(dtype)


@np.errstate(under="ignore")
def put(out: Any, x: Any) -> None:
    """x in out, in its dtype; as `rounded`."""
    out[...] = x


def rowsum(x: Any, y: Any) -> Any:
    """rowsum(x * y), (..., rows), of arrays (..., rows, features)."""
    return np.einsum("...mc,...mc->...m", x, y)


def sum_broadcast(x: Any, shape: tuple[int, ...]) -> Any:
    """The gradient of an array of this shape, from the gradient of the array it was broadcast to."""
    own = (1,) * (x.ndim - len(shape)) + shape
    axes = tuple(axis for axis, (size, wanted) in enumerate(zip(x.shape, own)) if size != wanted)
    return x.sum(axis=axes).reshape(shape)[...]  # an array even without axes, where NumPy's sum is a scalar


def broadcasts(own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether NumPy broadcasts an array of one shape to the other one."""
    return own == shape or (len(own) <= len(shape) and all(a in (1, b) for a, b in zip(own[::-1], shape[::-1])))


def clip(x: Any, low: int, high: int) -> Any:
    """An int, or an array of int64: unsigned numbers beyond it are cut first."""
    if isinstance(x, int):
        return max(low, min(x, high))
    if x.dtype == np.uint64:
        x = np.minimum(x, np.uint64(2**62))
    return np.minimum(np.maximum(x.astype(np.int64), low), high)  # np.clip takes three times as long on a few numbers


def for_queries(x: Any) -> Any:
    """A number, or an array with an axis of queries after its own."""
    return x if isinstance(x, int) else x[..., None]


def shown(x: Any) -> str:
    return f"<{x.dtype} array {x.shape}>" if hasattr(x, "shape") else repr(x)
