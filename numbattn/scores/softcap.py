"""Softcap: S = cap tanh(S / cap)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.checks import number
from .parts import Part

TINY, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False, repr=False)
class Softcap(Part):
    """S = cap tanh(S / cap): no score exceeds the cap. One of -inf, from a Bias before it, say, becomes visible again.

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

    _is_nonlinear, _needs_positions, _crops_by_sequence = True, False, True
    _examples = (("softcap", lambda shape, dtype, gradient: Softcap(30.0)),)

    def __post_init__(self) -> None:
        cap = number("Softcap cap", self.cap, "; a numbattn.Score of your own has it among its arrays")
        if not TINY <= cap <= LARGEST:
            raise ValueError(f"Softcap cap: got {self.cap!r}, allowed finite and > 0, as a float32")
        self._set(cap=cap)

    def _applied(self, S: Any) -> Any:
        cap = S.dtype.type(self.cap)
        return cap * np.tanh(S / cap)

    def _derivative(self, S: Any) -> Any:
        """1 - tanh(x)^2 = 4 e / (1 + e)^2 with e = exp(-2 |x|): without cancellation where it is small."""
        e = np.exp(-2 * abs(S / S.dtype.type(self.cap)))
        return 4 * e / (1 + e) ** 2

    def _curvature(self, S: Any) -> Any:
        cap = S.dtype.type(self.cap)
        return -2 / cap * np.tanh(S / cap) * self._derivative(S)
