"""ptxas finds room in registers for all that a kernel keeps there: the kernels that are assembled, one a line.

The kernels with the fewest spare registers: all of Hopper's, whose threads have 128 or 168 registers (ptxas reports
nothing else), in the rows of their tables and beside what is looked up for an element; of those for any GPU the largest
tiles of each unit.
Rows that may spill a little are slow paths: they are assembled where there is a GPU, with what else a kernel must pass.
"""

from itertools import chain

import numpy as np
import pytest

from numbattn import Score
from numbattn.base.checks import DTYPES
from numbattn.caches.arrays import CacheLayout
from numbattn.caches.eight_bits import FLOAT8, INT8
from numbattn.call.passes import LAPLACIAN, PARTICLE_LAPLACIAN
from numbattn.cuda.build import assemble, compile_ptx
from numbattn.cuda.kernels import ROUTES, routes_of
from numbattn.cuda.kernels.any.function_gradient import spec_of as spec_of_reads
from numbattn.cuda.kernels.any.score_gradient import bias_gradient, diagonal_sums, spec_of
from numbattn.cuda.kernels.hopper.forward_tiles import MANY
from numbattn.cuda.kernels.hopper.score_gradient import bias_route, diagonals_route
from numbattn.cuda.kernels.points.arguments import COLUMNS, DIFFERENCES, X_NORMS, Y_NORMS
from numbattn.cuda.kernels.points.nearest import Nearest
from numbattn.cuda.kernels.scores.bias import BiasKind
from numbattn.cuda.kernels.scores.function import kind_of
from numbattn.cuda.kernels.scores.reads import Reads
from numbattn.cuda.kernels.scores.relative import RelativeBiasKind
from numbattn.cuda.plan.planner import DEVICES
from numbattn.points.kinds import EXPONENTIAL, GAUSSIAN, MATERN52, Derivative, Power, RationalQuadratic
from tests.cuda.works import score_of, work

EDGES = "lo+hi+queries+keys"
PLACED = "keys+tail+intervals+gap+placed"
ALL = "keys+blocks+dense"
FEW, LONG = {"keys": 100, "seqlen_k": 100}, {"keys": MANY, "seqlen_k": MANY}  # which rows are taken
NARROW = {"keys": 100}
SHORT = {"seqlen_q": 128, "seqlen_k": 128}  # rows of their own, or all keys in a block
PAGES_OF_INT8, OF_INT8, OF_FLOAT8, OF_BFLOAT16 = (
    {"cache": CacheLayout(*held)} for held in ((INT8, 16), (INT8, None), (FLOAT8, None), (DTYPES[1], None))
)
UNALIGNED, DROPOUT, DETERMINISTIC = {"nbytes": 0}, {"dropout": True}, {"deterministic": True}
RESUMES, WITH_TDO = {"resumes": True}, ("q", "k", "v", "do")
SMALL_BLOCKS = {"cells": ((64, 64),)}  # two blocks share the registers of a multiprocessor
OF_TANGENTS = {"along": ("q", "k", "v", "do", "delta")}
POINT_PASSES = "sums", "gradient", "logsumexp", "nearest"


def row(kernel, dtype, d, e, mask="", score="", cc=(9, 0), spills=0, **options):
    """A kernel of a plan. spills: bytes that may be, whatever the tiles."""
    mask_words = tuple(mask.split("+")) if mask else ()
    found = work(dtype, d, e, mask=mask_words, score=score_of(score), device=DEVICES[cc], **options)
    words = kernel, f"sm_{''.join(map(str, cc))}", dtype, d, e, mask, score, *(f"{k}={v}" for k, v in options.items())
    return pytest.param(kernel, found, spills, id=" ".join(str(word) for word in words if word != ""))


def small(kernel, dtype, n, d, spills=0, **about):
    """A kernel for n queries and keys, with a bias if `about`, fields of a Work, says how widely it is shared."""
    bias = f"bias {'float64' if dtype == 'float64' else 'float32'} 16"
    score = score_of(bias if "score_added" in about else "")
    found = work(dtype, d, d, seqlen_q=n, seqlen_k=n, batch=(16, 8), score=score)
    words = kernel, dtype, n, d, *about.values()
    return pytest.param(kernel, found._replace(whole=True, **about), spills, id=" ".join(map(str, words)))


def pairs(kernel, dtype, d, kind, e=0, cc=(9, 0), spills=0):
    """A kernel over pairs of points; kind: the form of one, or a Nearest."""
    found = work(dtype, d, e, device=DEVICES[cc])
    names = (COLUMNS,) * (kernel != "hopper_sums") + (X_NORMS, Y_NORMS) * (d > DIFFERENCES)
    vectors = dict.fromkeys(names, found.problem.sum_dtype)
    found = found._replace(kind=kind, dtypes=found.dtypes | vectors)
    return pytest.param(kernel, found, spills, id=f"{kernel} {dtype} {d} {e} {kind}")


