"""Scores: what happens to S = scale Q K^T before the mask, in the order in which the parts are given.

Every part is an element-wise function of S, or, as a Sink, one more logit of each row. It says what it does to S, its
derivative, and the gradients of its arrays, all three as NumPy's functions do, which pass CuPy's arrays on to CuPy.
Backends have tiles of their own for each kind of part. Parts are values: two are equal if their numbers are equal and
they hold the same arrays, so that a pickled copy of one with arrays is unequal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any, TypeAlias, cast

import numpy as np

from .checks import Floats, Integers, flag, floats, integers, library, number, words_for
from .origin import Crop
from .values import Held, Memo, Value, broadcasts, clip, for_queries, given, rounded, sum_broadcast

FARTHEST = 2**30  # a farther offset means the same
BESIDE = Memo("beside")  # by Segments, parts that are aligned within them


class Part(Value):
    """What all parts of a score share."""

    def _applied(self, S: Any) -> Any:
        """S (..., seqlen_q, seqlen_k) behind this part."""
        return S

    def _derivative(self, S: Any) -> Any:
        """Of what is behind this part by S, before it."""
        return 1

    def _gradient(self, dS: Any, lse: Any, delta: Any) -> Any:
        """Of its array: from dS, that of S behind it; of a Sink from lse and delta = rowsum(dO * O) - dlse."""

    def _fit(self, batch: tuple[int, ...], seqlen_q: int, seqlen_k: int) -> None:
        """Refuse arrays that do not broadcast to the batch axes, heads included, and the lengths."""

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        """Its arrays over all batch axes, as those of a mask."""
        return ()

    def _within(self, frame: Any) -> Part:
        """The part beside a mask with this frame, or None."""
        return self

    def _cropped(self, crop: Crop, frame: Any) -> Part:
        """The part for a part of the score matrix, in the whole of which it is beside a mask with this frame."""
        return self

    @cached_property
    def _is_on_host(self) -> bool:
        """Whether an array of it is."""
        return any(isinstance(x, np.ndarray) for x in self._arrays().values())

    @property
    def _weights(self) -> tuple[Any, ...]:
        """Its arrays that have a place among the gradients."""
        return tuple(self._arrays().values())

    @cached_property
    def _kind(self) -> tuple[Any, ...]:
        """What kernels are compiled for."""
        return type(self), *[x.dtype for x in self._arrays().values()]

    @property
    def _wants_gradient(self) -> bool:
        return False


@cache
def _first_field(kind: Any) -> str:
    """Its name: looking at all fields takes 1 us."""
    return fields(kind)[0].name


class ArrayPart(Part):
    """A part with an array, its first field, which has a gradient."""

    gradient: bool

    def __post_init__(self) -> None:
        name, part = self._name, type(self).__name__
        array = floats(f"{part} {name}", getattr(self, name))
        self._set(**{name: array, "gradient": flag(f"{part} gradient", self.gradient)})

    @property
    def _name(self) -> str:
        kind: Any = type(self)
        return _first_field(kind)

    @property
    def _array(self) -> Any:
        return getattr(self, self._name)

    @property
    def _weights(self) -> tuple[Any, ...]:
        return (self._array,)

    @property
    def _wants_gradient(self) -> bool:
        return self.gradient

    def _whole_shape(self, batch: tuple[int, ...], seqlen_q: int, seqlen_k: int) -> tuple[int, ...]:
        """What its array is broadcast to."""
        return batch

    def _fit(self, batch: tuple[int, ...], seqlen_q: int, seqlen_k: int) -> None:
        array, shape = self._array, self._whole_shape(batch, seqlen_q, seqlen_k)
        if not broadcasts(array.shape, shape):
            raise ValueError(f"score: {type(self).__name__} {self._name}: got the shape {array.shape}, which does not "
                             f"broadcast to {shape}")


class DistancePart(ArrayPart):
    """A part that depends on how far a key is ahead of a query's own key, i + offset."""

    offset: Integers | None
    _frame: Any = None  # of a mask, within which it is aligned

    def __post_init__(self) -> None:
        super().__post_init__()
        name = f"{type(self).__name__} offset"
        self._set(offset=None if self.offset is None else integers(name, self.offset))

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        return given(offset=self.offset)

    def _within(self, frame: Any) -> Part:
        if frame is None or self.offset is not None:
            return self
        part = BESIDE.get(self, frame)
        if part is None:
            part = replace(cast(Any, self))
            part._set(_frame=frame)
            BESIDE.keep(self, frame, part)
        return cast(Part, part)

    def _cropped(self, crop: Crop, frame: Any) -> Part:
        offset = self.offset
        if frame is not None and offset is None:
            offset = frame._own_key(crop.seqlen_q, crop.seqlen_k)
            if offset is None:
                raise ValueError(f"score: got {self} without an offset beside Segments of unequal queries and keys, "
                                 "which is not distributed: give it an offset")
        return replace(cast(Any, self), offset=crop.offset(offset))

    def _whole_offset(self, seqlen_q: int, seqlen_k: int) -> Any:
        """An int, or an integer array over the batch axes; None where it depends on the frame."""
        if self._frame is not None:
            return self._frame._own_key(seqlen_q, seqlen_k)
        return seqlen_k - seqlen_q if self.offset is None else clip(self.offset, -FARTHEST, FARTHEST)

    def _ahead(self, S: Any) -> Any:
        """How far each key is ahead of each query's own."""
        m, n = S.shape[-2:]
        i, j, offset = np.arange(m, like=S), np.arange(n, like=S), self._whole_offset(m, n)
        own = self._frame._rows(i, n).own if offset is None else i + for_queries(offset)
        return j - own[..., None]


