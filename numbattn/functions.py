"""Functions of the user's own as parts of a score: Score, what it is known by, and a check of its derivative."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from types import FunctionType
from typing import Any

import numpy as np

from .checks import Array, integer, number, words_for
from .entries import entries_of
from .frozen import frozen
from .scores import Part, _checked
from .values import shown

IS_A_MASK = "returns True or False, as a mask does: return s where it shows, -math.inf where it hides, or give a mask"
LOOKED_UP = tuple(map(np.dtype, "?bhilqBHIfd"))  # what compiled functions read on CPUs and GPUs


@dataclass(frozen=True, eq=False, repr=False)
class Score(Part):
    """S = function(S, batch, head, i, j, *arrays), element by element: a function of your own.

    It is an ordinary Python function of numbers, compiled by Numba: s is a float of the dtype of sums, batch the number
    of the element of the batch, in C order, the others are indices. Its arrays have no gradients yet.

    Parameters
    ----------
    function : callable
        ``function(s, batch, head, i, j, *arrays)`` returns the new score.
    derivative : callable, optional
        The derivative by s, called in the same way, in the backward pass only. By default it follows from the function,
        which is then compiled for dual numbers: operators, branches, and what math and NumPy have for floats.
    arrays : sequence of arrays, optional
        Booleans, integers, float32 or float64, of any shape and strides: what the function looks up. Nobody looks
        whether it reads beyond their ends, but `check_score`.

    Raises
    ------
    TypeError
        If the function, or one that it calls, raises or asserts, which a GPU cannot carry out, or reads what could
        change unseen: arrays around it, lists, dictionaries, attributes of other things than modules.

    See Also
    --------
    check_score : compare the derivative with finite differences, and look for what it reads outside of its arrays.

    Notes
    -----
    The function is taken when the Score is made, with the functions that it calls and the values of all globals,
    closures and attributes of modules that they read. What changes later is seen by a Score that is made later. One
    that does the same as another, defined anew in a loop, say, is not compiled again. Numbers that change from call to
    call belong into arrays. The derivative at S = -inf is 0. On a GPU a function that only adds to S is as fast as the
    parts that do, there are at most 2**24 queries and keys, and np.float32(i) has to be written float(i).

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
    """

    function: Callable[..., Any]
    derivative: Callable[..., Any] | None = None
    arrays: Sequence[Array] = ()
    _identity: Identity = field(init=False)

    def __post_init__(self) -> None:
        self._set(
            function=_function("Score function", self.function),
            derivative=None if self.derivative is None else _function("Score derivative", self.derivative),
            arrays=tuple(self.arrays),
        )
        self._set(_identity=Identity(self.function, self.derivative))
        for name, x in self._arrays().items():
            _checked(f"Score {name}", x, LOOKED_UP, "booleans, integers, float32 or float64")

    def _arrays(self) -> dict[str, Any]:
        return {f"arrays[{i}]": x for i, x in enumerate(self.arrays)}

    def _mapped(self, function: Callable[[Any], Any]) -> Score:
        copies = tuple(map(function, self.arrays))
        if all(x is y for x, y in zip(copies, self.arrays)):
            return self
        made = object.__new__(Score)  # with the function as it was taken
        made._set(function=self.function, derivative=self.derivative, arrays=copies, _identity=self._identity)
        return made

    def __reduce__(self) -> Any:
        return Score, (self.function, self.derivative, self.arrays)

    def _key(self) -> tuple[Any, ...]:
        return type(self), self._identity, tuple(map(id, self.arrays))

    @cached_property
    def _kind(self) -> tuple[Any, ...]:
        return type(self), self._identity.key, *[(x.dtype, x.ndim) for x in self.arrays]

    def _applied(self, S: Any) -> Any:
        return self._of_each(self._value, S)

    def _derivative(self, S: Any) -> Any:
        return np.where(np.isneginf(S), 0, self._of_each(self._slope, S))  # where it may be NaN

    @property
    def _value(self) -> Callable[..., Any]:
        """The function of one element, in plain Python."""
        python, arrays = self._identity.function.python, self._seen_arrays

        def value(*element: Any) -> Any:
            found = python(*element, *arrays)
            if isinstance(found, bool | np.bool_):
                raise TypeError(f"score: {self.function.__qualname__} {IS_A_MASK}")
            return found

        return value

    @property
    def _slope(self) -> Callable[..., Any]:
        """The derivative of one element."""
        derivative, arrays = self._identity.derivative, self._seen_arrays
        if derivative is not None:
            return lambda *element: derivative.python(*element, *arrays)
        compiled: Any = import_module("numbattn.element")  # Numba is not imported before it is needed
        dual: Any = import_module("numbattn.dual")
        of_dual = compiled.slope_of(self._identity)

        def slope(*element: Any) -> Any:
            with dual.naming(self.function):
                return of_dual(*element, self.arrays)

        return slope

    @property
    def _seen_arrays(self) -> tuple[Any, ...]:
        return tuple(map(entries_of, self.arrays))

    def _of_each(self, function: Callable[..., Any], S: Any) -> Any:
        """function(s, batch, head, i, j) of each element of S (..., heads, seqlen_q, seqlen_k)."""
        by_batch = S.reshape(-1 if S.size else 0, *S.shape[-3:])
        found = [function(float(s), *at) for at, s in np.ndenumerate(by_batch)]
        return np.array(found, S.dtype).reshape(S.shape)

    def __repr__(self) -> str:
        arrays = f", arrays=[{', '.join(map(shown, self.arrays))}]" if self.arrays else ""
        return f"Score({self.function.__qualname__}{arrays})"


class Identity:
    """Of functions as they are now: two are the same if they do the same, with the same values."""

    def __init__(self, function: Callable[..., Any], derivative: Callable[..., Any] | None = None) -> None:
        self.function = frozen(function, "Score function")
        self.derivative = None if derivative is None else frozen(derivative, "Score derivative")
        self.key = self.function, self.derivative

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def digest(self) -> str:
        """What stands for it in names of compiled code, on disk, too: the same in every process."""
        digests = [None if function is None else function.digest for function in self.key]
        return hashlib.sha256(repr(digests).encode()).hexdigest()[:32]


@np.errstate(under="ignore")
def check_score(
    score: Score, seqlen_q: int = 16, seqlen_k: int = 16, spread: float = 3.0, *, heads: int = 1, batch: int = 1
) -> float:
    """Compare the derivative of a score function with finite differences, and look for reads outside of its arrays.

    Compiled for a call of attention it reads what is there, or not there: nothing looks at indices. So give this
    function the lengths, heads and elements of a batch that the score is to be used with.

    Parameters
    ----------
    score : Score
    seqlen_q, seqlen_k : int, optional
        How many queries and keys there are. The function is called for all pairs; where there are more than 2**24,
        heads and batches counted, for all queries with some keys, the first and last among them, and vice versa.
    spread : float, optional
        The standard deviation of the scores, normally distributed, at which it is called.
    heads, batch : int, optional
        How many heads there are, and elements of the batch.

    Returns
    -------
    error : float
        The largest difference, relative to 1 or, if that is larger, to the derivative, at up to 256 elements.

    Raises
    ------
    TypeError
        For what is no Score.
    ValueError
        If the difference is more than 1e-4, or the function reads outside of its arrays: with the element where.

    Examples
    --------
    >>> import math, numbattn as na, numpy as np
    >>> na.check_score(na.Score(lambda s, batch, head, i, j: math.tanh(s) - abs(i - j))) < 1e-8
    True
    >>> looks_up = na.Score(lambda s, batch, head, i, j, x: s + x[j], arrays=[np.zeros(500)])
    >>> na.check_score(looks_up, 500, 501)
    Traceback (most recent call last):
      ...
    ValueError: score: <lambda> reads outside of its arrays, of shapes (500,), at batch = 0, head = 0, i = 0, j = 500
    """
    if not isinstance(score, Score):
        raise TypeError(f"score: got {words_for(score)}, expected a numbattn.Score")
    sizes = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    shape = [integer(name, size, low=1) for name, size in sizes.items()]
    rng, spread = np.random.default_rng(0), number("spread", spread)
    score = score._like(np.empty(0))
    compiled: Any = import_module("numbattn.cpu.function")
    outside = compiled.place_outside(score, shape, rng.normal(scale=spread, size=1021))
    if outside is not None:
        where = ", ".join(f"{name} = {x}" for name, x in zip(("batch", "head", "i", "j"), outside))
        shapes = ", ".join(str(x.shape) for x in score.arrays)
        raise ValueError(f"score: {score.function.__qualname__} reads outside of its arrays, of shapes {shapes}, at "
                         f"{where}")
    some = [np.unique(np.linspace(0, size - 1, most).astype(int)).tolist() for size, most in zip(shape, (1, 1, 16, 16))]
    places = list(itertools.product(*some))
    S, h = rng.normal(scale=spread, size=len(places)), 1e-5

    def each(function: Callable[..., Any], S: Any) -> Any:
        return np.array([function(float(s), *at) for s, at in zip(S, places)], np.float64)

    wanted = (each(score._value, S + h) - each(score._value, S - h)) / (2 * h)
    got = each(score._slope, S)
    errors = abs(got - wanted) / np.maximum(abs(wanted), 1)
    worst = np.argmax(errors)
    if not errors[worst] <= 1e-4:
        _, _, i, j = places[worst]
        raise ValueError(f"score: the derivative is {got[worst]:.6g}, finite differences give {wanted[worst]:.6g}, at "
                         f"s = {S[worst]:.6g}, i = {i}, j = {j}")
    return float(errors[worst])


def _function(name: str, function: Any) -> FunctionType:
    """A Python function; of a function that Numba has compiled, what it was made of."""
    function = getattr(function, "py_func", function)
    if not isinstance(function, FunctionType):
        raise TypeError(f"{name}: got {words_for(function)}, expected a Python function")
    return function
