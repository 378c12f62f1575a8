"""Score, a user's own function as a part of a score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import numpy as np

from ..base.checks import Array, dtype_of, words_for
from ..base.forks import cached_property
from ..base.values import Taken, identity, shown
from ..functions.frozen import ORDERS
from ..functions.given import PLACE, arrays_given, check_signature, python_function
from .element import FunctionPart, Identity


@dataclass(frozen=True, eq=False, repr=False)
class Score(Taken, FunctionPart):
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
    _of: tuple[int | None, Any] | None = field(init=False, default=None)  # a table's heads, windows of a grid
    _boxes: tuple[bool, tuple[int, ...]] | None = field(init=False, default=None)
    _turns: Any = field(init=False, default=None)  # of a bias by offset in the order of boxes: how its table is read

    _is_linear = False
    _place: ClassVar[tuple[str, ...]] = PLACE  # what the function is told of an element
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
            check_signature(f"Score {order}", given, ("s", *self._place), len(self.arrays))
        self._set(_identity=Identity(*self._functions))

    @property
    def _function(self) -> Callable[..., Any]:
        return self.function

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
        made = object.__new__(type(self))
        made._set(**dict(zip(ORDERS, self._functions)), arrays=tuple(arrays), gradient=gradient)
        made._set(_identity=self._identity, _of=self._of, _boxes=self._boxes, _turns=self._turns)
        return made

    def _with(self, **values: Any) -> Score:
        """It, with the function as it was taken, and other values."""
        made = self._again(self.arrays, self._wanted)
        made._set(**values)
        return made

    @cached_property
    def _on_host(self) -> list[Any]:
        own = self.arrays if self._of is None else self.arrays[:1]  # nobody else has the others
        return [x for x in own if isinstance(x, np.ndarray)]

    def _in_order(self, order: Any) -> Score | None:
        if self._of is None:
            return None
        return cast(Score, order.bias(self, self._of[1]))

    def _in_order_of(self, array: Any) -> Any:
        return array if self._turns is None else self._turns.by_steps(array)

    def _as_given(self, gradient: Any) -> Any:
        return gradient if self._turns is None else self._turns.by_entries(gradient, self.arrays[0].shape[0])

    @property
    def _is_trained_on_grid(self) -> bool:
        return self._of is not None and self._wanted[0]

    def _fit(self, batch: tuple[int, ...], seqlen_q: int, seqlen_k: int) -> None:
        super()._fit(batch, seqlen_q, seqlen_k)
        if self._of is not None:
            heads, tokens, wanted = self._of[0], self._of[1].tokens, batch[-1] if batch else 1
            if heads is not None and wanted > heads:
                raise ValueError(f"score: got {wanted} heads, expected at most {heads}, as many as the table has")
            if max(seqlen_q, seqlen_k) > tokens:
                raise ValueError(f"score: got {seqlen_q} queries and {seqlen_k} keys, expected at most {tokens} of "
                                 "each, as many as the grid has tokens")  # fmt: skip

    def _asking(self, wanted: Sequence[bool]) -> Score:
        return self._again(self.arrays, tuple(wanted))

    def __reduce__(self) -> Any:
        if self._of is not None:
            return _biased, (self._of[1], self.arrays[0]), {"gradient": self.gradient}
        return type(self), (self.function, self.derivative, self.arrays, self.second, self.gradient)

    def _key(self) -> tuple[Any, ...]:
        return type(self), self._identity, self.gradient, tuple(map(identity, self.arrays)), self._of

    @property
    def _wants_gradient(self) -> bool:
        return any(self._wanted)

    @property
    def _wanted(self) -> tuple[bool, ...]:
        """Whether the gradient of each array is wanted."""
        return cast(tuple[bool, ...], self.gradient)

    def __repr__(self) -> str:
        arrays = f", arrays=[{', '.join(map(shown, self.arrays))}]" if self.arrays else ""
        return f"{type(self).__name__}({self.function.__qualname__}{arrays})"


def _biased(windows: Any, table: Any) -> Score:
    made: Score = windows.bias(table)
    return made


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
