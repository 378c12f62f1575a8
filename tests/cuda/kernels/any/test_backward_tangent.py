"""In tiles of 16 queries and keys, simulated, and rows of tables, compiled; and by plans, on all kinds of cores."""

from functools import partial
from itertools import product

import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from numbattn.cuda.kernels.any.backward_tangent import backward_tangent_kv, backward_tangent_q
from numbattn.cuda.kernels.any.backward_tangent_tiles import TILES_KV, TILES_Q
from numbattn.cuda.kernels.shared.layouts import DTYPES
from numbattn.cuda.kernels.tables import FMA, Tiles
from numbattn.cuda.plan.planner import DEVICES
from tests.accuracy import assert_accurate, exact_backward_tangents, plain_backward_tangents, random
from tests.tools.device import AMPERE, HOPPER, TURING, on
from tests.tools.launch import compiled_only, launch, mostly_simulated, poisoned, simulated_only

from ..calls import call, padded, padded_lse

SMALL = Tiles("fma", 16, 16, 32, 4)
GIVEN = "q", "k", "v", "do"
BOTH = pytest.mark.parametrize("sums_of", ["q", "kv"])


def check(rng, sums_of, tiles=SMALL, sizes=(16, 8), nbytes=0, given=GIVEN, poison=None, dtype=np.float32, **options):
    """The tangents of the gradients of `sums_of`, "q" or "kv". sizes: the rounded head_dims; given: what has a
    tangent."""
    case = call(rng, dtype, poison=poison, **options)
    dtype, arrays = case.q.dtype, (case.q, case.k, case.v)
    tangents = [random(rng, x.shape, dtype) if name in given else None for name, x in zip(GIVEN, (*arrays, case.do))]
    for tangent, x in zip(tangents[:3] * (poison is not None), arrays):
        tangent[np.isnan(x)] = poison
    tdlse, wanted = random(rng, case.dlse.shape, case.dlse.dtype), {}
    options = {name: x for name, x in options.items() if name in ("causal", "mask", "dropout")}
    rows = case.do, *arrays, *tangents[:3]
    wanted, plain = (
        dict(zip("qkv", formula(*rows, tdo=tangents[3], dlse=case.dlse, tdlse=tdlse, **options)))
        for formula in (exact_backward_tangents, plain_backward_tangents)
    )
    lse, tlse, delta, tdelta = (x.astype(case.dlse.dtype) for x in statistics(case, tangents, tdlse, **options))
    grads = {name: poisoned(x.shape, dtype) for name, x in zip("qkv", arrays) if name in sums_of}
    source = (backward_tangent_q if sums_of == "q" else backward_tangent_kv)(
        dtype=dtype.name, out_dtypes=(dtype.name,) * len(grads), head_dim=sizes[0], head_dim_v=sizes[1],
        tiles=tiles, mask=case.kinds, score=(), tscore=(), dropout=case.kept_scale != 1, nbytes=nbytes,
        tangents=tuple(given),
    )  # fmt: skip
    kept, tile = ("q", tiles.tile_m) if sums_of == "q" else ("k", tiles.tile_n)
    batches, heads, length = (case.q if kept == "q" else case.k).shape[:3]
    launch(
        source.function, (batches * heads * -(-length // tile), 1, 1), tiles.threads, source.shared, *arrays, case.do,
        *[() if x is None else (x,) for x in tangents], *grads.values(),
        (padded_lse if dtype.itemsize > 2 else padded)(lse, np.inf),
        *[padded(x, 0) for x in (tlse, delta, tdelta)], case.mask_of(kept, tiles.tile_m, tiles.tile_n), (), (),
        case.drops, case.group_size, case.scale, case.scale_log2, case.kept_scale, cc=(9, 0),
    )  # fmt: skip
    for name, got in grads.items():
        assert_accurate("td" + name, got, wanted[name], plain[name], dtype)


def statistics(case, tangents, tdlse, **options):
    """lse in base 2, tlse, delta and its tangent, as `delta` and `delta_tangent` make them."""
    to, tlse = reference.attention_jvp(case.q, case.k, case.v, *tangents[:3], **options)
    tdo = np.zeros_like(case.do) if tangents[3] is None else tangents[3]
    tdelta = (case.do.astype(np.float64) * to + tdo.astype(np.float64) * case.wanted["o"]).sum(-1) - tdlse
    return case.lse_log2, tlse, case.delta, np.where(np.isfinite(case.lse), tdelta, 0)


@simulated_only
@BOTH
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("unit", "tile", "lanes", "dtype"), [
    ("fma", 16, 4, "float32"), ("mma", 32, 4, "float32"), ("mma", 32, 4, "float16"), ("mma", 16, 8, "float64"),
])  # fmt: skip
def test_two_warps(rng, unit, tile, lanes, dtype, stages, sums_of):
    """They share the tiles that they loop over; with 8 lanes the rows, too."""
    m, n, tile_m, tile_n = (16, 40, tile, 16) if sums_of == "q" else (40, 16, 16, tile)
    tiles = Tiles(unit, tile_m, tile_n, 64, lanes, stages)
    check(rng, sums_of, tiles, (16, 16), dtype=np.dtype(dtype), heads=2, m=m, n=n)


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
    check(rng, sums_of, heads=2, m=20, n=35, **MASKS[mask])


@simulated_only
@BOTH
def test_dropout_of_groups(rng, sums_of):
    check(rng, sums_of, batch=2, heads=4, heads_k=2, m=16, n=20, dropout=na.Dropout(0.3, seed=5))


@simulated_only
@BOTH
@pytest.mark.parametrize("given", [("q",), ("k",), ("v",), ("do",), ("q", "k", "v"), ()])
def test_tangents_that_are_not_given_are_zero(rng, given, sums_of):
    check(rng, sums_of, m=16, n=20, given=given)


@compiled_only
@pytest.mark.parametrize(("sums_of", "tiles", "dtype", "size"), [
    ("q", Tiles("mma", 64, 32, 128, stages=2), "bfloat16", 64),
    ("kv", Tiles("mma", 32, 64, 128, stages=2), "float16", 64),
    ("q", Tiles("mma", 32, 32, 128, 8), "float64", 32), ("kv", Tiles("mma", 32, 32, 128, 8), "float64", 32),
    ("kv", Tiles("mma", 16, 64, 128, stages=2), "float32", 64),
])  # fmt: skip
def test_rows_of_tables(rng, sums_of, tiles, dtype, size):
    check(rng, sums_of, tiles, (size, size), nbytes=16, dtype=DTYPES[dtype], m=70, n=40, d=size, e=size, causal=True)


@simulated_only
def test_every_device_has_rows():
    """Of all that there is with a tangent of dO, whose tiles take the most room."""
    room = {(device.cc >= (8, 0)): device.shared for device in sorted(DEVICES.values(), key=lambda x: -x.shared)}
    for nbytes, size, has_tensor_cores in product((2, 4, 8), (64, 128, 256), (True, False)):
        dtype = {2: "bfloat16", 4: "float32", 8: "float64"}[nbytes]
        about = {"dtype": dtype, "head_dim": size, "head_dim_v": size, "mask": (), "score": (), "tscore": (),
                 "dropout": False, "nbytes": 16, "tangents": GIVEN}  # fmt: skip
        kernels = (partial(backward_tangent_kv, out_dtypes=(dtype,) * 2), TILES_KV), (
            partial(backward_tangent_q, out_dtypes=(dtype,)), TILES_Q)  # fmt: skip
        for kernel, table in kernels:
            of_bytes = [row for most, row in table[FMA].items() if most >= nbytes * size]
            rows = table[nbytes, size] if has_tensor_cores else of_bytes[:1]
            assert min(kernel(**about, tiles=row).shared for row in rows) <= room[has_tensor_cores]


# ------------------------------------------------------------------------------------------------------------- by plans
def check_call(rng, dtype, *, score=None, count=None, m=20, n=30, d=24, e=40, **options):
    """A call of numbattn."""
    dtype, lead = np.dtype(dtype), () if count is None else (count,)
    arrays = [random(rng, shape, dtype) for shape in ((1, 2, m, d), (1, 1, n, d), (1, 1, n, e))]
    tangents = [random(rng, (*lead, *x.shape), dtype) for x in arrays]
    of_score = [random(rng, (*lead, *x.shape), x.dtype) for part in score or () for x in part._weights]
    options |= {} if score is None else {"score": score}
    o, to, saved, tsaved = na.attention_forward_jvp(*arrays, *tangents, tscore=of_score, **options)
    do, tdo = random(rng, o.shape, dtype), random(rng, to.shape, dtype)
    rows = {"dlse": random(rng, saved.lse.shape, saved.lse.dtype)}
    rows |= {"tdlse": random(rng, tsaved.tlse.shape, tsaved.tlse.dtype), "tdo": tdo}
    _, found = na.attention_backward_jvp(do, saved, tsaved, **rows)
    if score is not None:
        wanted = reference.attention_backward_jvp(do, *arrays, *tangents, **rows, tscore=of_score, **options)
        for name, got, want in zip("qkv", found, wanted):
            np.testing.assert_allclose(got, want, atol=32 * np.finfo(dtype).eps * abs(want).max(), err_msg=name)
        return
    for number in range(count or 1):
        along, of_rows, got = tangents, rows, found
        if count is not None:
            along, got = ([x[number] for x in arrays] for arrays in (tangents, found))
            of_rows = rows | {name: rows[name][number] for name in ("tdlse", "tdo")}
        wanted, plain = (formula(do, *arrays, *along, **of_rows, **options)
                         for formula in (exact_backward_tangents, plain_backward_tangents))  # fmt: skip
        for name, *results in zip("qkv", got, wanted, plain):
            assert_accurate("td" + name, *results, dtype)


@compiled_only
@pytest.mark.slow  # test_scores is a call, too
@pytest.mark.parametrize(("device", "dtype", "options"), [
    (AMPERE, "float32", {"d": 70, "e": 100}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (TURING, "float16", {}), (TURING, "float32", {"count": 2}), (AMPERE, "bfloat16", {"causal": True}),
    )),
    *(pytest.param(device, dtype, {"d": d, "e": d}, marks=pytest.mark.slow)
      for device in (AMPERE, TURING) for dtype in ("float16", "float32", "float64") for d in (60, 120, 200)),
    *(pytest.param(HOPPER, dtype, {"d": 120}, marks=pytest.mark.slow) for dtype in ("bfloat16", "float32", "float64")),
])  # fmt: skip
def test_calls(rng, device, dtype, options):
    """Each table of tiles."""
    with on(device):
        check_call(rng, dtype, **options)


