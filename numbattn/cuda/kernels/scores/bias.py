"""Bias: S + bias."""

from dataclasses import dataclass

import numpy as np

from ....scores.bias import Bias
from ...tile import Alignment, aligned, convert, device, get, load
from ...tile.alignment import alignment
from ...views import fits_tensor_map
from ...words.signatures import array_type
from ...words.steps import array_of_part
from ..shared.layouts import DTYPES
from .kind import ScoreKind, ValueAndSlope


@dataclass(frozen=True)
class BiasKind(ScoreKind):
    of = Bias
    looks_up, is_packed = True, False

    dtype: str = ""
    nbytes: int = 0  # its alignment
    is_tma_loaded: bool = False

    @property
    def may_be_far(self):
        return self.dtype != "float16"

    def types(self, number):
        return (array_type(DTYPES[self.dtype], 4),)

    def steps(self, at, scaling, layout, ACC, transposed=False, by_tma=False, has_derivative=True):
        (_, to_scaled), ONE = scaling, ACC(1)
        ROWS_OF = Alignment(0 if transposed else self.nbytes)

        @device
        def queries_by_keys(matrix, m0, n0):
            return load(aligned(matrix[:, n0:], ROWS_OF), layout, m0)

        @device
        def keys_by_queries(matrix, m0, n0):
            return load(matrix[m0:].T, layout, n0)

        tile_of = keys_by_queries if transposed else queries_by_keys

        @device
        def look_up(scores, tile, batch, head, m0, n0):
            (biases,) = scores.parts[at]
            return tile_of(biases[batch, head], m0, n0)

        @device
        def step(S, F, found, scores, batch, head, m0, n0):
            return ValueAndSlope(S * to_scaled(ONE, scores) + convert(found, ACC), F)

        @device
        def from_shared(scores, tile, batch, head, m0, n0):
            return get(tile, layout)

        return from_shared if by_tma else look_up, step

    @classmethod
    def lowered(cls, part, number, problem):
        shape = *part.bias.shape[:-2], problem.seqlen_q, problem.seqlen_k
        return cls(), (), {array_of_part(number): np.broadcast_to(part.bias, shape)}

    def of_layout(self, layout):
        by_tma = fits_tensor_map(layout) and layout.dtype.itemsize == 2
        return BiasKind(layout.dtype.name, alignment(layout), by_tma)

    @classmethod
    def finish(cls, part, grad, sums, problem):
        if sums is not None:
            sums = sums if grad.ndim > 1 and grad.shape[-2] > 1 else sums.sum(axis=-2, keepdims=True)
            grad[...] = sums.reshape(grad.shape)
