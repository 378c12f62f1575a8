"""Score, a user's own function as a part of a score, and the identity of such functions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from ..base.checks import Array, dtype_of, words_for
from ..base.forks import cached_property
from ..base.values import Taken, identity, shown
from ..functions.entries import IS_A_MASK, entries_of
from ..functions.frozen import ORDERS, frozen
from ..functions.given import PLACE, arrays_given, check_signature, python_function
from .parts import Part


@dataclass(frozen=True, eq=False, repr=False)
class Score(Taken, Part):
    """``S = function(S, batch, head, i, j, *arrays)``, element by element: a function of your own.

    It is an ordinary Python function of numbers, compiled by Numba: s is a float of the dtype of sums, batch the number
    of the element of the batch, in C order, the others are indices. Integers, including those in arrays, are int64,
    booleans are Python's.

    Parameters
    ----------
    function : callable
        ``function(s, batch, head, i, j, *arrays)`` returns the new score.
    derivative : callable, optional
        The derivative by s, called in the same way, in the backward pass only. By default it follows from the function,
        which is then compiled for dual numbers: operators, branches, and what math and NumPy have for floats.
    arrays : sequence of arrays, optional
        What the function looks up: booleans, integers except uint64, float32 or float64, of any shape and strides.
        Arrays of integers smaller than int64 offer entries and parts, x[i], x[i, j], iteration, shape, ndim, size, T
        and len. Only `check_score` notices reads beyond their ends.
    second : callable, optional
        The derivative of `derivative` by s, called in the same way, in the backward pass of the backward pass only. By
        default it follows from `derivative`, or from the function, which is then compiled for dual numbers of dual
        numbers.
    gradient : bool or sequence of bools, optional
        Whether gradients of the arrays are wanted: of all arrays of floats, or one bool for each array. They follow
        from the function by dual numbers, even if `derivative` is given, and are added up where it reads: it is called
        once more for each element that it reads. Arrays with a gradient offer entries and parts, x[i], x[i, j], shape,
        ndim, size, T and len. Tangents of these gradients follow by dual numbers of dual numbers, and the tangent of
        the derivative by s along the arrays follows from `derivative`, if that is given.

    Raises
    ------
    ValueError
        If there is `second` and no `derivative`; if `gradient` has not as many bools as there are arrays.
    TypeError
        For a gradient of an array that is not of floats.
        If the function, or one that it calls, raises or asserts, which a GPU cannot carry out, or reads what could
        change unseen: global or enclosing arrays, lists, dictionaries, attributes of anything but modules. If it has
        integers that int64 cannot hold, or np.uint8 and its kind. If it cannot be called with so many arrays. In the
        first call of attention, before anything runs, if the compiled function might still raise an error or allocate
        memory, as for lists, strings or an entry that a tuple may lack; if it prints, returns None or a boolean, as a
        mask does, or has int ** int or ~ of a boolean, which mean something else in compiled code than in Python.

    See Also
    --------
    check_score : compare derivatives with finite differences, and look for what it reads outside of its arrays.

    Notes
    -----
    The function is taken when the Score is made, with the functions that it calls and the values of all globals,
    closures and attributes of modules that they read; only a Score made later sees later changes. Copies keep what was
    taken; a pickle, when it is loaded, makes a new Score. A function that does the same as another one, such as one
    defined again in a loop, is not compiled again. Numbers that change from call to call belong in arrays. Divisions by
    0, roots and logarithms give what NumPy gives, inf or NaN, or 0 for integers. Derivatives at S = -inf are 0,
    those by elements of arrays, too. Floats that are written down have the precision of S, float32 for half precision,
    too, unless an array is float64. In a function that branches or rounds, which their last bits may decide, they stay
    float64 beside numbers of integers, and on a GPU everywhere. There a function that only adds to S is as fast as the
    parts that do, 2.0 * s is faster than 2 * s, there may be at most 2**24 queries and keys, and np.float32(i) has to
    be written float(i).

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> def same_group(s, batch, head, i, j, group):
    ...     return s if group[i] == group[j] else s - 4.0
    >>> q, k = np.zeros((2, 3, 8))
    >>> score = na.Score(same_group, arrays=[np.array([0, 0, 1])])
    >>> na.attention_weights(q, k, score=score).round(2)
    array([[0.5 , 0.5 , 0.01],
           [0.5 , 0.5 , 0.01],
           [0.02, 0.02, 0.96]])

    A trained table of biases by distance, as in T5: a bucket for each distance up to 7, then on a logarithmic scale up
    to 128.

    >>> distances = np.arange(300)
    >>> buckets = 8 + np.log(np.maximum(distances, 8) / 8) / np.log(128 / 8) * 8
    >>> buckets = np.where(distances < 8, distances, np.minimum(buckets, 15)).astype(int)
    >>> def relative(s, batch, head, i, j, table, buckets):
    ...     return s + table[buckets[abs(i - j)], head]
    >>> table, (q, k, v, do) = np.zeros((16, 2)), np.ones((4, 2, 300, 8))
    >>> score = na.Score(relative, arrays=[table, buckets], gradient=True)
    >>> o, backprop = na.attention_vjp(q, k, v, causal=True, score=score)
    >>> dtable, _ = backprop(do).score
    >>> dtable.shape
    (16, 2)
    """

    function: Callable[..., Any]
    derivative: Callable[..., Any] | None = None
    arrays: Sequence[Array] = ()
    second: Callable[..., Any] | None = None
    gradient: bool | Sequence[bool] = False
    _identity: Identity = field(init=False)

    _is_nonlinear = True
    _examples = (("function", lambda shape, dtype, gradient: Score(_far)),)

    def __post_init__(self) -> None:
        for order in ORDERS:
            if order == "function" or getattr(self, order) is not None:
                self._set(**{order: python_function(f"Score {order}", getattr(self, order))})
        if self.second is not None and self.derivative is None:
            raise ValueError("Score second: got one without a derivative, expected both or neither")
        self._set(arrays=arrays_given("Score", self.arrays))
        self._set(gradient=_wanted(self.gradient, self.arrays))
        for order, given in zip(ORDERS, self._functions):
            check_signature(f"Score {order}", given, ("s", *PLACE), len(self.arrays))
        self._set(_identity=Identity(*self._functions))

    @property
    def _functions(self) -> tuple[Any, ...]:
        return tuple([getattr(self, order) for order in ORDERS])

    def _arrays(self) -> dict[str, Any]:
        return {f"arrays[{i}]": x for i, x in enumerate(self.arrays)}

    def _mapped(self, function: Callable[[Any], Any]) -> Score:
        copies = tuple(map(function, self.arrays))
        if all(x is y for x, y in zip(copies, self.arrays)):
            return self
        return self._again(copies, self._wanted)

    def _again(self, arrays: Sequence[Any], gradient: tuple[bool, ...]) -> Score:
        """A Score of the function as it was taken."""
        made = object.__new__(Score)
        made._set(**dict(zip(ORDERS, self._functions)), arrays=tuple(arrays), gradient=gradient)
        made._set(_identity=self._identity)
        return made

    def _asking(self, wanted: Sequence[bool]) -> Part:
        return self._again(self.arrays, tuple(wanted))

    def __reduce__(self) -> Any:
        return Score, (self.function, self.derivative, self.arrays, self.second, self.gradient)

    def _key(self) -> tuple[Any, ...]:
        return type(self), self._identity, self.gradient, tuple(map(identity, self.arrays))

    def _identity_of(self, dtype: Any) -> Identity:
        """The Identity as kernels compile it, for S of this dtype."""
        is_narrow = dtype == np.float32 and all(x.dtype != np.float64 for x in self.arrays)
        return self._identity.of_float32 if is_narrow else self._identity

    @cached_property
    def _kind(self) -> tuple[Any, ...]:
        return type(self), self._identity.key, *[(x.dtype, x.ndim) for x in self.arrays]

    @property
    def _wants_gradient(self) -> bool:
        return any(self._wanted)

    @property
    def _wanted(self) -> tuple[bool, ...]:
        """Whether the gradient of each array is wanted."""
        return cast(tuple[bool, ...], self.gradient)

    @property
    def _trained(self) -> list[Any]:
        """The arrays whose gradients are wanted."""
        return [x for x, wanted in zip(self.arrays, self._wanted) if wanted]

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
            return (None,) * len(self.arrays)
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

        by_read, summed = in_python(self._identity, self._wanted, self.arrays), np.zeros(self._elements)
        S, dS = _by_batch(S, dS)
        for at in zip(*np.nonzero((dS != 0) & ~np.isneginf(S))):
            for place, slope in by_read(float(S[at]), *map(int, at)):
                summed[place] += slope * dS[at]
        return summed

    def _along(self, S: Any, tS: Any, tangent: Any) -> Any:
        found = self._derivative(S) * tS
        return found if tangent is None else found + tangent._of_value(S)

    def _bend(self, S: Any, tS: Any, tangent: Any) -> Any:
        found = self._curvature(S) * tS
        return found if tangent is None else found + tangent._of_derivative(S)

    def _gradient_along(self, dS: Any, tdS: Any, S: Any, tS: Any, tangent: Any) -> Any:
        from ..functions.compiled.reads import in_python_along  # Numba is not imported before it is needed

        tangents, summed = tangent._tangents.astype(np.float64), np.zeros(self._elements)
        by_read = in_python_along(self._identity, self._wanted, self.arrays, tangents)
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
                raise TypeError(f"score: {self.function.__qualname__} {IS_A_MASK}")
            return found

        return value

    def _element(self, order: int) -> Callable[..., Any]:
        """The function of this order for one element: in plain Python, if the user has written it."""
        given, arrays = self._identity.key[order], self._seen_arrays
        if given is not None:
            return lambda *element: given.python(*element, *arrays)
        from ..functions.compiled.element import in_python  # Numba is not imported before it is needed

        return in_python(self._identity, order, self.arrays)

    @property
    def _seen_arrays(self) -> tuple[Any, ...]:
        return tuple(map(entries_of, self.arrays))

    def _of_each(self, function: Callable[..., Any], S: Any) -> Any:
        """function(s, batch, head, i, j) for each element of S (..., heads, seqlen_q, seqlen_k)."""
        by_batch = S.reshape(-1 if S.size else 0, *S.shape[-3:])
        found = [function(float(s), *at) for at, s in np.ndenumerate(by_batch)]
        return np.array(found, S.dtype).reshape(S.shape)

    def __repr__(self) -> str:
        arrays = f", arrays=[{', '.join(map(shown, self.arrays))}]" if self.arrays else ""
        return f"Score({self.function.__qualname__}{arrays})"


class ScoreTangent:
    """A Score, and the tangents of its arrays.

    tangents: of each array, None where it is zero. In _tangents they are one after the other, of arrays whose gradients
    are wanted; where all are zero, all are one element.
    """

    _has_step, _is_nonlinear, _own_axes = True, False, None
    _wants_gradient = _is_private = False

    def __init__(self, score: Score, tangents: Sequence[Any], sum_dtype: Any) -> None:
        self._score, self._is_zero = score, all(x is None for x in tangents)
        like, dtype = score._trained[0], np.promote_types(score._sum_dtype, sum_dtype)
        if self._is_zero:
            self._tangents: Any = np.broadcast_to(np.zeros_like(like, dtype=dtype, shape=(1,)), (score._elements,))
            return
        of_wanted = [x for x, wanted in zip(tangents, score._wanted) if wanted]
        self._tangents = np.zeros_like(like, dtype=dtype, shape=(score._elements,))
        for into, x in zip(score._split(self._tangents), of_wanted):
            if x is not None:
                into[...] = x

    @property
    def _is_on_host(self) -> bool:
        return self._score._is_on_host or isinstance(self._tangents, np.ndarray)

    def _arrays(self) -> dict[str, Any]:
        return {**self._score._arrays(), "tangents": self._tangents}

    def _of_value(self, S: Any) -> Any:
        """The tangent of what the Score makes of S, where S has none."""
        return self._of_each(0, S)

    def _of_derivative(self, S: Any) -> Any:
        """The tangent of the Score's derivative at S, where S has none."""
        return self._of_each(1, S)

    def _of_each(self, order: int, S: Any) -> Any:
        from ..functions.compiled.reads import along  # Numba is not imported before it is needed

        if self._is_zero:
            return np.zeros_like(S)
        score, tangents = self._score, self._tangents.astype(np.float64)
        tangent = along(score._identity, score._wanted, order)
        found = score._of_each(lambda *element: tangent(*element, score.arrays, tangents), S)
        return np.where(np.isneginf(S), 0, found)


