"""Scores on GPUs: what is compiled in of each kind, a file each, and `score`, which composes them."""

from .alibi import AlibiKind
from .bias import BiasKind
from .distance import ALIGNED, BY_MATRIX, BY_QUERY, BY_SEGMENT, distance_steps, own_key_step
from .function import FunctionKind
from .kind import CLASSES, ELEMENTS, ENTRIES, WITH_DELTA, kind
from .relative import entry_steps
from .score import (
    SCORE,
    differs_by_head,
    dtype_of_part,
    dtype_of_tma_bias,
    is_natural,
    is_nonlinear,
    looks_up,
    may_be_far,
    number_of_tma_bias,
    parts_of,
    place_of_part,
    score_steps,
    score_steps_ahead,
    scores_type,
    softmax_score_steps,
    takes_offsets,
    within_segment,
)
from .sink import sink_steps
from .softcap import SoftcapKind

__all__ = [
    "ALIGNED", "BY_MATRIX", "BY_QUERY", "BY_SEGMENT", "CLASSES", "ELEMENTS", "ENTRIES", "SCORE", "WITH_DELTA",
    "AlibiKind", "BiasKind", "FunctionKind", "SoftcapKind", "differs_by_head", "distance_steps", "dtype_of_part",
    "dtype_of_tma_bias", "entry_steps", "is_natural", "is_nonlinear", "kind", "looks_up", "may_be_far",
    "number_of_tma_bias", "own_key_step", "parts_of", "place_of_part", "score_steps", "score_steps_ahead",
    "scores_type", "sink_steps", "softmax_score_steps", "takes_offsets", "within_segment",
]  # fmt: skip
