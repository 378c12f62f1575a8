"""What a score says of itself: column sums, maxima and entropies of P, with gradients, in linear memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from .base.checks import A, Array, flag, words_for
from .base.gradients import Gradients
from .base.keywords import knows_others
from .base.values import rounded
from .caches.kv_cache import KVCache
from .call import passes
from .call.problem import Inputs, Problem, Saved, converted, describe, refuse_cache, without_v
from .call.tangents import Tangents
from .dropout import Dropout
from .masks import Mask
from .scores import Scores, sink_of
from .scores.function import Score

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
        to that of sums. Default: 1.
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
    rows, weights = _saved_rows(saved, problem), _weights(weights, problem, inputs, column_sums)
    return _statistics(problem, inputs, wanted, rows, weights)


def _described(
    q: Any, k: Any, causal: bool, mask: Any, scale: Any, dropout: Any, score: Any
) -> tuple[Problem, Inputs]:  # fmt: skip
    if dropout is not None:
        raise ValueError(f"dropout: got {words_for(dropout)}, expected None: statistics are those of P before it")
    v = without_v(q, k, mask, score)
    return describe(q, k, v, causal, mask, scale, None, score, may_wait=True)


def _saved_rows(saved: Any, problem: Problem) -> dict[str, Any] | None:
    """lse and its low part, of what attention_forward returned."""
    if saved is None:
        return None
    if not isinstance(saved, Saved):
        raise TypeError(f"saved: got {words_for(saved)}, expected what attention_forward returned")
    found: Problem = saved.problem
    if (found.xp, found.dtype, found.lse_shape, found.seqlen_k) != (
        problem.xp, problem.dtype, problem.lse_shape, problem.seqlen_k,
    ):  # fmt: skip
        raise ValueError(f"saved: got {saved}, expected that of the same q and k")
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
        packed = inputs.packing.packed
        row_max, entropy = (x if x is None else packed(x, fill=fill) for x, fill in ((row_max, -math.inf), (entropy, 0)))
        lse = packed(lse, fill=-math.inf)
    return Statistics(sums, row_max, entropy, lse)
