"""Arrays and options -> one frozen Problem. Whatever does not fit in a call is refused here, in fitting.py and in
caches/ragged.py; only what one device cannot do is left to its plan."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np

from ..base.checks import (
    DTYPES,
    MOST_AXES,
    A,
    Array,
    check_apart,
    check_writable,
    dtype_of_sums,
    flag,
    library,
    no_floats,
    number,
    other_dtype,
    overlap,
    same_library,
    words_for,
)  # fmt: skip
from ..base.forks import cached_property
from ..base.origin import Origin
from ..base.values import Value, rounded
from ..caches.arrays import CacheLayout
from ..caches.kv_cache import KVCache
from ..caches.masked import masked
from ..caches.ragged import Ragged, ragged
from ..dropout import Dropout
from ..masks import All, Causal, Mask, as_mask
from ..scores import Part, Scores, as_parts
from .fitting import check_numbers, fitted_mask, fitted_score

B = TypeVar("B", bound=Array)  # as A, of functions in a class
NOTHING_HIDDEN, CAUSAL = All(), All((Causal(),))
SCALES = {  # from, to, by the dtype of sums: times log2(e) it has all its digits and is finite
    np.dtype(dtype): (float(np.finfo(dtype).tiny), float(np.finfo(dtype).max) / 2) for dtype in (np.float32, np.float64)
}


@dataclass(frozen=True)
class Problem:
    """All that the plan of a call depends on: shapes, strides, dtype, the kinds of masks and scores, dropout or not. It
    is hashable and holds neither arrays nor the numbers that kernels take at run time."""

    xp: str  # "numpy" or "cupy"
    dtype: np.dtype[Any]  # of q, k and v
    batch: tuple[int, ...]  # axes before the last two of o, broadcast; the last of them, if any, is the query heads
    heads: int
    heads_k: int  # heads is a multiple of it
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    shapes: tuple[tuple[int, ...], ...]  # of q, k and v; of a cache as if it had no pages
    strides: tuple[tuple[int, ...], ...]  # of q, k and v, in bytes; of a cache with pages those of its pages
    mask_kinds: tuple[type, ...]
    score_kinds: tuple[tuple[Any, ...], ...]
    dropout: bool
    cache: CacheLayout | None = None  # of the KVCache that holds k and v
    wide: bool = False  # whether results have the dtype of sums: they are parts of a larger result

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:  # for copies and pickle: a hash holds in its own process
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def _hash(self) -> int:  # computed once: every call hashes its Problem
        return hash(tuple([getattr(self, field.name) for field in fields(self)]))

    @cached_property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.batch, self.seqlen_q, self.head_dim_v)

    @cached_property
    def lse_shape(self) -> tuple[int, ...]:
        return (*self.batch, self.seqlen_q)

    @cached_property
    def score_shape(self) -> tuple[int, ...]:
        """The shape of S."""
        return (*self.batch, self.seqlen_q, self.seqlen_k)

    @cached_property
    def sum_dtype(self) -> np.dtype[Any]:
        """The dtype of all sums, of lse and of dlse."""
        return dtype_of_sums(self.dtype)

    @cached_property
    def result_dtype(self) -> np.dtype[Any]:
        """The dtype of o, dq, dk and dv."""
        return self.sum_dtype if self.wide else self.dtype

    @property
    def group_size(self) -> int:
        """Query heads for each key head; 0 without heads."""
        return self.heads // max(self.heads_k, 1)

    @cached_property
    def sharers(self) -> int:
        """How many elements of the batch, heads aside, share their keys and values: all of them, or 1."""
        axes = [zip(shape[:-3], strides) for shape, strides in zip(self.shapes[1:], self.strides[1:])]
        return math.prod(self.batch[:-1]) if all(n == 1 or stride == 0 for n, stride in chain(*axes)) else 1

    @property
    def page_size(self) -> int:
        """Tokens of a page of a cache, or 0."""
        return (self.cache and self.cache.page_size) or 0

    @cached_property
    def is_empty(self) -> bool:
        """Whether there are no scores at all."""
        return not (self.seqlen_q and self.seqlen_k and math.prod(self.batch))

    @cached_property
    def scale(self) -> float:
        """The scale of the scores, unless one is given."""
        return 1 / math.sqrt(max(self.head_dim, 1))

    @cached_property
    def origin(self) -> Origin:
        """Unless the call is a part of a larger attention."""
        return Origin(heads=self.heads)

    @cached_property
    def matrices(self) -> tuple[int, int]:
        """How many score matrices there are: batch x heads, as (batch, heads)."""
        return math.prod(self.batch[:-1]), self.heads


class Inputs(NamedTuple):
    """The arrays of a call as given, its mask and score with arrays of q's library, and its numbers."""

    q: Any  # as a batch, where it was packed
    k: Any
    v: Any
    mask: Mask
    scale: float
    dropout: Dropout | None
    score: tuple[Part, ...]
    cache: KVCache | None = None  # that has k and v
    origin: Origin = Origin()
    packing: Ragged | None = None  # of q