def of_kinds(s, batch, head, i, j, weights, kinds):
    return s + weights[kinds[i], kinds[j]]


def of_products(s, batch, head, i, j, table, gain):
    return s * gain[head] + table[i % 7, j]


def reads(kernel, dtype, d, function, wanted, columns, second="float32", spills=0, **options):
    """A kernel that adds up gradients of the arrays that a function of a matrix and a vector reads; columns: see Reads.
    """
    vector = np.zeros(8, second)
    score = Score(function, arrays=[np.zeros((8, 8), np.float32), vector], gradient=wanted)
    part = kind_of(score._identity, (("float32", 2), (second, 1)))
    found = work(dtype, d, d, score=(part,), **options)._replace(reads=Reads("sums", 1, 0, wanted, "float32", columns))
    return pytest.param(kernel, found, spills, id=f"{kernel} {dtype} {d} {function.__name__} {columns}")


def spec(kernel, work):
    """That of a pass by its first Route with a kernel of this name, or the first, or of the gradient of a part."""
    for pass_ in (LAPLACIAN, PARTICLE_LAPLACIAN):
        if kernel == pass_.name:
            return routes_of(pass_)[0].specs[0]
    names = ("forward", "backward", "tangent", "backward_tangent") if work.kind is None else POINT_PASSES
    passes = (route.specs for name in names for route in ROUTES[name] if route.takes(work))
    after = next((i for i, part in enumerate(work.score) if isinstance(part, BiasKind | RelativeBiasKind)), 0)
    whole = {"out_dtype": work.problem.dtype.name, "sums_rows": False, "sums_cols": False}
    gradients = (
        spec_of(bias_gradient, "dbias", after=after, **whole), *bias_route("dbias", after=after, **whole).specs,
        spec_of(diagonal_sums, "sums", after=after), *diagonals_route("sums", after=after).specs,
        spec_of_reads("sums", "gradient", 1, after=after, wanted=(), sum_dtype="float32", exact=True),
    )  # fmt: skip
    return next(spec for spec in (*chain(*passes), *gradients) if spec.name == kernel)


