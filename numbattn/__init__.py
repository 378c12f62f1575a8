"""Exact FlashAttention and its gradients for NumPy and CuPy arrays.

===============================================  ====================================================================
attention                                        softmax(scale Q K^T) V; attention_weights is the softmax itself
attention_vjp                                    with its gradients as a closure
attention_forward, attention_backward            the same in two calls, with a `Saved` between them
attention_jvp, attention_laplacian               tangents, and the forward Laplacian
attention_forward_jvp, attention_backward_jvp    tangents of the gradients: Hessian-vector products
attention_backward_vjp                           gradients of the gradients
attention_statistics, attention_statistics_vjp   sums of P by key, largest scores, entropies
merge, merge_vjp                                 attention over all keys, from results over disjoint parts of them
pack, unpack                                     sequences one after the other, for `Segments`
Rotary, rotary, rotary_vjp, rotary_jvp           rotary position embeddings: queries and keys turned by positions
KVCache                                          keys and values that are kept: decoding, pages, 8 bits

Causal, Window, Lengths, Prefix, Intervals       masks: who sees whom; `&` and `|` combine them
First, Tail, Segments, Dense, Bits, BlockSparse  more of them; boolean arrays are masks, too
Where, check_mask                                a mask that is a function of your own, and its test
Grid                                             neighbourhoods in images and volumes, and biases by offset
Alibi, Bias, RelativeBias, Softcap, Sink         scores: what happens to S before the softmax
Score, check_score                               a score that is one, and its test
Dropout, dropout_mask                            dropout of P, and what it keeps

numbattn.points                                  kernel products, optimal transport, nearest neighbours of points
numbattn.graphs                                  attention over the edges of graphs, with second derivatives
numbattn.sparse                                  products with block-sparse matrices, and their gradients
numbattn.distributed                             attention over several devices: rings, NCCL, MPI
numbattn.interop                                 attention of JAX, PyTorch, autograd and thinc
numbattn.cuda                                    what runs on GPUs; the tile language, for kernels of your own
numbattn.reference                               the paper's algorithms in float64 NumPy
===============================================  ====================================================================

``help(na.attention)`` says what the calls share; ``python -m numbattn`` what this machine can run.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .base import forks, sources  # noqa: F401  before all others, whose files are looked at

# isort: split
from .api import attention, attention_backward, attention_forward, attention_vjp, attention_weights
from .base.gradients import Gradients, SecondGradients
from .base.version import __version__
from .caches.kv_cache import KVCache
from .call.problem import Saved
from .call.tangents import SavedTangents
from .checking.mask_checks import check_mask
from .checking.score_checks import check_score
from .dropout import Dropout, dropout_mask
from .grids import Grid
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
    Where,
    Window,
    pack,
    unpack,
)
from .merging import merge, merge_vjp
from .rotations import Rotary, rotary, rotary_jvp, rotary_vjp
from .scores.alibi import Alibi
from .scores.bias import Bias
from .scores.function import Score
from .scores.relative import RelativeBias
from .scores.sink import Sink
from .scores.softcap import Softcap
from .statistics import attention_statistics, attention_statistics_vjp

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
    "Grid",
    "Intervals",
    "KVCache",
    "Lengths",
    "Mask",
    "Prefix",
    "RelativeBias",
    "Rotary",
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
    "attention_statistics",
    "attention_statistics_vjp",
    "attention_vjp",
    "attention_weights",
    "check_mask",
    "check_score",
    "dropout_mask",
    "merge",
    "merge_vjp",
    "pack",
    "rotary",
    "rotary_jvp",
    "rotary_vjp",
    "unpack",
]

MODULES = "cuda", "distributed", "graphs", "interop", "points", "reference", "sparse"

if not TYPE_CHECKING:  # else any name would do

    def __getattr__(name):
        """The modules of the table above are imported when they are first asked for."""
        if name not in MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted((*__all__, *MODULES))
