"""Exact FlashAttention and its gradients for NumPy and CuPy arrays."""

from . import forks, sources  # noqa: F401  before all others, whose files are looked at
from .api import attention, attention_backward, attention_forward, attention_vjp, attention_weights
from .caches.kv_cache import KVCache
from .dropout import Dropout, dropout_mask
from .gradients import Gradients, SecondGradients
from .jets import (
    attention_backward_jvp,
    attention_backward_vjp,
    attention_forward_jvp,
    attention_jvp,
    attention_laplacian,
)
from .masks import (
    Bits,
    BlockSparse,
    Causal,
    Dense,
    First,
    Intervals,
    Lengths,
    Mask,
    Prefix,
    Segments,
    Tail,
    Window,
    pack,
    unpack,
)
from .merging import merge, merge_vjp
from .problem import Saved
from .score_checks import check_score
from .scores.alibi import Alibi
from .scores.bias import Bias
from .scores.function import Score
from .scores.relative import RelativeBias
from .scores.sink import Sink
from .scores.softcap import Softcap
from .tangents import SavedTangents
from .version import __version__
from .where import Where

__all__ = [
    "Alibi",
    "Bias",
    "Bits",
    "BlockSparse",
    "Causal",
    "Dense",
    "Dropout",
    "First",
    "Gradients",
    "Intervals",
    "KVCache",
    "Lengths",
    "Mask",
    "Prefix",
    "RelativeBias",
    "Saved",
    "SavedTangents",
    "Score",
    "SecondGradients",
    "Segments",
    "Sink",
    "Softcap",
    "Tail",
    "Where",
    "Window",
    "__version__",
    "attention",
    "attention_backward",
    "attention_backward_jvp",
    "attention_backward_vjp",
    "attention_forward",
    "attention_forward_jvp",
    "attention_jvp",
    "attention_laplacian",
    "attention_vjp",
    "attention_weights",
    "check_score",
    "dropout_mask",
    "merge",
    "merge_vjp",
    "pack",
    "unpack",
]