ANY_GPU = [  # up to 255 registers: CUDA cores, and tensor cores of each generation; dQ, dK and dV take the most
    row("forward", "float16", 128, 192, ALL, cc=(7, 5), **DROPOUT),
    row("forward", "float64", 192, 128, cc=(12, 0), **DROPOUT),
    row("forward", "float32", 32, 64, "blocks", cc=(8, 9), **DROPOUT, **UNALIGNED),
    row("forward", "float32", 256, 64, "dense", cc=(10, 0)),
    row("backward_kv", "float32", 128, 32, cc=(12, 0)),
    row("backward_kv", "float64", 256, 256, "packed"),
    row("backward_kv", "float64", 256, 256, ALL, **DROPOUT),
    row("backward_q", "float64", 256, 256, ALL, **DROPOUT),
    row("backward_q", "float32", 32, 64, EDGES, cc=(10, 0), **DROPOUT, **UNALIGNED),
    row("backward_q", "float32", 192, 192, ALL, **DROPOUT),
    row("backward_q", "float32", 256, 256, "intervals"),
    row("backward_q", "bfloat16", 128, 64, ALL, cc=(8, 0), **DETERMINISTIC),
    row("forward", "bfloat16", 512, 512, EDGES, cc=(8, 0)),
    row("backward_kv", "bfloat16", 576, 512, EDGES, cc=(8, 0)),
    row("backward_kv", "float32", 512, 512, EDGES, cc=(8, 0), spills=92),
    row("backward_q", "float64", 512, 512, EDGES),
    row("forward", "float32", 64, 64, **SHORT),
    row("backward_kv", "float32", 64, 64, "hi", **SHORT),
    row("backward_kv", "float64", 64, 64, **SHORT),
    row("bias_gradient", "float16", 256, 256, "", "bias float16 16, softcap", keys=MANY),
    row("bias_gradient", "float32", 64, 64, EDGES, "bias float32 16"),
    row("bias_gradient", "float64", 64, 64, "", "bias float64 16"),
    row("bias_gradient", "float32", 32, 32, "", "bias float32 16", seqlen_q=32, seqlen_k=32),
    row("function_gradient", "float32", 64, 64, "intervals", "relative query", cc=(7, 5)),
    row("bias_gradient", "bfloat16", 128, 128, EDGES, "bias bfloat16 16, softcap",
        tscore=(*score_of("bias bfloat16 16"), None), **OF_TANGENTS),
    row("bias_gradient", "float64", 64, 64, "", "bias float64 16, softcap", tscore=(*score_of("bias float64 16"), None),
        **OF_TANGENTS),
    row("diagonal_sums", "float16", 64, 64, ALL, "relative, softcap", cc=(8, 0), tscore=(*score_of("relative"), None),
        **DROPOUT, **OF_TANGENTS),
]
TANGENTS = [  # two sums for O, and two tiles of S
    row("tangent", "bfloat16", 64, 64, cc=(8, 0), along="qkv"),
    row("tangent", "float16", 64, 64, ALL, cc=(8, 6), along="qkv", **DROPOUT),
    row("tangent", "bfloat16", 128, 128, cc=(8, 6), along="qkv"),
    row("tangent", "float16", 128, 128, "hi", cc=(8, 0), along="qkv", spills=160),
    row("tangent", "bfloat16", 256, 256, cc=(8, 0), along="qkv", spills=96),
    row("tangent", "bfloat16", 256, 256, EDGES, cc=(12, 0), along="qkv"),
    row("tangent", "float32", 64, 64, EDGES, along="qkv", **DROPOUT),
    row("tangent", "float32", 128, 128, along="qkv", spills=160),
    row("tangent", "float32", 128, 128, "packed", cc=(8, 0), along="qkv"),
    row("tangent", "float32", 256, 256, along="qkv"),
    row("tangent", "float64", 64, 64, "hi", along="qkv"),
    row("tangent", "float64", 128, 128, along="qkv"),
    row("tangent", "float64", 256, 256, along="qkv"),
    row("tangent", "float32", 32, 32, along="qkv", seqlen_q=32, seqlen_k=32),
    row("tangent", "float64", 32, 32, along="qkv", seqlen_q=64, seqlen_k=64),
    row("tangent", "float32", 64, 64, cc=(7, 5), along="qkv"),
    row("tangent", "float64", 128, 128, cc=(7, 5), along="qkv"),
    row("tangent", "float16", 256, 256, ALL, cc=(7, 5), along="qkv"),
    row("laplacian", "float16", 64, 64, "hi", along="qkv"),     # and a third sum
    row("laplacian", "bfloat16", 128, 128, along="qkv", spills=32),
    row("laplacian", "float32", 64, 64, EDGES, along="qkv", **DROPOUT),
    row("laplacian", "float32", 32, 32, along="qkv", seqlen_q=64, seqlen_k=64),
    row("laplacian", "float32", 256, 256, along="qkv"),
    row("laplacian", "float64", 64, 64, along="qkv", spills=32),
    row("laplacian", "float64", 128, 128, "", "softcap", along="qkv"),
    row("laplacian", "float32", 128, 128, cc=(7, 5), along="qkv"),
    row("particle_laplacian", "float32", 64, 64, along="qkv"),  # O, O2, jO and what all keys add to it
    row("particle_laplacian", "float32", 64, 64, along="qkv", seqlen_q=16, seqlen_k=16),
    row("particle_laplacian", "float32", 64, 64, ALL, "bias float32 16, alibi", along="qkv"),
    row("particle_laplacian", "float32", 128, 128, EDGES, "sink, alibi", along="qkv"),
    row("particle_laplacian", "float32", 256, 256, along="qkv"),
    row("particle_laplacian", "float64", 64, 64, ALL, "bias float64 16, alibi", along="qkv"),
    row("particle_laplacian", "float64", 128, 128, along="qkv"),
    row("particle_laplacian", "float64", 256, 256, along="qkv"),
    row("particle_laplacian", "float32", 64, 64, cc=(8, 0), along="qkv", spills=16),
]
OF_HEADS = {"score_added": "by head", "score_gradients": "by head"}
SMALL = [  # all of S, and dP, beside what a head shares
    small("small_forward", "float16", 16, 32),
    small("small_forward", "bfloat16", 64, 64, score_added="shared"),
    small("small_forward", "bfloat16", 128, 64, spills=16),
    small("small_forward", "float32", 32, 32, score_added="by head"),
    small("small_forward", "float32", 64, 64),
    small("small_forward", "float64", 64, 32),
    small("small_backward", "bfloat16", 64, 32, **OF_HEADS, spills=32),
    small("small_backward", "bfloat16", 128, 64),
    small("small_backward", "float32", 16, 32, **OF_HEADS),
    small("small_backward", "float32", 32, 32, **OF_HEADS, spills=48),
    small("small_backward", "float32", 64, 64, **OF_HEADS),
    small("small_backward", "float64", 32, 32, **OF_HEADS),
    small("small_backward", "float64", 64, 32, spills=32),
    small("small_backward", "float64", 64, 64, **OF_HEADS, spills=512),
]
BACKWARD_MMA = [  # dK, dV and a tile of dQ, beside S and dP: each row of its tables
    row("mma_backward", "bfloat16", 64, 64, cc=(8, 0)),
    row("mma_backward", "float16", 64, 64, EDGES, cc=(8, 6), **DROPOUT),
    row("mma_backward", "float16", 64, 64, "packed", cc=(12, 0), **NARROW),
    row("mma_backward", "bfloat16", 64, 64, ALL, cc=(8, 9), **DROPOUT),
    row("mma_backward", "float16", 128, 128, EDGES, cc=(8, 0), **DROPOUT, **UNALIGNED),
    row("mma_backward", "bfloat16", 128, 128, "hi", cc=(10, 0)),
    row("mma_backward", "float16", 128, 128, "packed", cc=(8, 0), **NARROW, spills=80),
    row("mma_backward", "float16", 256, 256, EDGES, "sink, alibi", cc=(8, 0)),
    row("mma_backward", "bfloat16", 192, 256, cc=(10, 0)),
    row("mma_backward", "float16", 256, 256, "intervals", "alibi query, relative query", cc=(8, 0)),
    row("mma_backward", "float16", 256, 256, PLACED, cc=(8, 0)),
    row("mma_backward", "bfloat16", 256, 256, ALL, cc=(8, 6), **DROPOUT),
    row("mma_backward", "bfloat16", 128, 128, "dense", cc=(8, 0), **DETERMINISTIC),
    row("backward_q", "float16", 192, 32, "blocks", cc=(8, 9), **DETERMINISTIC),
    row("backward_q", "float16", 128, 128, "packed", cc=(8, 0), **DETERMINISTIC),
]
LSE_ALONE = [  # of v without features
    row("forward", "float32", 64, 0, cc=(8, 0)),
    row("forward", "float16", 128, 0, ALL, cc=(7, 5), **DROPOUT),
    row("mma_forward", "bfloat16", 128, 0, EDGES, cc=(8, 0), **DROPOUT),
    row("hopper_forward", "bfloat16", 128, 0, EDGES),
    row("hopper_forward", "float16", 256, 0, ALL, **FEW, **DROPOUT),
]
FORWARD_MMA = [  # 32 queries a warp, and 16, on each kind of GPU
    row("mma_forward", "bfloat16", 128, 128, cc=(8, 0)),
    row("mma_forward", "float16", 64, 64, ALL, cc=(8, 0), **DROPOUT),
    row("mma_forward", "bfloat16", 256, 256, "intervals", "alibi query, relative query", cc=(8, 0)),
    row("mma_forward", "bfloat16", 256, 256, PLACED, cc=(8, 0)),
    row("mma_forward", "bfloat16", 128, 128, "intervals", "alibi query, relative query", cc=(8, 0), spills=192),
    row("mma_forward", "float16", 128, 128, EDGES, cc=(9, 0)),
    row("mma_forward", "bfloat16", 64, 64, "packed", "sink, alibi", cc=(8, 9)),
    row("mma_forward", "float16", 128, 128, "", "bias float16 16, softcap", cc=(8, 9)),
    row("mma_forward", "float16", 256, 192, ALL, cc=(12, 0), **DROPOUT),
    row("mma_forward", "bfloat16", 64, 64, "intervals", "alibi query, relative query", cc=(12, 0)),
]
DECODING = [  # all of O and Q in the registers of a warp, beside S
    row("hopper_decode", "bfloat16", 64, 64, seqlen_q=1),
    row("hopper_decode", "bfloat16", 128, 128, ALL, seqlen_q=3),
    row("hopper_decode", "bfloat16", 128, 128, EDGES, "sink, alibi", seqlen_q=3),
    row("hopper_decode", "float16", 128, 128, "intervals", "relative query", seqlen_q=3),
    row("hopper_decode", "bfloat16", 128, 128, PLACED, seqlen_q=16),
    row("hopper_decode", "bfloat16", 128, 128, "", "bias float16 16, softcap", seqlen_q=3),
    row("decode", "bfloat16", 128, 128, EDGES, cc=(8, 0), seqlen_q=1, **DROPOUT),
    row("decode", "float64", 64, 64, EDGES, cc=(8, 0), seqlen_q=1),
    row("decode", "bfloat16", 64, 64, ALL, "sink, alibi", cc=(8, 0), seqlen_q=3, spills=16, **PAGES_OF_INT8),
    row("decode", "float16", 128, 128, ALL, "sink, alibi", cc=(8, 0), seqlen_q=3, **OF_FLOAT8),
    row("decode", "bfloat16", 128, 128, ALL, "sink, alibi", seqlen_q=3, **OF_INT8),
    row("decode", "bfloat16", 128, 128, EDGES, "softcap", seqlen_q=1, **OF_FLOAT8),
    row("decode", "float32", 64, 64, EDGES, "softcap", seqlen_q=3, **OF_BFLOAT16),
    row("combine", "bfloat16", 128, 128, EDGES, "sink", seqlen_q=1),
    row("combine", "bfloat16", 256, 256, seqlen_q=1),
]
FORWARD_ROWS = [
    # the row of each table: usual, long (128 registers), and that of masks by element
    row("hopper_forward", "float16", 64, 64, "dense", **FEW),
    row("hopper_forward", "bfloat16", 128, 128, ALL, **FEW, **DROPOUT),
    row("hopper_forward", "bfloat16", 192, 128, ALL, **FEW, **DROPOUT),
    row("hopper_forward", "bfloat16", 256, 256, ALL, **FEW, **DROPOUT),
    row("hopper_forward", "bfloat16", 128, 128, EDGES, **LONG),
    row("hopper_forward", "bfloat16", 128, 128, ALL, **SMALL_BLOCKS),
    # where a matrix starts at an offset of its own
    row("hopper_forward", "float16", 64, 64, "packed", **NARROW),
    row("hopper_forward", "float16", 128, 128, "packed", keys=MANY),
    row("hopper_forward", "bfloat16", 256, 256, "packed", **NARROW),
    # where tensor cores add slopes to S, which takes shared memory, too
    row("hopper_forward", "float16", 64, 64, "", "alibi", **LONG),
    row("hopper_forward", "bfloat16", 128, 128, EDGES, "sink, alibi", **NARROW),
    row("hopper_forward", "float16", 192, 192, EDGES, "alibi", **FEW),
    row("hopper_forward", "bfloat16", 256, 256, EDGES, "alibi", **FEW),
    # a table, beside a mask's arrays or not; and where each query has an offset of its own
    row("hopper_forward", "bfloat16", 64, 64, EDGES, "relative matrix", keys=MANY),
    row("hopper_forward", "float16", 128, 128, "", "sink, relative", keys=MANY),
    row("hopper_forward", "bfloat16", 256, 256, "packed", "relative segment", keys=MANY),
    row("hopper_forward", "bfloat16", 128, 128, "intervals", "alibi query, relative query"),
    row("hopper_forward", "bfloat16", 128, 128, PLACED, spills=64),
    # a slice of wide heads
    row("hopper_forward", "float16", 512, 512, ALL, **FEW, **DROPOUT),
    row("hopper_forward", "bfloat16", 576, 512, EDGES, "sink, alibi"),
    row("hopper_forward_wide", "bfloat16", 512, 512),
    row("hopper_forward_wide", "float16", 512, 512, "lo+hi"),
    row("hopper_forward_wide", "bfloat16", 576, 512, "lo+hi+queries"),
    # O of other keys
    row("hopper_forward", "float16", 64, 64, EDGES, **LONG, **RESUMES),
    row("hopper_forward", "bfloat16", 128, 128, EDGES, keys=8192, seqlen_k=8192, seqlen_q=8192, **RESUMES),
    row("hopper_forward", "bfloat16", 256, 256, ALL, **FEW, **DROPOUT, **RESUMES),
]
BACKWARD_ROWS = [  # both sums in a consumer's registers, wide ones by two, and dQ alone
    row("hopper_backward_kv", "bfloat16", 64, 64, "hi", keys=MANY, spills=80),
    row("hopper_backward_kv", "bfloat16", 64, 64, keys=MANY, **DETERMINISTIC, spills=80),
    row("hopper_backward_q", "float16", 128, 128, ALL, **DROPOUT, **SMALL_BLOCKS),
    row("hopper_backward_wide", "float16", 64, 64, "blocks", "bias float16 16, softcap", keys=MANY),
    row("hopper_backward_wide", "bfloat16", 64, 64, "", "softcap, relative", **DROPOUT, **DETERMINISTIC),
    row("hopper_backward_wide", "bfloat16", 128, 128, "intervals", "alibi query, relative query"),
    row("hopper_backward_kv", "bfloat16", 128, 128, PLACED, spills=816),
    row("hopper_backward_wide", "bfloat16", 256, 256, "packed", **NARROW, **DETERMINISTIC),
    row("hopper_backward_wide", "bfloat16", 512, 512, EDGES, **DROPOUT),
    row("hopper_backward_q", "float16", 64, 128, EDGES, **UNALIGNED),
    row("hopper_backward_q", "bfloat16", 512, 512, EDGES, "softcap"),
    row("hopper_backward_q", "bfloat16", 128, 128, "", "bias bfloat16 16, softcap", **DROPOUT, **DETERMINISTIC),
    row("hopper_backward_q", "bfloat16", 128, 128, "intervals", "alibi query, relative query"),
    row("hopper_backward_q", "bfloat16", 256, 256, "packed", **NARROW, **DETERMINISTIC),
]
TANGENT_ROWS = [  # O, S and their tangents; outside the loops over tiles addresses and stages are read back
    row("hopper_tangent", "bfloat16", 128, 128, along="qkv"),
    row("hopper_tangent", "float16", 128, 128, "intervals", along="qk"),
    row("hopper_tangent", "bfloat16", 128, 128, EDGES, along="qkv", spills=64),
    row("hopper_tangent", "bfloat16", 128, 128, "packed", along="qkv", spills=64),
    row("hopper_tangent", "bfloat16", 128, 128, ALL, along="qkv", **DROPOUT, spills=96),
    row("hopper_tangent", "bfloat16", 128, 128, EDGES, "sink, alibi", along="qkv", spills=64),
    row("hopper_tangent", "float16", 128, 128, EDGES, "relative", along="qkv", spills=64),
    row("hopper_tangent", "bfloat16", 128, 128, "", "bias float16 16, softcap", along="qkv", **DROPOUT),
    row("hopper_tangent", "float16", 192, 128, EDGES, along="qkv", spills=16),
    row("hopper_tangent", "float16", 64, 64, EDGES, along="qkv"),
    row("hopper_tangent", "bfloat16", 64, 64, ALL, along="kv", **DROPOUT),
    row("hopper_tangent", "float16", 64, 64, EDGES, "softcap", along="qkv"),
    row("hopper_tangent", "bfloat16", 64, 64, ALL, "bias float16 16, softcap", along="qkv"),
]
READS = [  # what is pending of the sums, beside S, P and dS: by classes of keys, or by element
    reads("hopper_backward_q", "bfloat16", 128, of_kinds, (True, False), 64, "int32"),
    reads("hopper_backward_q", "float16", 64, of_products, (True, True), 0, mask=("hi",)),
    reads("hopper_backward_q", "bfloat16", 256, of_products, (True, True), 0),
]
GRADIENTS = [
    row("hopper_bias_gradient", "float16", 64, 64, "", "bias float16 16 tma", keys=MANY),
    row("hopper_bias_gradient", "bfloat16", 256, 256, EDGES, "softcap, bias bfloat16 16 tma", keys=MANY),
    row("hopper_diagonal_sums", "float16", 192, 192, "", "relative", keys=MANY),
]
SPILLS = [
    # rows beyond 128 that are not aligned: addresses that copies start from, read back once a tile
    row("hopper_backward_wide", "float16", 192, 64, "blocks", **UNALIGNED, spills=128),
    row("hopper_backward_q", "bfloat16", 192, 192, ALL, **DROPOUT, **UNALIGNED, **DETERMINISTIC, spills=128),
    row("hopper_backward_q", "float16", 256, 256, "dense", **UNALIGNED, spills=128),
    # addresses, beside those of a segment: read back once a tile
    row("mma_backward", "float16", 128, 128, "packed", cc=(8, 6), spills=128, **NARROW),
    row("mma_backward", "bfloat16", 128, 128, "packed", cc=(10, 0), spills=32, **NARROW),
    # what an array of a mask and a score take beside dP, and the derivative of a score
    row("mma_backward", "bfloat16", 128, 64, "intervals", "alibi query, relative query", cc=(12, 0), spills=96),
    row("mma_backward", "float16", 64, 64, EDGES, "sink, alibi", cc=(8, 6), spills=16),
    row("mma_backward", "bfloat16", 64, 64, EDGES, "bias float16 16, softcap", cc=(8, 0), spills=32),
    row("mma_backward", "bfloat16", 128, 128, EDGES, "bias float16 16, softcap", cc=(8, 0), spills=128),
    # dK and dV in float64
    row("backward_kv", "float64", 64, 64, EDGES, cc=(8, 0), **DROPOUT, spills=64),
    row("backward_kv", "float64", 128, 128, "bits", cc=(7, 5), spills=384),
    row("backward_kv", "float64", 192, 192, "packed", **DROPOUT, spills=192),
    row("backward_kv", "float64", 256, 256, "hi", spills=64),
    row("backward_kv", "float32", 256, 256, ALL, **DROPOUT, spills=16),
    # where much is looked up, or a derivative is: dP is started after dV
    row("hopper_backward_kv", "float16", 64, 64, ALL, **UNALIGNED, spills=328),
    row("hopper_backward_wide", "bfloat16", 256, 256, EDGES, "softcap, relative", keys=MANY, spills=24),
    # outside the loop over tiles that need no mask, but for one register in it (ptxas 13.5)
    row("hopper_backward_kv", "float16", 64, 64, "packed", **NARROW, spills=200),
    row("hopper_backward_kv", "bfloat16", 64, 64, "", "alibi", keys=MANY, spills=240),
    # whose consumers have 232 registers
    row("hopper_backward_kv", "bfloat16", 64, 64, EDGES, keys=MANY, spills=400),
    # in the producer, which has 24 registers: what a mask, segments and the draw of tiles take; deterministic or packed
    # at 128 up to five addresses of consumers, read back in their loop
    row("hopper_backward_kv", "bfloat16", 128, 128, keys=MANY, spills=80),
    row("hopper_backward_kv", "bfloat16", 64, 64, keys=MANY, **DROPOUT, spills=144),
    row("hopper_backward_kv", "bfloat16", 64, 64, EDGES, keys=MANY, **DROPOUT, spills=1144),
    row("hopper_backward_kv", "bfloat16", 128, 64, "dense", **DROPOUT, **UNALIGNED, spills=32),
    row("hopper_backward_kv", "float16", 128, 128, ALL, **DROPOUT, **SMALL_BLOCKS, spills=344),
    row("hopper_backward_kv", "bfloat16", 128, 128, EDGES, "softcap", keys=MANY, **DETERMINISTIC, spills=1224),
    row("hopper_backward_kv", "bfloat16", 128, 128, keys=MANY, **DETERMINISTIC, spills=272),
    row("hopper_backward_kv", "float16", 128, 128, "packed", keys=MANY, spills=360),
    # addresses and offsets, of what is slow anyway
    row("function_gradient", "float16", 64, 64, "intervals", "relative query", spills=32),
    row("function_gradient", "float64", 128, 128, "intervals", "relative query", spills=1024),
    row("diagonal_sums", "bfloat16", 256, 256, EDGES, "softcap, relative", keys=MANY, **DETERMINISTIC, spills=160),
    # where O and Q are three quarters of the registers
    row("hopper_decode", "bfloat16", 256, 256, ALL, "softcap", seqlen_q=3, spills=376),
    row("decode", "float32", 128, 128, EDGES, cc=(8, 0), seqlen_q=1, spills=64),
    # beside the edges of a mask
    row("mma_forward", "bfloat16", 128, 128, EDGES, cc=(10, 0), spills=16),
    row("hopper_diagonal_sums", "bfloat16", 256, 256, EDGES, "relative", keys=MANY, spills=80),
]