@compiled_only
@pytest.mark.slow  # test_scores is such a call
def test_packed(rng):
    mask = na.Segments(np.array([0, 7, 7, 20]), np.array([0, 10, 12, 30])) & na.Causal()
    with on(AMPERE):
        check_call(rng, "bfloat16", mask=mask)


@mostly_simulated
def test_scores(rng):
    """Parts that add to S, with tangents of their arrays, before and after one that is not linear."""
    bias, slopes = random(rng, (2, 20, 30), np.float32), random(rng, 2, np.float32)
    score = [na.Bias(bias, gradient=False), na.Softcap(2.0), na.Alibi(slopes, gradient=False)]
    with on(TURING):
        check_call(rng, "float32", score=score, causal=True)


FAULTS = {
    "test_two_warps": {
        "range(head_k * group_size, (head_k + 1) * group_size)": "range(head_k * group_size, head_k * group_size + 1)",
        "(end + TILE_M - 1) // TILE_M": "end // TILE_M",
        "(end + TILE_N - 1) // TILE_N": "end // TILE_N",
        "sync_threads()                                      # all have": "pass  # all have",
        "wait_copies()\n                sync_threads()": "sync_threads()",
        "sync_threads()                                  # this": "pass  # this",
        "sync_threads()                              # all have read it": "pass  # all have read it",
        "fetch(1 - stage, mQ": "fetch(stage, mQ",
        "get(allocate(SHARED_LSE, stage), COLS), get(allocate(SHARED_TLSE":
            "get(allocate(SHARED_TLSE, stage), COLS), get(allocate(SHARED_LSE",
        "\n                tdV = add_dv(tdV, P * Z, tP * Z": "\n                tdV = add_dv(tdV, tP * Z, P * Z",
        "COLS), get(allocate(SHARED_TDELTA": "COLS), get(allocate(SHARED_DELTA",
        "\n                dS, tdS = tangents_of_ds(P, tP, dP * Z - D, tdP * Z - tD)":
            "\n                dS, tdS = tangents_of_ds(P, tP, dP * Z, tdP * Z - tD)",
        "tdK * scale, n0": "tdK, n0",
        "tdV, n0": "tdV * scale, n0",
        "\n                stage = opaque(STAGES - 1 - stage)": "\n                stage = opaque(stage)",
        "\n            wait_copies()\n            sync_threads()": "\n            sync_threads()",
        "sync_threads()                                      # this": "pass  # this",
        "sync_threads()                                  # all have read it": "pass  # all have read it",
        "fetch(1 - stage, mK": "fetch(stage, mK",
        "load(mLse[batch, head], ROWS, row + m0), load(mTLse": "load(mTLse[batch, head], ROWS, row + m0), load(mLse",
        "load(mTDelta": "load(mDelta",
        "\n            dS, tdS = tangents_of_ds(P, tP, dP * Z - D, tdP * Z - tD)":
            "\n            dS, tdS = tangents_of_ds(P, tP, dP * Z - D, tdP * Z)",
        "add_dq(tdQ, dS, tdS, sK, stK)": "add_dq(tdQ, tdS, dS, sK, stK)",
        "tdQ * scale, m0": "tdQ, m0",
        "\n            stage = opaque(STAGES - 1 - stage)": "\n            stage = opaque(stage)",
    },
    "test_masks": {
        "\n                    P, tP = masked(": "\n                    P, _ = masked(",
        "\n                    dP, tdP, F, tF = clear_tangents(":
            "\n                    _, tdP, F, tF = clear_tangents(",
        "queries = OperandRows(batch, head, query, maximum(band[2], 1))\n            m_block":
            "queries = OperandRows(batch, head, query, 20)\n            m_block",
        "\n                P, tP = masked(": "\n                P, _ = masked(",
        "maximum(band[3], 1)": "35",
    },
    "test_dropout_of_groups": {
        "\n                Z = drop(full(S_TILE, kept_scale), drops, batch, head":
            "\n                Z = drop(full(S_TILE, kept_scale), drops, head, batch",
        "\n            Z = drop(full(S_TILE, kept_scale), drops, batch, head":
            "\n            Z = drop(full(S_TILE, kept_scale), drops, head, batch",
        "tdP * Z - tD)\n                dS, tdS = pull": "tdP - tD)\n                dS, tdS = pull",
        "head // group_size": "head",
    },
    "test_tangents_that_are_not_given_are_zero": {
        "dp_of = products_step(S_TILE, ACC, dtype, has_tv, has_tdo)":
            "dp_of = products_step(S_TILE, ACC, dtype, has_tdo, has_tv)",
        "dp_of = products_step(S_TILE, ACC, dtype, has_tdo, has_tv)":
            "dp_of = products_step(S_TILE, ACC, dtype, has_tv, has_tdo)",
    },
    "test_packed": {
        "segment.first_query, segment.first_padded_row, keys_of": "segment.first_query, segment.first_query, keys_of",
        "segment.first_key, segment.first_padded_row, queries_of":
            "segment.first_key, segment.first_query, queries_of",
        "queries = OperandRows(batch, head, query, maximum(band[2], 1))\n        keys":
            "queries = OperandRows(batch, head, 0, maximum(band[2], 1))\n        keys",
        "if work.segments:": "if False:",
    },
    "test_scores": {
        "apply(S, tS, scores, tscores, batch, head, query + m0, key + n0)\n                lse":
            "apply(S, tS, scores, scores, batch, head, query + m0, key + n0)\n                lse",
        "\n            dS, tdS = pull_back(dS, tdS, F, tF)": "",
        "\n                dS, tdS = pull_back(dS, tdS, F, tF)": "",
    },
    "test_calls": {
        "// tile_m) * tile_m // tiles.tile_m": "// tiles.tile_m)",
    },
    "cuda/kernels/shared/tangents.py": {
        "test_two_warps": {
            "left_tangent(tX), y": "left_tangent(X), y",
            "left(X), ty": "left(tX), ty",
            "tZ = dot(tZ, x, ty.T)": "tZ = dot(tZ, tx, ty.T)",
            "(x, tx), y.T": "(x, x), y.T",
            "dot(zeros, tx, y.T)": "dot(zeros, x, y.T)",
            "matrix(tX[0], rows)": "matrix(X, rows)",
        },
        "test_tangents_that_are_not_given_are_zero": {
            "dot(zeros, x, y.T), zeros": "dot(zeros, x, y.T), dot(zeros, x, y.T)",
        },
    },
}
