"""In tiles of 16 queries and keys, simulated, and rows of tables, compiled."""

from typing import Any, NamedTuple

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.any.backward_tangent import backward_tangent_kv, backward_tangent_q
from numbattn.cuda.kernels.shared.layouts import DTYPES
from numbattn.cuda.kernels.tables import Streamed
from tests import accuracy
from tests.accuracy import assert_accurate, random
from tests.tools.launch import compiled_only, launch, poisoned, simulated_only

from ..calls import call, padded

SMALL = Streamed("fma", 16, 16, 32, 4)
RESULTS = "tdq", "tdk", "tdv", "tlse", "tdelta"


class Moved(NamedTuple):
    """A Call and the tangents of q, k, v, do and dlse."""

    case: Any
    q: Any
    k: Any
    v: Any
    do: Any  # or None
    dlse: Any
    wanted: dict  # results in float64, by name
    plain: dict  # and by the plain formula


def moved(rng, dtype=np.float32, *, tdo=True, poison=None, **sizes_and_options):
    case = call(rng, dtype, poison=poison, **sizes_and_options)
    tangents = [random(rng, x.shape, x.dtype) for x in (case.q, case.k, case.v, case.do)]
    for x, tx in zip((case.q, case.k, case.v), tangents):
        tx[np.isnan(x)] = np.nan if poison is None else poison
    tangents[3] = tangents[3] if tdo else None
    tdlse = random(rng, case.dlse.shape, case.dlse.dtype)
    options = {name: x for name, x in sizes_and_options.items() if name in ("causal", "mask", "dropout", "scale")}
    exact = np.longdouble if case.q.dtype == np.float64 else np.float64
    results = (formula(case, *tangents, tdlse, work, rounds, **options)
               for work, rounds in ((exact, False), (case.dlse.dtype.type, True)))  # fmt: skip
    return Moved(case, *tangents, tdlse, *results)