BACKWARD_TANGENT_ROWS = [  # two accumulators, or one, with S, P, dP, dS and their tangents
    row("backward_tangent_kv", "bfloat16", 64, 64, EDGES, along="qkv"),
    row("backward_tangent_kv", "float16", 64, 64, "packed", along="qkv", cc=(8, 0)),
    row("backward_tangent_kv", "bfloat16", 64, 64, along=WITH_TDO),
    row("backward_tangent_kv", "bfloat16", 64, 64, ALL, along="qkv", **DROPOUT, spills=184),
    row("backward_tangent_kv", "bfloat16", 64, 64, EDGES, "softcap", along="qkv"),
    row("backward_tangent_kv", "bfloat16", 128, 128, along="qkv"),
    row("backward_tangent_kv", "bfloat16", 128, 128, "", "bias float16 16, softcap", along="qkv", spills=128),
    row("backward_tangent_kv", "float16", 128, 128, "packed", along="qkv", cc=(8, 0)),
    row("backward_tangent_kv", "bfloat16", 128, 128, ALL, along=WITH_TDO, **DROPOUT, spills=400),
    row("backward_tangent_kv", "bfloat16", 256, 256, along="qkv", spills=64),
    row("backward_tangent_kv", "float32", 64, 64, along="qkv"),
    row("backward_tangent_kv", "float32", 128, 128, ALL, along="qkv", **DROPOUT),
    row("backward_tangent_kv", "float64", 64, 64, ALL, along="qkv", **DROPOUT),
    row("backward_tangent_kv", "float64", 128, 128, along=WITH_TDO, spills=256),
    row("backward_tangent_kv", "float32", 64, 64, along="qkv", **SHORT),
    row("backward_tangent_q", "bfloat16", 64, 64, EDGES, along="qkv"),
    row("backward_tangent_q", "bfloat16", 64, 64, ALL, along=WITH_TDO, **DROPOUT, spills=128),
    row("backward_tangent_q", "bfloat16", 64, 64, EDGES, "softcap", along="qkv"),
    row("backward_tangent_q", "bfloat16", 128, 128, ALL, along=WITH_TDO, **DROPOUT),
    row("backward_tangent_q", "float16", 256, 256, "packed", along="qkv"),
    row("backward_tangent_q", "float32", 128, 128, EDGES, "softcap", along=WITH_TDO),
    row("backward_tangent_q", "float64", 64, 64, ALL, along="qkv", **DROPOUT),
    row("backward_tangent_q", "float32", 64, 64, along="qkv", **SHORT),
    row("hopper_backward_tangent", "bfloat16", 64, 64, "lo+hi", along="qkv"),
    row("hopper_backward_tangent", "float16", 64, 64, "packed", along=WITH_TDO, spills=56),
    row("hopper_backward_tangent", "bfloat16", 128, 128, along="qkv"),
    row("hopper_backward_tangent", "float16", 128, 128, "lo+hi", along=WITH_TDO),
    row("hopper_backward_tangent", "bfloat16", 128, 128, EDGES, along="qkv", spills=128),
    row("hopper_backward_tangent", "bfloat16", 128, 128, "packed", along=WITH_TDO, spills=64),
]