@dataclass(frozen=True, eq=False, repr=False)
class Saved(Generic[A]):
    """What the forward pass leaves for the backward pass. It refers to q, k, v and o; it does not copy them.

    Attributes
    ----------
    lse : array, (..., seqlen_q), float32, or float64 for float64
        The natural logarithm of the sum of exponentials of the scores each query sees; -inf where it sees none.
        Dropout does not touch it.
    o : array, (..., seqlen_q, head_dim_v)
        The output.

    See Also
    --------
    Saved.of : from arrays, where a library keeps nothing else between the passes.
    """

    problem: Problem
    inputs: Inputs
    o: A
    lse: A
    lse_low: A | None = None  # what rounding took from lse, their sum has twice its digits; None where unknown
    whole: bool = False  # whether o and lse are known to be over these keys alone: D is then rowsum(P dP), too

    @classmethod
    def of(
        cls, q: B, k: B, v: B, o: B, lse: B, *, causal: bool = False, mask: Mask | Array | None = None,
        scale: float | None = None, dropout: Dropout | None = None, score: Scores = None,
    ) -> Saved[B]:  # fmt: skip
        """What `attention_forward` returned as `saved`, rebuilt from its arrays and options.

        For custom gradients in other libraries, which keep only arrays between the passes.

        Parameters
        ----------
        q, k, v, causal, mask, scale, dropout, score
            As they were given to `attention_forward`.
        o : array, (..., seqlen_q, head_dim_v)
            What it returned.
        lse : array, (..., seqlen_q)
            Its ``saved.lse``.

        Returns
        -------
        Saved

        Raises
        ------
        TypeError, ValueError
            As in `attention`, and for an o or lse of another library, shape or dtype.

        Examples
        --------
        >>> import numbattn as na, numpy as np
        >>> q, k, v, do = np.random.default_rng(0).standard_normal((4, 100, 64))
        >>> o, saved = na.attention_forward(q, k, v, causal=True)
        >>> again = na.Saved.of(q, k, v, o, saved.lse, causal=True)
        >>> dq, dk, dv = na.attention_backward(do, again)
        """
        problem, inputs = describe(q, k, v, causal, mask, scale, dropout, score, may_wait=True)
        _check_result("o", o, "what attention returns", problem.out_shape, problem.dtype, inputs)
        _check_result("lse", lse, "saved.lse", problem.lse_shape, problem.sum_dtype, inputs)
        return Saved(problem, inputs, o, lse)

    def __reduce__(self) -> Any:  # a Score pickles its function, from which its kind follows
        problem = replace(self.problem, score_kinds=())
        return _saved_again, (problem, self.inputs, self.o, self.lse, self.lse_low, self.whole)

    def _exactly(self, x: Any) -> Any:
        """Rows that are multiplied by exp(S - lse), so that lse counts with its low part."""
        return x if self.lse_low is None else x * np.exp(-cast(Any, self.lse_low))

    def __repr__(self) -> str:
        problem, packing = self.problem, self.inputs.packing
        q = problem.shapes[0] if packing is None else packing.shape_of(problem.shapes[0])
        return (f"<Saved: q {q}, k {problem.shapes[1]}, v {problem.shapes[2]}, "
                f"{problem.dtype}, {problem.xp}>")


