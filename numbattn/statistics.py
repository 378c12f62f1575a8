"""What a score says of itself: column sums, maxima and entropies of P, with gradients, in linear memory."""

from __future__ import annotations

import math
import operator
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from .base.checks import A, Array, flag, words_for
from .base.gradients import Gradients
from .base.keywords import knows_others
from .base.values import rounded
from .caches.kv_cache import KVCache
from .call import passes
from .call.problem import Inputs, Problem, Saved, converted, describe, mask_of, refuse_cache, without_v
from .call.tangents import checked_tangents
from .dropout import Dropout
from .masks import Mask
from .scores import Scores, as_parts, sink_of
from .scores.function import Score
from .scores.sink import Sink

OWN_LSE = "lse", "lse_low"


class Statistics(NamedTuple):
    """What `attention_statistics` returns; None for what was not asked for."""

    column_sums: Any
    row_max: Any
    entropy: Any
    lse: Any


@knows_others
def attention_statistics(
    q: A,
    k: A | KVCache,
    *,
    column_sums: bool = False,
    row_max: bool = False,
    entropy: bool = False,
    weights: A | None = None,
    saved: Saved[A] | None = None,
    causal: bool = False,
    mask: Mask | Array | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    score: Scores = None,
) -> Statistics:
    """What the scores of an attention say of themselves: sums of P by key, largest scores, entropies, lse.

    Parameters
    ----------
    q, k, causal, mask, scale, score
        As in `attention_weights`.
    column_sums : bool, optional
        Whether the sums of P over the queries are wanted, by which keys are evicted and tokens pruned.
    row_max : bool, optional
        Whether the largest score of each query is wanted, after scale and score, as for QK-clip.
    entropy : bool, optional
        Whether the entropy of each query's row of P is wanted, in nats.
    weights : array, (..., seqlen_q), optional
        What rows of P are multiplied by before they are summed, with all axes of lse: of any floating dtype, converted
        to that of sums, but not without column_sums, or with packed queries and a cache. Default: 1.
    saved : Saved, optional
        What `attention_forward` returned of the same q, k and options: lse is then taken from it, and column sums alone
        take one pass, not two.
    dropout : None
        Refused: P is what it was before.

    Returns
    -------
    statistics : a named tuple, None for what was not asked for
        column_sums, (..., seqlen_k), of query heads; row_max, entropy and lse, (..., seqlen_q): float32, or float64 for
        float64. A query that sees nothing has a row_max and an lse of -inf, an entropy of 0, and adds nothing to the
        column sums. With a cache seqlen_k is its capacity, and beyond lengths sums are 0. A `Sink` takes its share of
        P, and is a term of the entropy, not of row_max.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `attention`.

    See Also
    --------
    attention_statistics_vjp : with gradients.
    attention_weights : P itself, in memory that is not linear.

    Notes
    -----
    With m = rowmax(S) and l = rowsum(exp(S - m)), the entropy is log(l) - rowsum(exp(S - m) (S - m)) / l. Results are
    equal bit for bit from call to call.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, k = np.random.default_rng(0).standard_normal((2, 8, 100, 64))
    >>> found = na.attention_statistics(q, k, column_sums=True, entropy=True, causal=True)
    >>> P = na.attention_weights(q, k, causal=True)
    >>> np.allclose(found.column_sums, P.sum(axis=-2))
    True
    >>> np.allclose(found.entropy, -(P * np.log(np.where(P == 0, 1, P))).sum(axis=-1))
    True
    """
    wanted = [flag(name, x) for name, x in (("column_sums", column_sums), ("row_max", row_max), ("entropy", entropy))]
    problem, inputs = _described(q, k, causal, mask, scale, dropout, score)
    rows, weights = _saved_rows(saved, problem, inputs), _weights(weights, problem, inputs, column_sums)
    return _statistics(problem, inputs, wanted, rows, weights)