def formula(case, tq, tk, tv, tdo, tdlse, work, rounds, **options):
    """S, P, dP, dS and their tangents in `work`, and if it rounds, P, tP and the results rounded."""
    dtype = case.q.dtype if rounds else work
    problem, inputs = accuracy.reference.describe(case.q, case.k, case.v, **options)
    Q, K, V, P, Z, lse, _ = accuracy._scores(problem, inputs, work)
    seen, scale = P > 0, np.asarray(inputs.scale, work)
    rows = seen.any(-1, keepdims=True)

    def there(x, visible):
        return np.where(visible, np.repeat(x, problem.heads // x.shape[1], 1).astype(work), 0)

    tQ, dO = there(tq, rows), there(case.do, rows)
    tdO = np.zeros_like(dO) if tdo is None else there(tdo, rows)
    tK, tV = (there(x, seen.any(-2)[..., None]) for x in (tk, tv))
    T = lambda x: x.swapaxes(-2, -1)  # noqa: E731
    tS = scale * (tQ @ T(K) + Q @ T(tK))
    tlse = (P * tS).sum(-1, keepdims=True)
    tP = P * (tS - tlse)
    dL, tdL = (np.where(rows[..., 0], x, 0).astype(work)[..., None] for x in (case.dlse, tdlse))
    dP, tdP = Z * (dO @ T(V)), Z * (dO @ T(tV) + tdO @ T(V))
    D = (P * dP).sum(-1, keepdims=True) - dL
    tD = (tP * dP + P * tdP).sum(-1, keepdims=True) - tdL
    dS = P * (dP - D)
    tdS = tP * (dP - D) + P * (tdP - tD)
    round_ = lambda x: x.astype(dtype).astype(work)  # noqa: E731
    tdQ = scale * (tdS @ K + dS @ tK)
    tdK = scale * (T(tdS) @ Q + T(dS) @ tQ)
    tdV = T(round_(Z * tP)) @ dO + T(round_(Z * P)) @ tdO
    tdK, tdV = (accuracy.reference.sum_to(
        x.reshape(*x.shape[:1], problem.heads_k, -1, *x.shape[2:]).sum(2), shape.shape) for x, shape in
        ((tdK, case.k), (tdV, case.v)))
    results = (*(x.astype(dtype) for x in (tdQ, tdK, tdV)), tlse[..., 0], tD[..., 0])
    return dict(zip(RESULTS, results))


def check(moved, sums_of, tiles=SMALL, sizes=(16, 8), nbytes=0):
    """The tangents of the gradients of `sums_of`, "q" or "kv"; what is known of the PTX, compiled."""
    case, dtype = moved.case, moved.case.q.dtype
    inputs = {"q": case.q, "k": case.k, "v": case.v}
    grads = {name: poisoned(inputs[name].shape, dtype) for name in sums_of}
    source = (backward_tangent_q if sums_of == "q" else backward_tangent_kv)(
        dtype=dtype.name, out_dtypes=(dtype.name,) * len(grads), head_dim=sizes[0], head_dim_v=sizes[1],
        **tiles._asdict(), mask=case.kinds, score=(), tscore=(), dropout=case.kept_scale != 1, nbytes=nbytes,
        tangents=tuple(name for name in ("q", "k", "v", "do") if getattr(moved, name) is not None),
    )  # fmt: skip
    given = case.lse_log2, *(moved.wanted[name].astype(case.dlse.dtype) for name in ("tlse", "tdelta"))
    statistics = (padded(given[0], np.inf), *(padded(x, 0) for x in (given[1], case.delta, given[2])))
    tangents = (() if x is None else (x,) for x in (moved.q, moved.k, moved.v, moved.do))
    kept = sums_of[0]
    batches, heads, length = inputs[kept].shape[:3]
    blocks = batches * heads * -(-length // (tiles.tile_m if kept == "q" else tiles.tile_n))
    known = launch(
        source.function, (blocks, 1, 1), tiles.threads, source.shared, case.q, case.k, case.v, case.do, *tangents,
        *grads.values(), *statistics, case.mask_of(kept, tiles.tile_m, tiles.tile_n), (), (), case.drops,
        case.group_size, case.scale, case.scale_log2, case.kept_scale, cc=(9, 0),
    )  # fmt: skip
    for name in sums_of:
        assert_accurate("td" + name, grads[name], moved.wanted["td" + name], moved.plain["td" + name], dtype)
    return known


BOTH = pytest.mark.parametrize("sums_of", ["q", "kv"])


@simulated_only
@BOTH
@pytest.mark.parametrize(("stages", "tdo"), [(1, False), (2, True)])
@pytest.mark.parametrize(("unit", "tile", "lanes"), [("fma", 16, 4), ("mma", 32, 4), ("mma", 16, 8)])
def test_two_warps(rng, unit, tile, lanes, stages, tdo, sums_of):
    """They share the tiles that they loop over; with 8 lanes the rows, too."""
    m, n, tile_m, tile_n = (16, 40, tile, 16) if sums_of == "q" else (40, 16, 16, tile)
    check(moved(rng, heads=2, m=m, n=n, tdo=tdo), sums_of, Streamed(unit, tile_m, tile_n, 64, lanes, stages), (16, 16))


MASKS = {
    "causal": {"causal": True},
    "lengths": {"mask": na.Lengths(np.array([[16, 33]]), np.array([[19, 0]])) & na.Window(20, 9), "poison": np.nan},
    "one length": {"mask": na.Lengths(19, 17), "poison": np.nan},
    "blocks": {"mask": na.BlockSparse(np.array([[[[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]]]], bool), (8, 11))},
}


@simulated_only
@BOTH
@pytest.mark.parametrize("mask", MASKS)
def test_masks(rng, mask, sums_of):
    check(moved(rng, heads=2, m=20, n=35, **MASKS[mask]), sums_of)


@simulated_only
@BOTH
def test_dropout_of_groups(rng, sums_of):
    check(moved(rng, heads=4, heads_k=2, m=16, n=20, dropout=na.Dropout(0.3, seed=5)), sums_of)


@compiled_only
@pytest.mark.parametrize(("sums_of", "tiles", "dtype", "size"), [
    ("q", Streamed("mma", 64, 32, 128, stages=2), "bfloat16", 64),
    ("kv", Streamed("mma", 32, 64, 128, stages=2), "float16", 64),
    ("q", Streamed("mma", 32, 32, 128, 8), "float64", 32), ("kv", Streamed("mma", 32, 32, 128, 8), "float64", 32),
    ("kv", Streamed("mma", 16, 64, 128, stages=2), "float32", 64),
])  # fmt: skip
def test_rows_of_tables(rng, sums_of, tiles, dtype, size):
    case = moved(rng, DTYPES[dtype], m=70, n=40, d=size, e=size, causal=True)
    check(case, sums_of, tiles, (size, size), nbytes=16)