Scores: TypeAlias = Part | Sequence[Part] | None


@dataclass(frozen=True, eq=False, repr=False)
class Softcap(Part):
    """S = cap tanh(S / cap): no score is beyond the cap. One of -inf, by a Bias before it, say, becomes visible again.

    Parameters
    ----------
    cap : float
        Finite and > 0.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, k = np.full((2, 2, 4), 100.0)
    >>> na.attention_weights(q * [[1], [-1]], k, score=na.Softcap(50.0)).round(2)
    array([[0.5, 0.5],
           [0.5, 0.5]])
    """

    cap: float

    def __post_init__(self) -> None:
        cap = number("Softcap cap", self.cap)
        if not float(np.finfo(np.float32).tiny) <= cap <= float(np.finfo(np.float32).max):
            raise ValueError(f"Softcap cap: got {self.cap!r}, allowed finite and > 0, as a float32")
        self._set(cap=cap)

    def _applied(self, S: Any) -> Any:
        cap = S.dtype.type(self.cap)
        return cap * np.tanh(S / cap)

    def _derivative(self, S: Any) -> Any:
        return 1 - np.tanh(S / S.dtype.type(self.cap)) ** 2


@dataclass(frozen=True, eq=False, repr=False)
class Alibi(DistancePart):
    """S = S - slope |i + offset - j|: the farther a key from a query's own, the less it counts.

    Parameters
    ----------
    slopes : array or list, broadcast to the batch axes, (..., heads), or float
        Any floating dtype.
    gradient : bool, optional
        Whether the gradient of the slopes is wanted.
    offset : int or integer array over the batch axes, optional
        The own key of query 0. Default: seqlen_k - seqlen_q, which aligns the last query with the last key, as in
        `Causal`, within `Segments` those of each segment.

    Notes
    -----
    Press, Smith and Lewis, "Train Short, Test Long: Attention with Linear Biases" (ICLR 2022).

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, k = np.zeros((2, 3, 8))
    >>> na.attention_weights(q, k, causal=True, score=na.Alibi(np.log(2.0))).round(2)
    array([[1.  , 0.  , 0.  ],
           [0.33, 0.67, 0.  ],
           [0.14, 0.29, 0.57]])
    """

    slopes: Floats
    gradient: bool = True
    offset: Integers | None = field(default=None, kw_only=True)

    def _applied(self, S: Any) -> Any:
        return S - self._array.astype(S.dtype)[..., None, None] * abs(self._ahead(S)).astype(S.dtype)

    def _gradient(self, dS: Any, lse: Any, delta: Any) -> Any:
        distance = abs(self._ahead(dS)).astype(dS.dtype)
        return sum_broadcast(-(dS * distance).sum(axis=(-2, -1)), self._array.shape)