class StatisticsGradients(tuple[A, A]):
    """dq, dk: a tuple of two, which carries the other gradients.

    Attributes
    ----------
    dq, dk : arrays
    weights : array
        That of the weights; None if there were none.
    score : tuple
        The gradients of the arrays in `score`, in their order; None for one that is not wanted.
    """

    dq: A = property(operator.itemgetter(0))  # type: ignore[assignment]
    dk: A = property(operator.itemgetter(1))  # type: ignore[assignment]
    weights: A | None
    score: tuple[A | None, ...]

    def __new__(
        cls, dq: A, dk: A, weights: A | None = None, score: tuple[A | None, ...] = ()
    ) -> StatisticsGradients[A]:  # fmt: skip
        self = super().__new__(cls, (dq, dk))
        self.weights, self.score = weights, score
        return self

    def __getnewargs__(self) -> Any:  # for copies and pickle
        return *self, self.weights, self.score


class StatisticsBackprop(Protocol[A]):
    """The closure that `attention_statistics_vjp` returns."""

    def __call__(
        self, *, dcolumn_sums: Array | None = None, dentropy: Array | None = None, dlse: Array | None = None
    ) -> StatisticsGradients[A]: ...


@knows_others
def attention_statistics_vjp(
    q: A,
    k: A,
    *,
    column_sums: bool = False,
    row_max: bool = False,
    entropy: bool = False,
    weights: A | None = None,
    saved: Saved[A] | None = None,
    causal: bool = False,
    mask: Mask | Array | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    score: Scores = None,
) -> tuple[Statistics, StatisticsBackprop[A]]:
    """`attention_statistics` with its gradients as a closure.

    Parameters
    ----------
    q, k, column_sums, row_max, entropy, weights, saved, causal, mask, scale, dropout, score
        As in `attention_statistics`, but k is not a cache.

    Returns
    -------
    statistics : a named tuple
    backprop : function
        ``backprop(*, dcolumn_sums=None, dentropy=None, dlse=None)`` takes the gradients of these, None for 0, and
        returns dq and dk, a tuple with the attributes `weights` and `score`: gradients of the weights, None without
        any, and of the arrays in score. It refers to q and k: editing them in place before it is called changes the
        gradients. row_max has none.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `attention`.

    Notes
    -----
    With w the weights, dC, dE and dL these gradients and E the entropy,

        dS = P (w dC - w rowsum(P dC) - dE (S - lse + E) + dL):

    of column sums and lse the backward pass of attention whose v is dC, of the entropy, which is lse less its
    derivative by a factor of S, the tangent of another one. dC and w are rounded to the dtype of q.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, k = np.random.default_rng(0).standard_normal((2, 8, 100, 64))
    >>> found, backprop = na.attention_statistics_vjp(q, k, entropy=True, causal=True)
    >>> dq, dk = backprop(dentropy=np.ones_like(found.entropy))
    >>> dq.shape
    (8, 100, 64)
    """
    refuse_cache(k)
    wanted = [flag(name, x) for name, x in (("column_sums", column_sums), ("row_max", row_max), ("entropy", entropy))]
    problem, inputs = _described(q, k, causal, mask, scale, dropout, score)
    rows, given = _saved_rows(saved, problem, inputs), _weights(weights, problem, inputs, column_sums)
    options: dict[str, Any] = {"mask": mask_of(causal, mask), "scale": inputs.scale, "wide": True, "may_wait": True}

    @np.errstate(under="ignore")
    def backprop(
        *, dcolumn_sums: Array | None = None, dentropy: Array | None = None, dlse: Array | None = None
    ) -> StatisticsGradients[A]:  # fmt: skip
        about = problem.lse_shape, problem.sum_dtype, inputs
        dE, dL = (x if x is None else converted(name, x, name[1:], *about)
                  for name, x in (("dentropy", dentropy), ("dlse", dlse)))  # fmt: skip
        dC = dcolumn_sums
        if dC is not None:
            shape = *problem.batch, problem.seqlen_k
            dC = converted("dcolumn_sums", dC, "column_sums", shape, problem.sum_dtype, inputs)
        v, do, one_hot = _values(problem, inputs, dC, given)
        o, saved = passes.forward(*describe(q, k, v, score=score, **options))
        if dE is not None and not inputs.score:
            dE = dE / 2  # see `_directions`
        both = dE if dL is None else dL if dE is None else dL + dE
        grads: Any = passes.backward(saved, do, both)
        if dE is not None:
            grads = _less_tangent(grads, problem, inputs, dE, q, k, score, options)
        dweights = None
        if weights is not None and dC is None:
            dweights = np.zeros_like(weights)
        elif weights is not None:
            dweights = rounded((o * one_hot).sum(axis=-1), weights.dtype)
        arrays = [x for part in inputs.score for x in part._weights]
        of_score = tuple([dx if dx is None else rounded(dx, x.dtype) for dx, x in zip(grads.score, arrays)])
        return StatisticsGradients(rounded(grads.dq, q.dtype), rounded(grads.dk, k.dtype), dweights, of_score)

    return _statistics(problem, inputs, wanted, rows, given), backprop


