"""Where: a function of the user's own as a mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

import numpy as np

from ..base.backends import backend, on_cpus
from ..base.checks import Array, integer, library
from ..base.forks import cached_property
from ..base.origin import Crop, Origin
from ..base.values import Taken, identity, remembered, shown
from ..functions.entries import IS_NO_TRUTH, entries_of
from ..functions.frozen import Frozen, frozen
from ..functions.given import PLACE, arrays_given, check_signature, python_function
from ..functions.positions import of_mask, positions_of
from .base import Grid, Mask
from .dense import Bits


@dataclass(frozen=True, eq=False, repr=False)
class Where(Taken, Mask):
    """Key j is visible to query i iff ``function(batch, head, i, j, *arrays)``: a function of your own.

    It is an ordinary Python function of integers that returns True or False, compiled by Numba: batch is the number of
    the element of the batch, in C order, the others are indices. Integers, including those in arrays, are int64,
    booleans are Python's. The function is called once for each element to find the states of blocks: from then on calls
    skip the blocks that nobody sees, and test nothing in those that are wholly visible.

    Parameters
    ----------
    function : callable
        ``function(batch, head, i, j, *arrays)`` returns whether query i sees key j.
    arrays : sequence of arrays, optional
        What the function looks up, as in a `Score`. Those on a GPU must not be edited in place afterwards: the states
        of blocks are kept, and nobody waits to compare them. Make another Where of the same function and other arrays:
        nothing is compiled again.
    block_size : int, optional
        Rows and columns of a block.

    Raises
    ------
    TypeError
        As for a function of a `Score`; in the first call of attention also if it returns anything but True or False.

    See Also
    --------
    check_mask : compare the compiled function with plain Python, and look for what it reads outside of its arrays.
    Causal, Window, Segments, Prefix, Intervals, BlockSparse : masks that need no states.

    Notes
    -----
    The function is taken when the Where is made, as in a `Score`. The states of blocks take a byte each, 410 KB for
    40,960 queries and keys; as much for each head and element of the batch if the function reads `head` and `batch`.
    They are kept with the Where, for each shape and each CuPy stream; if its arrays are NumPy's and the call runs on a
    GPU, they are found in each call. ``|`` with another mask becomes Bits in each call. With a `KVCache` i counts the
    queries of a call, j the keys of a sequence.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> def same_document(batch, head, i, j, document):
    ...     return document[i] == document[j] and j <= i
    >>> mask = na.Where(same_document, arrays=[np.array([0, 0, 1, 1])])
    >>> mask.dense(4, 4).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 0, 1, 0],
           [0, 0, 1, 1]])
    """

    function: Callable[..., Any]
    arrays: Sequence[Array] = ()
    block_size: int = 64
    _identity: Frozen = field(init=False)
    _at: Origin = field(init=False, default=Origin())  # of its first element, in a larger attention
    _shape: tuple[int, ...] | None = field(init=False, default=None)  # of S, in a call
    _windows: Any = field(init=False, default=None)  # of a grid's tokens, which its arrays have entries for
    _is_whole: bool = field(init=False, default=True)  # whether it is for all of these
    _is_private: bool = field(init=False, default=False)
    _on_tiles: str = field(init=False, default="")  # how backends compute the same on whole tiles, if they know
    _cells: Any = field(init=False, default=None)  # states of its blocks, if known in its library, (rows, columns)
    _states: Any = field(init=False, default=None)  # of blocks, uint8 (..., rows, columns): see Grid
    _kept: dict[Any, Any] = field(init=False, default_factory=dict)  # states, by where they are and of what

    _is_interval = False
    _is_function = True
    _examples = (("where", lambda m, n: Where(_striped)),)

    def __post_init__(self) -> None:
        function = python_function("Where function", self.function)
        arrays = arrays_given("Where", self.arrays)
        check_signature("Where function", function, PLACE, len(arrays))
        self._set(function=function, arrays=arrays, block_size=integer("Where block_size", self.block_size, low=1),
                  _identity=frozen(function, "Where function"))  # fmt: skip

    def _arrays(self) -> dict[str, Any]:
        return {f"arrays[{i}]": x for i, x in enumerate(self.arrays)}

    def _with(self, **values: Any) -> Where:
        """It, with the function as it was taken, and other values."""
        made = object.__new__(Where)
        made._set(**{name: getattr(self, name) for name in FIELDS} | values)
        return made

    def _mapped(self, function: Callable[[Any], Any]) -> Where:
        copies = tuple(map(function, self.arrays))
        if all(x is y for x, y in zip(copies, self.arrays)):
            return self
        return self._with(arrays=copies, _states=None, _kept={})

    def __reduce__(self) -> Any:
        in_call = {"_at": self._at, "_shape": self._shape}  # for one that a call has fitted
        if self._windows is not None:
            return _again, (self._windows,), in_call | {"_is_whole": self._is_whole}
        return Where, (self.function, self.arrays, self.block_size), in_call

    def _key(self) -> tuple[Any, ...]:
        arrays = tuple(map(identity, self.arrays))
        return type(self), self._identity, arrays, self.block_size, self._at, self._shape, identity(self._states)

    def _check_tokens(self, queries: int, keys: int) -> None:
        if self._windows is not None and (queries, keys) != (tokens := self._windows.tokens,) * 2:
            raise ValueError(f"mask: got {queries} queries and {keys} keys, expected {tokens} of each, as many as the "
                             "grid has tokens")  # fmt: skip

    def _fit(self, shape: tuple[int, ...]) -> Where:
        if self._is_whole:
            self._check_tokens(*shape[-2:])
        return self if shape == self._shape else self._with(_shape=shape, _states=None)

    def _cropped(self, crop: Crop) -> Where:
        at = self._at._replace(query=self._at.query + crop.first_query, key=self._at.key + crop.first_key)
        shape = None if self._shape is None else (*self._shape[:-2], crop.queries, crop.keys)
        if self._windows is not None:
            least = self._windows.tokens
            self._check_tokens(max(at.query + crop.queries, least), max(at.key + crop.keys, least))
        return self._with(_at=at, _shape=shape, _states=None, _cells=None, _is_whole=False)

    def _from_head(self, head: int) -> Where:
        at = self._at._replace(head=self._at.head + head)
        return self._with(_at=at, _states=None)

    def _with_states(self, array: Any) -> Where:
        """With the states of its blocks, in the library of `array`."""
        if library(self._states) == library(array):
            return self
        if self._cells is None or library(self._cells) != library(array):
            return self._with(_states=backend(cast(str, library(array))).states_of_blocks(self))
        return self._with(_states=self._cells.reshape(self._blocks(self.block_size)))

    @property
    def _may_wait(self) -> bool:
        return self._windows is not None and self._is_whole and self._states is None

    def _states_kept(self, place: Any, find: Callable[[Where], Any]) -> Any:
        """The states of its blocks, as they were found for the same arrays, or as find(self) finds them; place: where
        they are."""
        key, held = (place, self._at, self._lead, self._sizes), [x.tobytes() for x in self._on_host]
        if self._kept.get(key, (held,))[0] != held:  # edited in place
            self._kept.pop(key, None)
        return remembered(self._kept, key, lambda: (held, find(self)))[1]

    @property
    def _sizes(self) -> tuple[int, int]:
        seqlen_q, seqlen_k = cast(tuple[int, ...], self._shape)[-2:]
        return seqlen_q, seqlen_k

    @cached_property
    def _lead(self) -> tuple[int, ...]:
        """The batch axes, heads included, of size 1 where the function does not tell their elements apart."""
        from ..functions.compiled.truth import reads  # Numba is not imported before it is needed

        shape = cast(tuple[int, ...], self._shape)[:-2]
        by_batch, by_head = reads(self._identity, self._kinds_of_arrays)
        return *(n if by_batch else 1 for n in shape[:-1]), *(n if by_head else 1 for n in shape[-1:])

    @property
    def _matrices(self) -> tuple[int, int]:
        """How many matrices it tells apart, as (batch, heads)."""
        return math.prod(self._lead[:-1]), math.prod(self._lead[-1:])

    @property
    def _kinds_of_arrays(self) -> tuple[Any, ...]:
        """Numba's types of its arrays."""
        from numba import from_dtype, types

        def layout(x: Any) -> str:  # loops over arrays of numbattn's own are vectorised
            return "C" if self._is_private and x.flags.c_contiguous else "A"

        return tuple([types.Array(from_dtype(x.dtype), x.ndim, layout(x)) for x in self.arrays])

    def _blocks(self, size: int) -> tuple[int, ...]:
        """The shape of the states of blocks of this size."""
        return *self._lead, *(-(-length // size) for length in self._sizes)

    def _grids(self) -> tuple[Grid, ...]:
        return (Grid(self._states, self.block_size, self.block_size, function=self),)

    def _bits(self, seqlen_q: int, seqlen_k: int, frame: Any, array: Any) -> Bits:
        whole = self if self._shape is not None else self._fit((1, 1, seqlen_q, seqlen_k))
        whole = whole._at_positions(frame) if frame is not None and frame._places_keys else whole
        chosen = on_cpus() if isinstance(array, np.ndarray) else backend(cast(str, library(array)))
        found = chosen.shown_by_function(whole)
        return Bits.pack(found if self._shape is not None else found[0, 0])

    def _at_positions(self, frame: Any) -> Where:
        """It, with the positions of a frame in place of rows."""
        arrays = frame._arrays_for(self._shape)
        function = of_mask(self._identity, positions_of(arrays))
        own = {"_identity": function, "arrays": (*arrays, *self.arrays)}
        return self._with(**own, _windows=None, _on_tiles="", _cells=None, _states=None, _kept={})

    @property
    def _test(self) -> Callable[..., Any]:
        """The function of a query and a key, in plain Python."""
        given, arrays = self._identity.python, tuple(map(entries_of, self.arrays))

        def test(*place: Any) -> bool:
            found = given(*place, *arrays)
            if not isinstance(found, bool | np.bool_):
                raise TypeError(f"mask: {self.function.__qualname__} {IS_NO_TRUTH}")
            return bool(found)

        return test

    def __repr__(self) -> str:
        arrays = f", arrays=[{', '.join(map(shown, self.arrays))}]" if self.arrays else ""
        return f"Where({self.function.__qualname__}{arrays})"


def _again(windows: Any) -> Where:
    made: Where = windows.mask()
    return made._with()


FIELDS = tuple([each.name for each in fields(Where)])


def _striped(batch: Any, head: Any, i: Any, j: Any) -> Any:
    return j <= i and (i - j < 1024 or j % 64 == 0)
