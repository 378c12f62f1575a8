"""Parts of a score that a function of one element defines, and the identity of such functions."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from ..base.checks import words_for
from ..base.forks import cached_property
from ..functions.entries import IS_A_MASK, entries_of
from ..functions.frozen import ORDERS, frozen
from ..functions.given import DTYPES, PLACE
from .parts import Part


class FunctionPart(Part):
    """A part that a function of one element defines, function(S, batch, head, i, j, *arrays): backends compile it, and
    all derivatives follow from it. The arrays, of numbers that Numba knows, are `_looked_up`.

    A class of this kind has an Identity, and fields of its own; with an array it derives from this class and then from
    `ArrayPart`. In a call on a part of the heads its arrays are whole.
    """

    _identity: Identity
    _reads: ClassVar[dict[str, tuple[str, ...]]] = {}  # what the axes of a field are indexed by: batch, head, i, j
    _is_nonlinear, _own_axes = True, None
    _boxes: Any = None  # of a bias by offset in the order of boxes: whether there is `extra`, and the sizes of boxes

    def _fit(self, batch: tuple[int, ...], seqlen_q: int, seqlen_k: int) -> None:
        """Refuse arrays that compiled functions cannot read, or that lack an entry that this one reads."""
        for name, axes in self._reads.items():
            sizes = dict(zip(PLACE, (math.prod(batch[:-1]), batch[-1] if batch else 1, seqlen_q, seqlen_k)))
            array, least, of = getattr(self, name), tuple([sizes[axis] for axis in axes]), type(self).__name__
            if array.dtype not in DTYPES:
                raise TypeError(f"score: {of} {name}: got {words_for(array)}, expected an array of float32 or float64")
            if array.ndim != len(least) or any(has < needs for has, needs in zip(array.shape, least)):
                raise ValueError(f"score: {of} {name}: got the shape {array.shape}, expected at least {least}")

    @property
    def _looked_up(self) -> tuple[Any, ...]:
        """The arrays that the function is called with."""
        return self._weights

    @property
    def _counted(self) -> tuple[bool, ...]:
        """Whether the gradient of each of these is wanted."""
        return self._wanted

    @property
    def _function(self) -> Callable[..., Any]:
        """The function, as errors name it."""
        return self._identity.function.python

    @property
    def _keeps_scores(self) -> bool:
        return self._wants_gradient

    def _tangent(self, tangents: Sequence[Any], dtype: Any, backward: bool) -> Any:
        is_zero = all(x is None for x in tangents)
        return None if is_zero and not (backward and self._wants_gradient) else ScoreTangent(self, tangents, dtype)

    def _identity_of(self, dtype: Any) -> Identity:
        """The Identity as kernels compile it, for S of this dtype."""
        is_narrow = dtype == np.float32 and all(x.dtype != np.float64 for x in self._looked_up)
        return self._identity.of_float32 if is_narrow else self._identity

    @cached_property
    def _kind(self) -> tuple[Any, ...]:
        return type(self), self._identity.key, self._boxes, *[(x.dtype, x.ndim) for x in self._looked_up]

    @property
    def _trained(self) -> list[Any]:
        """The arrays whose gradients are wanted."""
        return [x for x, wanted in zip(self._looked_up, self._counted) if wanted]

    @property
    def _sum_dtype(self) -> np.dtype[Any]:
        """The dtype in which its gradients are summed, at least."""
        return np.result_type(np.float32, *[x.dtype for x in self._trained])

    @property
    def _elements(self) -> int:
        """How many elements the arrays with a gradient have."""
        return sum(x.size for x in self._trained)

    def _gradient_like(self, sum_dtype: np.dtype[Any], wide: bool) -> tuple[tuple[int, ...], np.dtype[Any]]:
        return (self._elements,), np.promote_types(self._sum_dtype, sum_dtype)

    def _gradients(self, found: Any, lead: tuple[int, ...] = ()) -> tuple[Any, ...]:
        if found is None:
            return (None,) * len(self._weights)
        each = iter(self._split(found.reshape((*lead, self._elements))))
        return tuple([next(each) if wanted else None for wanted in self._wanted])

    def _split(self, elements: Any) -> list[Any]:
        """The elements of each array with a gradient; elements: of all, one array after the other, along the last axis.
        """
        *lead, _ = elements.shape
        ends = np.cumsum([x.size for x in self._trained]).tolist()
        return [elements[..., end - x.size : end].reshape((*lead, *x.shape)) for end, x in zip(ends, self._trained)]

    def _gradient(self, dS: Any, lse: Any, delta: Any, S: Any = None) -> Any:
        from ..functions.compiled.reads import in_python  # Numba is not imported before it is needed

        by_read, summed = in_python(self._identity, self._counted, self._looked_up), np.zeros(self._elements)
        S, dS = _by_batch(S, dS)
        for at in zip(*np.nonzero((dS != 0) & ~np.isneginf(S))):
            for place, slope in by_read(float(S[at]), *map(int, at)):
                summed[place] += slope * dS[at]
        return summed

    def _gradient_along(self, dS: Any, tdS: Any, S: Any, tS: Any, tangent: Any) -> Any:
        from ..functions.compiled.reads import in_python_along  # Numba is not imported before it is needed

        tangents, summed = tangent._tangents.astype(np.float64), np.zeros(self._elements)
        by_read = in_python_along(self._identity, self._counted, self._looked_up, tangents)
        S, tS, dS, tdS = _by_batch(S, tS, dS, tdS)
        for at in zip(*np.nonzero(((dS != 0) | (tdS != 0)) & ~np.isneginf(S))):
            for place, slope, tslope in by_read(float(S[at]), float(tS[at]), *map(int, at)):
                summed[place] += slope * tdS[at] + tslope * dS[at]
        return summed

    def _applied(self, S: Any) -> Any:
        return self._of_each(self._value, S)

    def _derivative(self, S: Any) -> Any:
        return self._differentiated(1, S)

    def _curvature(self, S: Any) -> Any:
        return self._differentiated(2, S)

    def _differentiated(self, order: int, S: Any) -> Any:
        return np.where(np.isneginf(S), 0, self._of_each(self._element(order), S))  # where it may be NaN

    @property
    def _value(self) -> Callable[..., Any]:
        """The function of one element, in plain Python."""
        function = self._element(0)

        def value(*element: Any) -> Any:
            found = function(*element)
            if isinstance(found, bool | np.bool_):
                raise TypeError(f"score: {self._function.__qualname__} {IS_A_MASK}")
            return found

        return value

    def _element(self, order: int) -> Callable[..., Any]:
        """The function of this order for one element: in plain Python, if the user has written it."""
        given, arrays = self._identity.key[order], self._seen_arrays
        if given is not None:
            return lambda *element: given.python(*element, *arrays)
        from ..functions.compiled.element import in_python  # Numba is not imported before it is needed

        return in_python(self._identity, order, self._looked_up)

    @property
    def _seen_arrays(self) -> tuple[Any, ...]:
        return tuple(map(entries_of, self._looked_up))

    def _of_each(self, function: Callable[..., Any], S: Any) -> Any:
        """function(s, batch, head, i, j) for each element of S (..., heads, seqlen_q, seqlen_k)."""
        by_batch = S.reshape(-1 if S.size else 0, *S.shape[-3:])
        found = [function(float(s), *at) for at, s in np.ndenumerate(by_batch)]
        return np.array(found, S.dtype).reshape(S.shape)


class ScoreTangent:
    """A FunctionPart, and the tangents of its arrays.

    tangents: of each array, None where it is zero. In _tangents they are one after the other, of arrays whose gradients
    are wanted; where all are zero, all are one element.
    """

    _has_step, _is_nonlinear, _own_axes = True, False, None
    _wants_gradient = _is_private = False

    def __init__(self, score: FunctionPart, tangents: Sequence[Any], sum_dtype: Any) -> None:
        self._score, self._is_zero = score, all(x is None for x in tangents)
        like, dtype = score._trained[0], np.promote_types(score._sum_dtype, sum_dtype)
        if self._is_zero:
            self._tangents: Any = np.broadcast_to(np.zeros_like(like, dtype=dtype, shape=(1,)), (score._elements,))
            return
        of_wanted = [x for x, wanted in zip(tangents, score._wanted) if wanted]
        if len(of_wanted) == 1 and of_wanted[0] is not None and of_wanted[0].dtype == dtype:
            self._tangents = of_wanted[0].reshape(-1)
            return
        self._tangents = np.zeros_like(like, dtype=dtype, shape=(score._elements,))
        for into, x in zip(score._split(self._tangents), of_wanted):
            if x is not None:
                into[...] = x.reshape(into.shape)               # a bias on a grid is flat in the order of boxes

    @property
    def _on_host(self) -> list[Any]:
        return [x for x in self._arrays().values() if isinstance(x, np.ndarray)]

    def _arrays(self) -> dict[str, Any]:
        return {**self._score._arrays(), "tangents": self._tangents}

    def _within(self, frame: Any) -> ScoreTangent:
        return self

    def _of_value(self, S: Any) -> Any:
        """The tangent of what the part makes of S where S has none."""
        return self._of_each(0, S)

    def _of_derivative(self, S: Any) -> Any:
        """The tangent of the part's derivative at S where S has none."""
        return self._of_each(1, S)

    def _of_each(self, order: int, S: Any) -> Any:
        from ..functions.compiled.reads import along  # Numba is not imported before it is needed

        if self._is_zero:
            return np.zeros_like(S)
        score, tangents = self._score, self._tangents.astype(np.float64)
        tangent = along(score._identity, score._counted, order)
        found = score._of_each(lambda *element: tangent(*element, score._looked_up, tangents), S)
        return np.where(np.isneginf(S), 0, found)


class Identity:
    """What functions are as they are now: two are the same if they do the same, with the same values."""

    def __init__(
        self,
        function: Callable[..., Any],
        derivative: Callable[..., Any] | None = None,
        second: Callable[..., Any] | None = None,
    ) -> None:
        given = zip(ORDERS, (function, derivative, second))
        self.key: tuple[Any, ...] = tuple([None if x is None else frozen(x, f"Score {order}") for order, x in given])
        self.function = self.key[0]

    @cached_property
    def of_float32(self) -> Identity:
        """The same for float32."""
        made = object.__new__(Identity)
        made.key = tuple([None if function is None else function.of(np.float32) for function in self.key])
        made.function = made.key[0]
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def digest(self) -> str:
        """What stands for it in names of compiled code, on disk, too: the same in every process."""
        digests = [None if function is None else function.digest for function in self.key]
        return hashlib.sha256(repr(digests).encode()).hexdigest()[:32]


def _by_batch(*given: Any) -> list[Any]:
    """Arrays (..., heads, seqlen_q, seqlen_k) with one axis in front of the heads, of the same shape."""
    return [np.asarray(x.reshape(-1 if x.size else 0, *x.shape[-3:])) for x in np.broadcast_arrays(*given)]
