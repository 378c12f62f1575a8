"""Scores on GPUs: what is compiled in of each kind, a file each, and `score`, which composes them."""

from .alibi import slopes_steps
from .bias import Bias
from .distance import ALIGNED, BY_MATRIX, BY_QUERY, BY_SEGMENT, distance_steps, own_key_step
from .function import Function
from .kind import CLASSES, ELEMENTS, ENTRIES, WITH_DELTA, kind
from .relative import entry_steps
from .score import (
    SCORE,
    boxed_bias,
    boxed_dtype,
    dtype_of_part,
    is_curved,
    is_natural,
    looks_up,
    may_be_far,
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
from .softcap import Softcap

__all__ = [
    "ALIGNED", "BY_MATRIX", "BY_QUERY", "BY_SEGMENT", "CLASSES", "ELEMENTS", "ENTRIES", "SCORE", "WITH_DELTA", "Bias",
    "Function", "Softcap", "boxed_bias", "boxed_dtype", "distance_steps", "dtype_of_part", "entry_steps", "is_curved",
    "is_natural", "kind", "looks_up", "may_be_far", "own_key_step", "parts_of", "place_of_part", "score_steps",
    "score_steps_ahead", "scores_type", "sink_steps", "slopes_steps", "softmax_score_steps", "takes_offsets",
    "within_segment",
]  # fmt: skip