@dataclass(frozen=True, eq=False, repr=False)
class Bias(ArrayPart):
    """S = S + bias.

    A score of -inf is as good as masked, and a row of nothing else sees nothing. The lowest finite number, with which
    padding is often written, is visible: a row of nothing else has the mean of v.

    Parameters
    ----------
    bias : array or list, broadcast to (..., seqlen_q, seqlen_k), or float
        Any floating dtype. Broadcast as NumPy does, axes of size 1 and missing axes included, against the batch axes,
        heads included, and (seqlen_q, seqlen_k). On CPUs it is read as it lies, whatever its strides and dtype.
    gradient : bool, optional
        Whether its gradient is wanted: of its own shape, summed over axes along which it is broadcast.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, k, v, do = np.random.default_rng(0).standard_normal((4, 8, 100, 64))
    >>> pairs = np.zeros((100, 100))
    >>> o, backprop = na.attention_vjp(q, k, v, score=na.Bias(pairs))
    >>> (dpairs,) = backprop(do).score
    >>> dpairs.shape
    (100, 100)
    """

    bias: Floats
    gradient: bool = True

    _axis_of_queries = -2

    def _whole_shape(self, batch: tuple[int, ...], seqlen_q: int, seqlen_k: int) -> tuple[int, ...]:
        return *batch, seqlen_q, seqlen_k

    def _applied(self, S: Any) -> Any:
        return S + self._array.astype(S.dtype)

    def _gradient(self, dS: Any, lse: Any, delta: Any) -> Any:
        return sum_broadcast(dS, self._array.shape)

    def _cropped(self, crop: Crop, frame: Any) -> Part:
        return replace(self, bias=crop.of_keys("score: Bias", crop.of_queries("score: Bias", self._array)))


@dataclass(frozen=True, eq=False, repr=False)
class RelativeBias(DistancePart):
    """S = S + table[..., clip(j - (i + offset), -reach, reach) + reach], with reach = (entries - 1) / 2.

    Parameters
    ----------
    table : array or list, (..., 2 reach + 1)
        Any floating dtype; its leading axes are broadcast to the batch axes, (..., heads).
    gradient : bool, optional
        Whether its gradient is wanted.
    offset : int or integer array over the batch axes, optional
        The own key of query 0. Default: seqlen_k - seqlen_q, which aligns the last query with the last key, as in
        `Causal`, within `Segments` those of each segment: so one query and all keys, a step of decoding, take the table
        of training as it is.

    Notes
    -----
    On a GPU the gradient of the table is slow beside `Segments` of unequal queries and keys: each score looks up where
    it belongs.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> table = np.log([0.5, 1.0, 2.0])
    >>> q, k = np.zeros((2, 3, 8))
    >>> na.attention_weights(q, k, score=na.RelativeBias(table)).round(2)
    array([[0.2 , 0.4 , 0.4 ],
           [0.14, 0.29, 0.57],
           [0.25, 0.25, 0.5 ]])
    >>> na.attention_weights(q[-1:], k, score=na.RelativeBias(table)).round(2)
    array([[0.25, 0.25, 0.5 ]])
    >>> na.attention_weights(q[-1:], k, score=na.RelativeBias(table, offset=0)).round(2)
    array([[0.2, 0.4, 0.4]])
    """

    table: Floats
    gradient: bool = True
    offset: Integers | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._array.ndim < 1 or self._array.shape[-1] % 2 == 0:
            raise ValueError(f"RelativeBias table: got the shape {self._array.shape}, expected (..., 2 reach + 1), "
                             "an odd number of entries")

    @property
    def _reach(self) -> int:
        return self._array.shape[-1] // 2

    def _whole_shape(self, batch: tuple[int, ...], seqlen_q: int, seqlen_k: int) -> tuple[int, ...]:
        return *batch, self._array.shape[-1]

    def _entries(self, S: Any) -> Any:
        """Which entry each element takes."""
        return np.clip(self._ahead(S), -self._reach, self._reach) + self._reach

    def _applied(self, S: Any) -> Any:
        tables = np.broadcast_to(self._array.astype(S.dtype)[..., None, :], (*S.shape[:-1], self._array.shape[-1]))
        return S + np.take_along_axis(tables, np.broadcast_to(self._entries(S), S.shape), -1)

    def _gradient(self, dS: Any, lse: Any, delta: Any) -> Any:
        entries, offset = self._array.shape[-1], self._whole_offset(*dS.shape[-2:])
        if isinstance(offset, int):
            table = _by_entry(sums_along_diagonals(dS), dS.shape[-2] - 1 + offset, entries)
            return sum_broadcast(table, self._array.shape)
        at = self._entries(dS)
        sums = [np.where(at == entry, dS, 0).sum(axis=(-2, -1)) for entry in range(entries)]
        return sum_broadcast(np.stack(sums, axis=-1), self._array.shape)