POWER, RATIONAL = Power(0.0), RationalQuadratic(0.0)
PAIRS = [
    pairs("point_sums", "float32", 3, MATERN52, 1),
    pairs("point_sums", "float32", 8, EXPONENTIAL, 4),
    pairs("point_sums", "float64", 8, POWER, 4),
    pairs("point_sums", "float32", 3, GAUSSIAN, 256),
    pairs("point_sums", "float32", 64, RATIONAL, 64, spills=80),  # two sums, once a tile; addresses
    pairs("point_sums", "float32", 256, GAUSSIAN, 256),
    pairs("point_sums", "float64", 64, GAUSSIAN, 64),
    pairs("point_gradient", "float32", 3, MATERN52, 1),
    pairs("point_gradient", "float32", 8, EXPONENTIAL, 4),
    pairs("point_gradient", "float64", 8, GAUSSIAN, 4),
    pairs("point_gradient", "float32", 3, GAUSSIAN, 128),
    pairs("point_gradient", "float32", 128, GAUSSIAN, 1),
    pairs("point_gradient", "float32", 256, GAUSSIAN, 256, spills=96),    # in the epilogue
    pairs("point_gradient", "float64", 64, GAUSSIAN, 64),
    pairs("point_gradient", "float32", 3, Derivative(POWER), 16),
    pairs("hopper_nearest", "float16", 128, Nearest(1)),
    pairs("point_logsumexp", "float32", 64, GAUSSIAN),
    pairs("point_logsumexp", "float32", 8, POWER),
    pairs("point_logsumexp", "float64", 128, GAUSSIAN, cc=(8, 0)),
    pairs("point_nearest", "float32", 3, Nearest(10)),
    pairs("point_nearest", "float32", 64, Nearest(1), cc=(8, 0)),
    pairs("hopper_logsumexp", "float32", 64, GAUSSIAN),
    pairs("point_nearest", "bfloat16", 128, Nearest(32)),
    pairs("hopper_nearest", "float16", 64, Nearest(1)),
    pairs("hopper_nearest", "bfloat16", 192, Nearest(1)),
    pairs("hopper_nearest", "bfloat16", 256, Nearest(1)),
    pairs("hopper_nearest", "float32", 128, Nearest(1)),
    pairs("hopper_logsumexp", "float32", 128, GAUSSIAN),
    pairs("hopper_sums", "float32", 64, GAUSSIAN, 1),
    pairs("hopper_sums", "float32", 256, MATERN52, 4, spills=32),     # read back where points are near
    pairs("hopper_sums", "float32", 64, RATIONAL, 64),
    pairs("hopper_sums", "float32", 256, Derivative(POWER), 64, spills=128),    # and here
]


