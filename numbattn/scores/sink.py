"""Sink: one more logit of each row, with S."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.checks import Floats
from ..base.values import rounded, sum_broadcast
from .parts import ArrayPart


@dataclass(frozen=True, eq=False, repr=False)
class Sink(ArrayPart):
    """One more logit in the softmax of each row, which has no value: rows of P sum to less than 1.

    A query that sees no key has o = 0 and lse = -inf all the same. A score has at most one.

    Parameters
    ----------
    logits : array or list, broadcast to the batch axes, (..., heads), or float
        Any floating dtype. Other parts of the score do not change them.
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

    _has_step, _needs_positions, _crops_by_sequence = False, False, True
    _examples = (("sink", lambda shape, dtype, gradient: Sink(np.ones(shape[:1], dtype), gradient)),)

    def _logits(self, lse: Any) -> Any:
        """For each row, (..., seqlen_q), of the dtype of its lse."""
        return np.broadcast_to(rounded(self._array, lse.dtype)[..., None], lse.shape)

    @np.errstate(under="ignore")
    def _share(self, lse: Any) -> Any:
        """Its P of each row, likewise; 0 where a query sees nothing."""
        seen = np.isfinite(lse)
        return np.exp(np.where(seen, self._logits(lse) - np.where(seen, lse, 0), -math.inf))

    @np.errstate(under="ignore")
    def _gradient(self, dS: Any, lse: Any, delta: Any, S: Any = None) -> Any:
        """The sink has no dP, so that its dS is -P delta."""
        P = self._share(lse)
        return sum_broadcast(-(P * np.where(np.isfinite(lse), delta, 0)).sum(axis=-1), self._array.shape)
