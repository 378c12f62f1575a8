"""One block that draws all work tiles, in both worlds."""

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.hopper.tangent import hopper_tangent
from tests.accuracy import assert_accurate, random
from tests.tools.launch import launch, poisoned, tensor_map

from ..calls import call

SIZES = {"head_dim": 64, "head_dim_v": 64, "tile_n": 64, "consumers": 2, "stages": 2, "q_stages": 3}


def tangents_of(case, tq, tk, tv, visible, Z, work=np.float64, rounded=lambda x: x):
    """to and tlse by the formula, in the dtype `work`; P and P tS rounded."""
    group = case.q.shape[1] // case.k.shape[1]
    Q, tQ, dropped = case.q.astype(work), tq.astype(work), np.asarray(Z, work)
    K, tK, V, tV = (np.repeat(np.nan_to_num(x.astype(work)), group, 1) for x in (case.k, tk, case.v, tv))
    scale, (KT, tKT) = work(case.scale), (x.swapaxes(-2, -1) for x in (K, tK))
    S = np.where(visible, scale * (Q @ KT), -np.inf)
    tS = np.where(visible, scale * (tQ @ KT + Q @ tKT), 0)
    m = S.max(-1, keepdims=True, initial=-1e30)
    P = np.exp(S - m)
    l = np.maximum(P.sum(-1, keepdims=True), 1e-30)
    tlse = (P * tS).sum(-1, keepdims=True) / l
    left, right = rounded(dropped * P), rounded(dropped * (P * tS))
    return (left @ tV + right @ V) / l - tlse * ((left @ V) / l), tlse[..., 0]


def check(rng, dtype=np.float16, at_once=1, heads_per_tile=1, ascending=0, blocks=1, sizes=(), **problem):
    case = call(rng, dtype, **{"d": 24, "e": 40} | problem)
    tq, tk, tv = (random(rng, x.shape, x.dtype) for x in (case.q, case.k, case.v))
    for tangent, x in ((tq, case.q), (tk, case.k), (tv, case.v)):
        tangent[np.isnan(x)] = np.nan
    sizes = SIZES | dict(sizes)
    name, dropout = case.q.dtype.name, case.kept_scale != 1
    source = hopper_tangent(dtype=name, mask=case.kinds, score=(), dropout=dropout, **sizes)
    o, to = (poisoned(case.do.shape, case.q.dtype) for _ in range(2))
    lse, tlse, counters = poisoned(case.lse.shape), poisoned(case.lse.shape), np.zeros(2, np.uint32)
    mask = case.mask_of("q", 64 * sizes["consumers"], sizes["tile_n"])
    arrays = case.q, tq, case.k, tk, case.v, tv, o, to
    maps = [tensor_map(x, found.box) for x, found in zip(arrays, source.tensor_maps, strict=True)]
    launch(
        source.function, (blocks, 1, 1), source.threads, source.shared, *maps, lse, tlse, mask, case.drops, counters,
        case.group_size, case.scale, case.scale_log2, case.kept_scale,
        *map(np.int32, (at_once, heads_per_tile, ascending)),
        cc=(9, 0, "a"),
    )  # fmt: skip
    assert not counters.any()
    return case, (o, lse, to, tlse), (tq, tk, tv)