EVERY = [
    *ANY_GPU, *TANGENTS, *SMALL, *LSE_ALONE, *FORWARD_MMA, *BACKWARD_MMA, *DECODING, *FORWARD_ROWS, *BACKWARD_ROWS,
    *TANGENT_ROWS, *BACKWARD_TANGENT_ROWS, *READS, *GRADIENTS, *SPILLS, *PAIRS,
]  # fmt: skip
MARKED = [  # each takes 3 s
    pytest.param(*row.values, id=row.id, marks=[pytest.mark.slow] * (number % 80 > 0))
    for number, row in enumerate(EVERY)
]


@pytest.mark.parametrize(("kernel", "work", "spills"), MARKED)
def test_nothing_is_spilled(kernel, work, spills):
    """Nor are products of warpgroups serialised, nor the registers not dealt out anew."""
    found = spec(kernel, work)
    cc = found.cc(work.device)
    source = found.factory(**found.parameters(work, found.fitting(work)))
    assert source.shared <= work.device.shared
    ptx = compile_ptx(source, cc)
    _, report = assemble(ptx, cc)
    assert report.spills <= spills
    assert report.stack <= spills
    assert not report.losses
    if found.arch:
        words = ["cp.async.bulk.tensor", "mbarrier.try_wait"]
        words += [] if kernel == "hopper_decode" else ["wgmma.mma_async", "setmaxnreg"]
        assert all(word in ptx for word in words)


@pytest.mark.parametrize(("kernel", "dtype", "cc", "product"), [
    ("forward", "float32", (8, 0), "mma.sync"), ("mma_forward", "float16", (8, 0), "mma.sync"),
    pytest.param("hopper_forward", "bfloat16", (9, 0), "wgmma.mma_async", marks=pytest.mark.slow),
])  # fmt: skip
def test_lse_alone_takes_one_product(kernel, dtype, cc, product):
    """Half as many instructions of the tensor cores as O and lse."""
    counts = []
    for size in (64, 0):
        found = work(dtype, 64, size, device=DEVICES[cc])
        made = spec(kernel, found)
        source = made.factory(**made.parameters(found, made.fitting(found)))
        counts.append(compile_ptx(source, made.cc(found.device)).count(product))
    assert counts[0] == 2 * counts[1] > 0
