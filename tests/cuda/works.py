"""What kernels are planned for, on devices that are not here."""

from dataclasses import replace

import numpy as np

from numbattn.call.passes import BEFORE
from numbattn.call.problem import DTYPES, describe
from numbattn.cuda.kernels.scores.alibi import AlibiKind
from numbattn.cuda.kernels.scores.bias import BiasKind
from numbattn.cuda.kernels.scores.relative import RelativeBiasKind
from numbattn.cuda.kernels.scores.sink import SinkKind
from numbattn.cuda.kernels.scores.softcap import SoftcapKind
from numbattn.cuda.plan.planner import DEVICES
from numbattn.cuda.views import without_memory
from numbattn.cuda.words.spec import Work

NAMED = {dtype.name: dtype for dtype in DTYPES}
HOPPER = DEVICES[9, 0]
KINDS = {
    "alibi": AlibiKind, "relative": RelativeBiasKind, "sink": SinkKind,
    "bias": lambda dtype, nbytes, tma="": BiasKind(dtype, int(nbytes), bool(tma)),
    "softcap": lambda: SoftcapKind(False),
}  # fmt: skip


def array(*shape, dtype=np.float16):
    return without_memory(shape, np.dtype(dtype))


def kernels(planned):
    """Names of a Plan's kernels."""
    return [step.key.name for step in planned.steps]


def score_of(text):
    """The kinds of the parts of a score, such as "bias float16 16 tma, relative query"."""
    parts = [part.split() for part in text.split(", ") if part]
    return tuple([KINDS[name](*about) for name, *about in parts])


def work(dtype="float16", d=64, e=64, *, batch=(16, 16), group_size=1, seqlen_q=1000, seqlen_k=1000, device=HOPPER,
         mask=(), keys=1000, nbytes=16, deterministic=False, score=(), resumes=False,
         along="", tscore=(), cells=(), **fields):  # fmt: skip
    """The Work of a kernel. batch: the axes of k before its last two, heads last; fields: of the Problem;
    along: which of q, k and v, and of do and delta, have a tangent; cells: sizes of a mask's blocks."""
    dtype, (*lead, heads_k) = NAMED[dtype], batch
    q = array(*lead, heads_k * group_size, seqlen_q, d, dtype=dtype)
    k, v = (array(*batch, seqlen_k, size, dtype=dtype) for size in (d, e))
    problem, _ = describe(q, k, v)
    dtypes = dict.fromkeys(["o", "dq", "dk", "dv", "to", "tdq", "tdk", "tdv", *(f"t{name}" for name in along)], dtype)
    dtypes["o2"] = problem.sum_dtype
    if resumes:
        dtypes[BEFORE] = np.dtype(np.float32)
    about = {"tscore": tscore, "cells": cells}
    return Work(replace(problem, **fields), device, mask, keys, dtypes, nbytes, deterministic, score, **about)
