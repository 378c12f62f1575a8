"""A check of a user's score function: its derivatives, what it reads, and whether compiled code does the same."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, cast

import numpy as np

from ..base.checks import integer, number, words_for
from ..functions.given import PLACE
from ..scores.function import Score

MOST_PLACES = 2**24  # where the function is called to find reads outside of arrays, along each axis
MOST_COMPARED = 256  # elements
MOST_READS = 16  # of an element, at most, that are compared
LARGEST_ERROR = 1e-4
NAMES = "function", "derivative", "second derivative"


@np.errstate(under="ignore")
def check_score(
    score: Score, seqlen_q: int = 16, seqlen_k: int = 16, spread: float = 3.0, *, heads: int = 1, batch: int = 1
) -> float:
    """Compare derivatives of a score function, by the score and by its arrays, with finite differences, and the
    compiled function with plain Python; look for reads outside of its arrays.

    In a call of attention the compiled function does not check indices. So pass the lengths, heads and elements of a
    batch that the score will be used with.

    Parameters
    ----------
    score : Score
    seqlen_q, seqlen_k : int, optional
        How many queries and keys there are. The function is called for all pairs, of all heads and elements of the
        batch. If these are more than 2**24, it is called for all queries with some of the others, the first and last
        among them, then for all keys likewise, and so on, about 2**24 times each.
    spread : float, optional
        The standard deviation of the scores, normally distributed, that it is called with.
    heads, batch : int, optional
        How many heads, and elements of the batch, there are.

    Returns
    -------
    error : float
        The largest error of derivatives, relative to 1 or, if that is larger, to the derivative, at up to 256 elements
        where the score is finite. The second derivative is compared if it is given, derivatives by arrays if their
        gradients are wanted.

    Raises
    ------
    TypeError
        For anything but a Score, and for a function that attention also refuses.
    ValueError
        If the error is more than 1e-4; if the function, compiled for CPUs, or for a GPU if CuPy finds one, differs from
        Python, where it may also raise an error; or if it reads outside of its arrays. The message names the element.
        For a spread that is not finite, or less than 0.

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
    if not isinstance(score, Score) or score._place != Score._place:  # an EdgeScore's function is told more
        raise TypeError(f"score: got {words_for(score)}, expected a numbattn.Score")
    shape = checked_sizes(batch=batch, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    spread = number("spread", spread)
    if not 0 <= spread < math.inf:
        raise ValueError(f"spread: got {spread}, allowed are finite numbers, 0 or more")
    score, rng = score._like(np.empty(0)), np.random.default_rng(0)
    compiled = _compiled()
    orders = range(2 if score.second is None else 3)
    value, *derivatives = [compiled.element(score, order) for order in orders]
    check_reads("score", score, shape, rng.normal(scale=spread, size=1021))
    places = list(compared(shape))
    elements = _Elements(score, places, rng.normal(scale=spread, size=len(places)))
    in_python = elements.in_python(score._value)
    elements.compare("compiled", elements.of(value), in_python)
    error, finite = 0.0, np.isfinite(in_python)
    for order, derivative in enumerate(derivatives, 1):
        error = max(error, elements.compare_derivative(order, elements.of(derivative), finite))
    if score._wants_gradient:
        error = max(error, elements.compare_reads(finite))
    cupy = cupy_if_any()
    if cupy is not None:
        _compare_on_a_gpu(cupy, score, shape, rng, spread)
    return error


def checked_sizes(**sizes: Any) -> tuple[int, ...]:
    return tuple([integer(name, size, low=1, high=2**48 - 1) for name, size in sizes.items()])


def _compiled() -> Any:
    """Functions of scores as kernels on CPUs compute them: Numba is not imported before it is needed."""
    from ..cpu import function

    return function


def check_reads(of: str, value: Any, shape: tuple[int, ...], S: Any = None) -> None:
    """Refuse a function that reads outside of its arrays. of: "score", with scores S, or "mask"."""
    from ..functions.compiled.errors import naming

    function = value._identity if S is None else value._identity.function
    with naming(value.function, of=of):
        outside = _compiled().place_outside(function, value.arrays, shape, _walks(shape), S)
    if outside is not None:
        shapes = ", ".join(str(x.shape) for x in value.arrays)
        raise ValueError(f"{of}: {value.function.__qualname__} reads outside of its arrays, of shapes {shapes}, at "
                         f"{words_of(outside)}")  # fmt: skip


def _walks(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Steps along the axes: of one walk through all places, or of several, each along all of one axis."""
    walks: list[tuple[int, ...]] = []
    for axis in sorted(range(len(shape)), key=lambda axis: -shape[axis]):
        if any(walk[axis] == 1 for walk in walks):
            continue
        room, steps = MOST_PLACES, [1] * len(shape)
        others = sorted(set(range(len(shape))) - {axis}, key=lambda axis: shape[axis])
        for left, each in zip((1, 3, 2, 1), (axis, *others)):
            most = max(int(room ** (1 / left)), 2)  # the first and the last
            if shape[each] > most:
                steps[each] = -(-(shape[each] - 1) // (most - 1))
            room //= min(shape[each], most)
        walks.append(tuple(steps))
    return walks


def compared(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Places (batch, head, i, j) far and wide, the first and the last among them."""
    lead = [min(size, 2) for size in shape[:2]]
    each = math.isqrt(MOST_COMPARED // math.prod(lead))
    counts = [*lead, *(min(size, each) for size in shape[2:])]
    return itertools.product(*[
        [round(n * (size - 1) / max(count - 1, 1)) for n in range(count)] for size, count in zip(shape, counts)
    ])  # fmt: skip


class _Elements:
    """Elements at which functions are compared."""

    def __init__(self, score: Score, places: list[tuple[int, ...]], S: Any) -> None:
        self.name, self.score, self.places, self.S = score.function.__qualname__, score, places, S

    def of(self, function: Callable[..., Any]) -> Any:
        return np.array([function(s, *place) for s, place in zip(self.S.tolist(), self.places)])

    def in_python(self, function: Callable[..., Any], shift: float = 0.0) -> Any:
        found = []
        for s, place in zip((self.S + shift).tolist(), self.places):
            with raising_nothing("score", self.name, f"s = {s:.6g}, ", place):
                found.append(float(function(s, *place)))
        return np.array(found)

    def compare(self, how: str, got: Any, want: Any) -> None:
        errors = _errors(got, want)
        worst = np.argmax(errors)
        if not errors[worst] <= LARGEST_ERROR:
            raise ValueError(f"score: {self.name}, {how} gives {got[worst]:.6g}, in Python {want[worst]:.6g}, "
                             f"{self.at(worst)}")  # fmt: skip

    def compare_derivative(self, order: int, got: Any, finite: Any) -> float:
        """The largest error of the derivative of this order, where the score is finite."""
        name, h = NAMES[order], 1e-5
        if self.score._identity.key[order] is not None:
            self.compare(f"the {name}, compiled,", got, self.in_python(self.score._element(order)))
        two = [self.in_python(self.score._element(order - 1), shift) for shift in (h, -h)]
        with np.errstate(invalid="ignore"):
            want = np.where(finite, (two[0] - two[1]) / (2 * h), 0)
        errors = _errors(np.where(finite, got, 0), want)
        worst = np.argmax(errors)
        if not errors[worst] <= LARGEST_ERROR:
            raise ValueError(f"score: the {name} is {got[worst]:.6g}, finite differences give {want[worst]:.6g}, "
                             f"{self.at(worst)}")  # fmt: skip
        return float(errors[worst])

    def compare_reads(self, finite: Any) -> float:
        """The largest error of derivatives by elements of arrays that the function reads."""
        from ..functions.compiled.reads import in_python

        arrays = [cast(Any, x).astype(np.float64) if x.dtype.kind == "f" else x for x in self.score.arrays]
        score, worst = self.score._again(arrays, self.score._wanted), 0.0
        reads = in_python(score._identity, score._wanted, score.arrays)
        for at in np.flatnonzero(finite):
            found: dict[int, float] = {}
            for element, slope in reads(self.S[at], *self.places[at]):
                found[element] = found.get(element, 0.0) + slope
            for element, got in [*found.items()][:MOST_READS]:
                worst = max(worst, self.compare_read(score, at, element, got))
        return worst

    def compare_read(self, score: Score, at: Any, element: int, got: float) -> float:
        """The error of the derivative by an element of all wanted arrays, at one of the places."""
        sizes, h = np.array([cast(Any, x).size * wanted for x, wanted in zip(score.arrays, score._wanted)]), 1e-5
        which = int(np.searchsorted(np.cumsum(sizes), element, side="right"))
        array: Any = score.arrays[which]
        place, two = tuple(map(int, np.unravel_index(element - sizes[:which].sum(), array.shape))), []
        before = array[place]
        for shift in (h, -h):
            array[place] = before + shift
            two.append(float(score._value(self.S[at], *self.places[at])))
        array[place] = before
        want = (two[0] - two[1]) / (2 * h)
        error = abs(got - want) / max(abs(want), 1)
        if not error <= LARGEST_ERROR:
            raise ValueError(f"score: the derivative by arrays[{which}]{[*place]} is {got:.6g}, finite differences "
                             f"give {want:.6g}, {self.at(at)}")  # fmt: skip
        return float(error)

    def at(self, number: Any) -> str:
        return f"at s = {self.S[number]:.6g}, {words_of(self.places[number])}"


@contextmanager
def raising_nothing(of: str, name: str, before: str, place: Any) -> Iterator[None]:
    """Refuse a function that raises an error in Python; before: words before those of the place."""
    try:
        with np.errstate(all="ignore"):  # as in compiled code
            yield
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{of}: {name} raises {type(error).__name__} in Python, {error}, at "
                         f"{before}{words_of(place)}; compiled it raises nothing") from error  # fmt: skip


def _errors(got: Any, want: Any) -> Any:
    """Relative to 1 or to what is larger; NaN, which argmax takes for the largest, where only one is a number."""
    with np.errstate(invalid="ignore"):
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        return np.where(same, 0, abs(got - want) / np.maximum(abs(want), 1))


def words_of(place: Any) -> str:
    return ", ".join(f"{name} = {x}" for name, x in zip(PLACE, place))


# ------------------------------------------------------------------------------------------------------------ on a GPU
def cupy_if_any() -> Any:
    """CuPy, if it finds a device."""
    try:
        cupy: Any = import_module("cupy")
    except ImportError:
        return None
    return cupy if cupy.cuda.is_available() else None


def _compare_on_a_gpu(xp: Any, score: Score, shape: tuple[int, ...], rng: Any, spread: float) -> None:
    """A call of attention in the first places, against numbattn.reference, where the function runs in Python."""
    from .. import api, reference

    batch, heads, seqlen_q, seqlen_k = map(min, shape, (2, 2, 16, 16))
    q, k, v = (rng.normal(size=(batch, heads, n, 8)) for n in (seqlen_q, seqlen_k, seqlen_k))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    given = q, k, v
    o, saved = api.attention_forward(*map(xp.asarray, given), scale=spread, score=score._like(xp.empty(0)))
    want, lse = reference.attention_forward(*given, scale=spread, score=score)
    for got, x in ((saved.lse, lse), (o, want)):
        errors = _errors(np.asarray(got.get() if hasattr(got, "get") else got), x)
        if not errors.max() <= LARGEST_ERROR:
            raise ValueError(f"score: {score.function.__qualname__} is not on the GPU what it is in Python: results of "
                             f"{seqlen_q} queries and {seqlen_k} keys differ by {errors.max():.2g}")  # fmt: skip