def _values(problem: Problem, inputs: Inputs, dC: Any, weights: Any) -> tuple[Any, Any, Any]:
    """v and do of an attention whose dS is that of the column sums, and which feature of v is each query head's: heads
    of a group share v, which has a feature for each of them."""
    *batch, _ = problem.batch or (1,)
    lead = (*batch, problem.heads_k) if problem.batch else ()
    if dC is None:
        v = np.zeros((*lead, problem.seqlen_k, 0), problem.dtype, like=inputs.q)
        return v, np.zeros((*problem.lse_shape, 0), problem.dtype, like=inputs.q), None
    group = problem.group_size
    heads, features = (np.arange(n, like=inputs.q) for n in (problem.heads, group))
    one_hot = heads[:, None, None] % group == features  # (heads, 1, group)
    if not problem.batch:
        one_hot = one_hot[0]
    v = dC.reshape(*batch, problem.heads_k, group, problem.seqlen_k).swapaxes(-1, -2)
    v = rounded(v.reshape(*lead, problem.seqlen_k, group), problem.dtype)
    return v, rounded(weights[..., None] * one_hot, problem.dtype), one_hot


def _scaled(s, batch, head, i, j, factor):  # type: ignore[no-untyped-def]
    return factor[0] * s


@cache
def _scale_part(dtype: Any) -> Score:
    """A factor of S after all other parts, 1."""
    return Score(_scaled, arrays=[np.ones(1, dtype)], gradient=True)


def _directions(problem: Problem, inputs: Inputs, q: Any, k: Any, score: Any, options: Any) -> Any:
    """A call whose lse changes by a multiple of rowsum(P S) along the tangents that follow it, and the arrays in its
    score along which it does: by twice that along q and k themselves, as long as S is their product; else by it along a
    factor of S after all parts, and of a sink along its logit, which is a kernel of its own."""
    lead = (*problem.batch[:-1], problem.heads_k) if problem.batch else ()
    v = np.zeros((*lead, problem.seqlen_k, 1), problem.dtype, like=inputs.q)
    if not inputs.score:
        found, given = describe(q, k, v, **options)
        return found, given, checked_tangents(given, q, k, None, [])[0], []
    factor = _scale_part(problem.sum_dtype)
    found, given = describe(q, k, v, score=[*as_parts(score), factor], **options)
    along: list[Any] = [x if isinstance(part, Sink) else None for part in given.score[:-1] for x in part._weights]
    return found, given, checked_tangents(given, None, None, None, [*along, factor.arrays[0]])[0], along


