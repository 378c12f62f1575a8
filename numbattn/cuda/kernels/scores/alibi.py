"""Alibi: S - slope |j - own key|, added to Q K^T in its own unit: the multiplication by scale stays in the exponent."""

from dataclasses import dataclass

import numpy as np

from ....scores.alibi import Alibi
from ...tile import device
from ...words.signatures import array_type
from .distance import Distance, distance_steps
from .kind import ValueAndSlope


@dataclass(frozen=True)
class AlibiKind(Distance):
    of = Alibi
    is_scaled, takes_few_registers, is_sloped = False, True, True

    def types(self, number):
        return array_type(np.dtype(number.name), 2), self.offset_type  # slopes

    def steps(self, at, scaling, layout, ACC, transposed=False, by_tma=False, has_derivative=True):
        (own, _), (own_key, distance) = scaling, distance_steps(self, at, layout, ACC, transposed)

        @device
        def look_up(scores, tile, batch, head, m0, n0):
            slopes, _ = scores.parts[at]
            return own(slopes[batch, head], scores)

        @device
        def step(S, F, slope, scores, batch, head, m0, n0):
            key, offsets = own_key(scores, batch, head, m0)
            return ValueAndSlope(S - distance(key, offsets, n0) * slope, F)

        return look_up, step

    def weighted_sum(self, at, layout, ACC):
        own_key, distance = distance_steps(self, at, layout, ACC)

        @device
        def add(total, dS, scores, batch, head, m0, n0):
            key, offsets = own_key(scores, batch, head, m0)
            return total - dS * distance(key, offsets, n0)

        return add
