"""Scores on GPUs: the steps of each kind, in a file each, which this package finds; `score` composes them."""

from importlib import import_module
from pkgutil import iter_modules

from .by_distance import distance_step, query_distance_step
from .distance import ALIGNED, BY_MATRIX, BY_QUERY, BY_SEGMENT, own_key_step
from .function import read_step
from .function_tangent import read_tangent_step
from .kind import CLASSES, ENTRIES, READS, WITH_DELTA, class_of
from .packed import within_segment
from .score import SCORE, TSCORE, score_steps, score_steps_ahead, scores_type, softmax_score_steps
from .sink import sink_steps, sink_tangent_step
from .tangent import tangent_steps
from .traits import (
    differs_by_head,
    dtype_of_part,
    dtype_of_tma_bias,
    is_nonlinear,
    is_packed,
    is_scaled,
    looks_up,
    may_be_far,
    number_of_tma_bias,
    parts_of,
    place_of_part,
    takes_offsets,
)

for _module in iter_modules(__path__):  # a kind is known when its file has been imported
    import_module(f".{_module.name}", __name__)

__all__ = [
    "ALIGNED", "BY_MATRIX", "BY_QUERY", "BY_SEGMENT", "CLASSES", "ENTRIES", "READS", "SCORE", "TSCORE", "WITH_DELTA",
    "class_of", "differs_by_head", "distance_step", "dtype_of_part", "dtype_of_tma_bias", "is_nonlinear", "is_packed",
    "is_scaled", "looks_up", "may_be_far", "number_of_tma_bias", "own_key_step", "parts_of", "place_of_part",
    "query_distance_step", "read_step", "read_tangent_step", "score_steps", "score_steps_ahead", "scores_type",
    "sink_steps", "sink_tangent_step", "softmax_score_steps", "takes_offsets", "tangent_steps", "within_segment",
]  # fmt: skip