def _less_tangent(
    grads: Any, problem: Problem, inputs: Inputs, dE: Any, q: Any, k: Any, score: Any, options: Any
) -> Any:  # fmt: skip
    """Gradients of <dE, entropy> in addition, if those of <dE, lse> are in them: an entropy is lse less rowsum(P S)."""
    found, given, tangents, along = _directions(problem, inputs, q, k, score, options)
    saved, to, tlse = passes.tangent(found, given, tangents)
    do = np.zeros((*problem.lse_shape, 1), problem.dtype, like=inputs.q)
    tgrads: Any = passes.backward_tangent(saved, do, dE, tangents, to, tlse)
    of_score: list[Any] = []
    for dx, tdx, x in zip(grads.score, tgrads.score, along):
        less = dx if dx is None else dx - tdx[0]
        if less is not None and x is not None:  # the logit of a sink is its own tangent, too
            sink: Any = sink_of(inputs.score)
            less = less - sink._gradient(None, saved.lse, -dE)
        of_score.append(less)
    return Gradients(grads.dq - tgrads.dq[0], grads.dk - tgrads.dk[0], grads.dv, tuple(of_score))


def _described(
    q: Any, k: Any, causal: bool, mask: Any, scale: Any, dropout: Any, score: Any
) -> tuple[Problem, Inputs]:  # fmt: skip
    if dropout is not None:
        raise ValueError(f"dropout: got {words_for(dropout)}, expected None: statistics are those of P before it")
    v = without_v(q, k, mask, score)
    return describe(q, k, v, causal, mask, scale, None, score, may_wait=True)


def _options(inputs: Any) -> str:
    """What of a call's options can be compared: not what arrays hold."""
    kinds = (", ".join(type(part).__name__ for part in parts) or None for parts in (inputs.mask._parts, inputs.score))
    return "scale {:.9g}, mask {}, score {}".format(inputs.scale, *kinds)


def _saved_rows(saved: Any, problem: Problem, inputs: Inputs) -> dict[str, Any] | None:
    """lse and its low part, of what attention_forward returned."""
    if saved is None:
        return None
    if not isinstance(saved, Saved):
        raise TypeError(f"saved: got {words_for(saved)}, expected what attention_forward returned")
    held: Any = saved.lse
    same = saved.problem.xp, saved.problem.dtype, saved.problem.seqlen_k, held.shape
    if same != (problem.xp, problem.dtype, problem.seqlen_k, problem.lse_shape):
        raise ValueError(f"saved: got {saved}, expected that of the same q and k, which are not packed beside a cache")
    others, own = (_options(x) for x in (saved.inputs, inputs))
    if others != own:
        raise ValueError(f"saved: got that of a call with {others}, expected {own}, those of this one")
    return {"lse": saved.lse, "lse_low": saved.lse_low}


def _weights(weights: Any, problem: Problem, inputs: Inputs, column_sums: bool) -> Any:
    if weights is None:
        one = np.zeros(problem.lse_shape, problem.sum_dtype, like=inputs.q)
        return one + one.dtype.type(1)
    if not column_sums:
        raise ValueError("weights: got some without column_sums, whose rows they multiply")
    if inputs.packing is not None:
        raise ValueError("weights: got some with packed queries, expected None")
    return converted("weights", weights, "lse", problem.lse_shape, problem.sum_dtype, inputs)


def _statistics(
    problem: Problem, inputs: Inputs, wanted: list[bool], rows: dict[str, Any] | None, weights: Any
) -> Statistics:  # fmt: skip
    by_column, *by_row = wanted
    found: dict[str, Any] = {}
    if any(by_row) or rows is None:
        found = passes.run_pass(passes.STATISTICS, problem, inputs, {})
        rows = {name: found.get(name) for name in OWN_LSE}
    sums = None
    if by_column:
        sums = passes.run_pass(passes.COLUMN_SUMS, problem, inputs, {**rows, "weights": weights})["column_sums"]
    row_max, entropy = (found[name] if is_wanted else None for name, is_wanted in zip(("row_max", "entropy"), by_row))
    lse = rows["lse"]
    if inputs.packing is not None:
        filled = (row_max, -math.inf), (entropy, 0), (lse, -math.inf)
        row_max, entropy, lse = (x if x is None else inputs.packing.packed(x, fill=fill) for x, fill in filled)
    return Statistics(sums, row_max, entropy, lse)