class Identity:
    """What functions are as they are now: two are the same if they do the same, with the same values."""

    def __init__(self, *functions: Callable[..., Any] | None) -> None:
        """functions: in the order of ORDERS."""
        taken = [None if x is None else frozen(x, f"Score {order}") for order, x in zip(ORDERS, functions)]
        self.key: tuple[Any, ...] = tuple(taken)
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


def _far(s: Any, batch: Any, head: Any, i: Any, j: Any) -> Any:
    return s / (1 + abs(i - j))


def _wanted(gradient: Any, arrays: Sequence[Any]) -> tuple[bool, ...]:
    """Whether the gradient of each array is wanted."""
    if isinstance(gradient, bool | np.bool_):
        wanted = tuple([bool(gradient) and dtype_of(x).kind == "f" for x in arrays])
        if gradient and not any(wanted):
            raise ValueError("Score gradient: got True, expected arrays of floats, which have one")
        return wanted
    if not isinstance(gradient, Sequence) or not all(isinstance(x, bool | np.bool_) for x in gradient):
        raise TypeError(f"Score gradient: got {words_for(gradient)}, expected True, False, or one of them an array")
    if len(gradient) != len(arrays):
        raise ValueError(f"Score gradient: got {len(gradient)} bools, expected {len(arrays)}, one for each array")
    for number, (wanted_too, x) in enumerate(zip(gradient, arrays)):
        if wanted_too and dtype_of(x).kind != "f":
            raise TypeError(f"Score gradient[{number}]: got True for arrays[{number}] of {dtype_of(x)}, expected "
                            "False: only floats have a gradient")  # fmt: skip
    return tuple(map(bool, gradient))
