"""Bias: S = S + bias."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..base.checks import Floats
from ..base.origin import Crop
from ..base.values import sum_broadcast
from .parts import ArrayPart, Part


@dataclass(frozen=True, eq=False, repr=False)
class Bias(ArrayPart):
    """S = S + bias.

    A score of -inf is as good as masked: a query with no other scores sees nothing. The lowest finite number, which
    often marks padding, is visible: a query with no other scores gets the mean of v.

    Parameters
    ----------
    bias : array or list, broadcast to (..., seqlen_q, seqlen_k), or float
        Any floating dtype. It broadcasts as in NumPy, axes of size 1 and missing axes included, against the batch axes,
        heads included, and (seqlen_q, seqlen_k). On CPUs it is read in place, whatever its strides and dtype.
    gradient : bool, optional
        Whether its gradient is wanted: of its own shape, summed over broadcast axes.

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

    _own_axes, _axis_of_queries = 2, -2
    _examples = (
        ("bias", lambda shape, dtype, gradient: Bias(np.zeros(shape, dtype), gradient)),
        ("bias-of-keys", lambda shape, dtype, gradient: Bias(np.zeros(shape[-1:], dtype), gradient)),
    )

    def _whole_shape(self, batch: tuple[int, ...], seqlen_q: int, seqlen_k: int) -> tuple[int, ...]:
        return *batch, seqlen_q, seqlen_k

    def _applied(self, S: Any) -> Any:
        return S + self._array.astype(S.dtype)

    def _gradient(self, dS: Any, lse: Any, delta: Any, S: Any = None) -> Any:
        return sum_broadcast(dS, self._array.shape)

    def _cropped(self, crop: Crop, frame: Any) -> Part:
        return replace(self, bias=crop.of_keys("score: Bias", crop.of_queries("score: Bias", self._array)))