def sums_along_diagonals(S: Any) -> Any:
    """(..., m + n - 1), from the lower left on, of matrices (..., m, n)."""
    *lead, m, n = S.shape
    skewed = np.zeros_like(S, shape=(*lead, m, m + n))
    skewed[..., :n] = S[..., ::-1, :]
    rows = skewed.reshape(*lead, m * (m + n))[..., : m * (m + n - 1)]  # each row starts one later than the one before
    return rows.reshape(*lead, m, m + n - 1).sum(axis=-2)


def _by_entry(sums: Any, own: int, entries: int) -> Any:
    """Sums along diagonals, number `own` of which is that of own keys, by the entry of a table that they take."""
    *lead, count = sums.shape
    table = np.zeros_like(sums, shape=(*lead, entries))
    first = own - entries // 2  # the diagonal of entry 0, and of all before it
    last = first + entries - 1
    table[..., 0] = sums[..., : max(first + 1, 0)].sum(axis=-1)
    table[..., -1] += sums[..., max(last, first + 1, 0) :].sum(axis=-1)
    inner = slice(min(max(first + 1, 0), count), min(max(last, 0), count))
    table[..., inner.start - first : inner.stop - first] = sums[..., inner]
    return table


@dataclass(frozen=True, eq=False, repr=False)
class Sink(ArrayPart):
    """One more logit in the softmax of each row, which has no value: rows of P sum to less than 1.

    A query that sees no key has o = 0 and lse = -inf all the same.

    Parameters
    ----------
    logits : array or list, broadcast to the batch axes, (..., heads), or float
        Any floating dtype. Other parts of the score leave them as they are.
    gradient : bool, optional
        Whether their gradient is wanted.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, k = np.zeros((2, 3, 8))
    >>> na.attention_weights(q, k, score=na.Sink(0.0))
    array([[0.25, 0.25, 0.25],
           [0.25, 0.25, 0.25],
           [0.25, 0.25, 0.25]])
    """

    logits: Floats
    gradient: bool = True

    def _logits(self, lse: Any) -> Any:
        """For each row, (..., seqlen_q), of the dtype of its lse."""
        return np.broadcast_to(rounded(self._array, lse.dtype)[..., None], lse.shape)

    @np.errstate(under="ignore")
    def _gradient(self, dS: Any, lse: Any, delta: Any) -> Any:
        """The sink has no dP, so that its dS is -P delta."""
        seen = np.isfinite(lse)
        P = np.exp(np.where(seen, self._logits(lse) - np.where(seen, lse, 0), -math.inf))
        return sum_broadcast(-(P * np.where(seen, delta, 0)).sum(axis=-1), self._array.shape)


# ----------------------------------------------------------------------------------------------- from the user's hand
def as_parts(score: Scores) -> tuple[Part, ...]:
    """The parts of what a user may give: None, a part, a list or tuple of them."""
    if score is None:
        return ()
    if isinstance(score, Part):
        return (score,)
    parts = tuple(score) if isinstance(score, list | tuple) else (None,)
    if not all(isinstance(part, Part) for part in parts):
        raise TypeError(f"score: got {words_for(score)}, expected numbattn's Softcap, Alibi, Bias, RelativeBias, Sink, "
                        "Score, or a list of them")
    if sum(isinstance(part, Sink) for part in parts) > 1:
        raise ValueError("score: got more than one Sink, allowed one")
    return parts


def sink_of(parts: tuple[Part, ...]) -> Sink | None:
    """The Sink among the parts."""
    return next((part for part in parts if isinstance(part, Sink)), None)


def _checked(name: str, array: Any, dtypes: tuple[Any, ...], words: str) -> Any:
    """An array of one of these dtypes."""
    if not library(array) or array.dtype not in dtypes:
        raise TypeError(f"{name}: got {words_for(array)}, expected an array of NumPy or CuPy, of {words}")
    return array