def _saved_again(problem: Problem, inputs: Inputs, *results: Any) -> Saved[Any]:
    return Saved(replace(problem, score_kinds=kinds_of(inputs.score)), inputs, *results)


def kinds_of(parts: Iterable[Part]) -> tuple[tuple[Any, ...], ...]:
    return tuple([part._kind for part in parts])


def describe(
    q: Any, k: Any, v: Any, causal: bool = False, mask: Mask | Array | None = None, scale: float | None = None,
    dropout: Dropout | None = None, score: Scores = None, out: Any = None, origin: Origin | None = None,
    wide: bool = False, may_wait: bool = False,
) -> tuple[Problem, Inputs]:  # fmt: skip
    """Check a call; return its Problem and its Inputs. k: an array, or a KVCache without a v, with which q may be
    packed: then the Problem is that of q as a batch, whose results `Inputs.packing` packs.

    origin, wide: for a part of a larger attention, whose results are combined in the dtype of sums; may_wait: whether
    the mask may stay as it is, if that `_may_wait`.
    """
    asked = given = mask_of(causal, mask)
    if dropout is not None and not isinstance(dropout, Dropout):
        raise TypeError(f"dropout: got {words_for(dropout)}, expected a numbattn.Dropout(p, seed)")
    cache, packing, passed = k if isinstance(k, KVCache) else None, None, q
    if cache is not None:
        packing = _packing(cache, q, v, given)
        if cache._ring is not None:
            _check_rolling(dropout, score)
        if packing is None:
            given = masked(cache, cache.lengths, given, cache._ring, q.shape[-2])
        else:
            q, given = packing.q, packing.mask
        k, v = cache.k, cache.v
    elif given._holds_arrays:
        given = given._placed
    xp = library(q)
    if xp is None or type(q) is not type(k) or type(k) is not type(v):
        xp = same_library(q=q, k=k, v=v)
    wanted = parts = () if score is None else as_parts(score)
    dtypes, shapes = (q.dtype, k.dtype, v.dtype), (q.shape, k.shape, v.shape)
    if cache is not None:
        dtypes, shapes = (q.dtype,) * 3, (q.shape, *cache._shapes)
    problem = _problem(
        xp, dtypes, shapes, (q.strides, k.strides, v.strides), given._kinds, kinds_of(parts) if parts else (),
        dropout is not None, cache and cache._layout, wide,
    )  # fmt: skip
    if given is NOTHING_HIDDEN or given is CAUSAL:
        pass  # as in most calls
    elif may_wait and given._may_wait:
        given._fit(problem.score_shape)
    elif given._holds_arrays and not given._is_immutable:
        given = fitted_mask(given, q, problem.score_shape, xp)
    else:
        check_numbers(given, problem.score_shape, xp)
    if parts:
        parts = fitted_score(parts, q, problem.score_shape, xp, given._frame)
    scale = problem.scale if scale is None else _scale(scale, problem)
    origin = problem.origin if origin is None else origin
    if out is not None:
        _check_out(out, passed, problem.out_shape if packing is None else packing.shape_of(problem.out_shape))
        if cache is not None and packing is not None:
            cache._check_device(out=out)
        arrays, caches = ({"q": passed, "k": k, "v": v}, ()) if cache is None else ({"q": passed}, (cache,))
        refuse_overlap(out, arrays, (*caches, *asked._leaves, *wanted))
    return problem, Inputs(q, k, v, given, scale, dropout, parts, cache, origin, packing)


def mask_of(causal: bool, mask: Mask | Array | None) -> Mask:
    """The mask of a call with these two options."""
    given = NOTHING_HIDDEN if mask is None else as_mask(mask)
    if causal is not False and flag("causal", causal):
        given = CAUSAL if mask is None else given._and_causal
    return given


def _packing(cache: KVCache, q: Any, v: Any, mask: Mask) -> Ragged | None:
    """Check q against a cache. Returns packed queries, which Segments announce, as a batch; None for a batch."""
    if v is not None:
        raise TypeError(f"v: got {words_for(v)} with a KVCache, which has its own: leave it out")
    if type(q) is not type(cache.k):
        same_library(q=q, KVCache=cache.k)
    cache._check_dtype(q.dtype)
    cache._check_contents()
    if mask._segments is not None:
        cache._check_device(q=q)
        return ragged(q, cache, mask)
    if q.ndim != 4 or q.shape[0] != len(cache.lengths):
        raise ValueError(f"q: got the shape {q.shape}, expected ({len(cache.lengths)}, heads, seqlen_q, head_dim): as "
                         "many sequences as the KVCache has")
    cache._check_queries(q.shape[2])
    return None


def _check_rolling(dropout: Dropout | None, score: Scores) -> None:
    """Refuse what has columns, beside a rolling cache."""
    for part in as_parts(score):
        if part._own_axes == 2 and part._weights[0].shape[-1:] not in ((), (1,)):
            raise ValueError(f"score: got {part} with a rolling KVCache, whose keys have no columns of their own, "
                             "expected Alibi, RelativeBias, or a Score, whose j is a key's position")
    if dropout is not None:
        raise ValueError(f"dropout: got {dropout} with a rolling KVCache, whose keys have no columns of their own")


def refuse_cache(k: Any, wanted: str = "gradients") -> None:
    """Refuse a KVCache where gradients or tangents are wanted."""
    if isinstance(k, KVCache):
        raise TypeError(f"k: got a KVCache, which has no {wanted}: pass k and v as arrays")


def without_v(q: Any, k: Any, mask: Mask | Array | None, score: Scores) -> Any:
    """A stand-in for v in a call without one: an array of no features, with the batch axes that v would need for the
    mask and the score to fit. None for a KVCache, which has its own."""
    if isinstance(k, KVCache):
        return None
    problem, _ = describe(q, k, k)
    sizes = problem.seqlen_q, problem.seqlen_k
    held = [(x.array.shape, len(x.shape)) for part in as_mask(mask)._parts for x in part._held(*sizes)
            if library(x.array)]  # fmt: skip
    held += [(part._weights[0].shape, part._own_axes) for part in as_parts(score) if part._own_axes is not None]
    try:
        batch = np.broadcast_shapes(problem.batch, *(shape[: max(len(shape) - own, 0)] for shape, own in held))
    except ValueError:  # `describe` says which one does not fit
        batch = problem.batch
    lead = (*batch[:-1], batch[-1] if problem.heads == 1 else 1) if batch else ()
    return np.empty((*lead, problem.seqlen_k, 0), k.dtype, like=k)


@lru_cache(maxsize=4096)
def _problem(
    xp: str, dtypes: tuple[np.dtype[Any], ...], shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...], mask_kinds: tuple[type, ...], score_kinds: tuple[tuple[Any, ...], ...],
    dropout: bool, cache: CacheLayout | None, wide: bool,
) -> Problem:  # fmt: skip
    """The Problem of q, k and v, given by dtypes, shapes and strides. Most calls find it in the cache."""
    q, k, v = shapes
    for name, shape, dtype in zip("qkv", shapes, dtypes):
        if len(shape) < 2:
            raise ValueError(f"{name}: got the shape {shape}, expected (..., sequence, features)")
        if len(shape) > MOST_AXES:
            raise ValueError(f"{name}: got {len(shape)} axes, at most {MOST_AXES}")
        if dtype not in DTYPES:
            raise no_floats(name, dtype)
        if dtype != dtypes[0]:
            raise other_dtype(name, dtype, dtypes[0], "q")
    if k[-1] != q[-1]:
        raise ValueError(f"k: got head_dim {k[-1]}, expected {q[-1]}, the head_dim of q" if cache is None else
                         f"q: got head_dim {q[-1]}, expected {k[-1]}, that of the KVCache")
    if v[-2] != k[-2]:
        raise ValueError(f"v: got {v[-2]} rows, expected {k[-2]}, one for each row of k")
    batch, heads, heads_k = _broadcast(q, k, v)
    return Problem(
        xp=xp, dtype=dtypes[0], batch=batch, heads=heads, heads_k=heads_k, seqlen_q=q[-2], seqlen_k=k[-2],
        head_dim=q[-1], head_dim_v=v[-1], shapes=shapes, strides=strides, mask_kinds=mask_kinds,
        score_kinds=score_kinds, dropout=dropout, cache=cache, wide=wide,
    )  # fmt: skip


def checked_gradients(saved: Saved[Any], do: Any, dlse: Any = None) -> tuple[Any, Any]:
    """do and dlse, checked, in the dtypes of o and lse."""
    if not isinstance(saved, Saved):
        raise TypeError(f"saved: got {words_for(saved)}, expected what attention_forward returned")
    refuse_cache(saved.inputs.cache)
    problem, inputs = saved.problem, saved.inputs
    do = converted("do", do, "o", problem.out_shape, problem.dtype, inputs)
    if dlse is not None:
        dlse = converted("dlse", dlse, "lse", problem.lse_shape, problem.sum_dtype, inputs)
    return do, dlse


def converted(name: str, x: Any, of: str, shape: tuple[int, ...], dtype: np.dtype[Any], inputs: Inputs) -> Any:
    """A gradient `of` a result, in its dtype."""
    if library(x) and x.dtype != dtype and x.dtype in DTYPES:
        x = rounded(x, dtype)
    _check_result(name, x, of, shape, dtype, inputs)
    return x


def _check_result(
    name: str, x: Any, like: str, shape: tuple[int, ...], dtype: np.dtype[Any], inputs: Inputs
) -> None:
    if type(x) is not type(inputs.q):
        same_library(q=inputs.q, **{name: x})
    if x.shape != shape:
        raise ValueError(f"{name}: got the shape {x.shape}, expected {shape}, the shape of {like}")
    if x.dtype != dtype:
        raise other_dtype(name, x.dtype, dtype, like)


def _broadcast(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
    """Batch axes of o (heads included), query heads, key heads, from the shapes of q, k and v."""
    try:
        batch = np.broadcast_shapes(q[:-3], k[:-3], v[:-3])
    except ValueError:
        raise ValueError(f"batch axes of q {q[:-3]}, k {k[:-3]} and v {v[:-3]} "
                         "do not broadcast") from None
    heads_q, heads_of_k, heads_of_v = (shape[-3] if len(shape) > 2 else 1 for shape in (q, k, v))
    if heads_of_k != heads_of_v and 1 not in (heads_of_k, heads_of_v):
        raise ValueError(f"v: got {heads_of_v} heads, expected {heads_of_k}, as many as k")
    heads_k = heads_of_v if heads_of_k == 1 else heads_of_k
    heads = heads_k if heads_q == 1 else heads_q
    if heads != heads_k and (heads_k == 0 or heads % heads_k):
        raise ValueError(f"q: got {heads} heads, expected a multiple of {heads_k}, the heads of k and v")
    if max(map(len, (q, k, v))) == 2:
        return (), 1, 1
    return (*batch, heads), heads, heads_k


def _scale(scale: Any, problem: Problem) -> float:
    found = number("scale", scale)
    smallest, largest = SCALES[problem.sum_dtype]
    if not smallest <= found <= largest:
        raise ValueError(f"scale: got {scale!r}, allowed finite and > 0, {smallest:.0e} to {largest:.0e} for "
                         f"{problem.dtype}")
    return found


def _check_out(out: Any, q: Any, shape: tuple[int, ...]) -> None:
    """Refuse what cannot take the result, of this shape."""
    if type(out) is not type(q):
        same_library(q=q, out=out)
    if out.shape != shape:
        raise ValueError(f"out: got the shape {out.shape}, expected {shape}")
    if out.dtype != q.dtype:
        raise TypeError(f"out: got {out.dtype}, expected {q.dtype}, the dtype of q")
    check_writable("out", out)
    check_apart("out", out)


def refuse_overlap(out: Any, arrays: dict[str, Any], values: Iterable[Value]) -> None:
    """Refuse an out that shares memory with arrays of a call, or with those of its mask, score, cache or graph."""
    for name, array in arrays.items():
        if overlap(out, array):
            raise ValueError(f"out: overlaps {name}")
    for value in values:
        if any(overlap(out, array) for array in value._all_arrays):
            name = next(name for name, array in value._arrays().items() if overlap(out, array))
            raise ValueError(f"out: overlaps {type(value).__name__} {name}")
