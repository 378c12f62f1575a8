"""Small problems, simulated; and plans, compiled."""

import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from numbattn.cuda.kernels.any.round_dq import DqPart, round_dq
from numbattn.cuda.kernels.hopper.backward_steps import WgmmaTiles
from numbattn.cuda.kernels.hopper.backward_tangent import hopper_backward_tangent, takes
from tests.accuracy import assert_accurate, exact_backward_tangents, plain_backward_tangents, random
from tests.cuda.works import work
from tests.tools.device import AMPERE, HOPPER, on
from tests.tools.launch import compiled_only, launch, poisoned, simulated_only, tensor_map

from ..any.test_backward_tangent import statistics
from ..calls import call, padded

DTYPE = np.dtype(np.float16)
TILES = {64: WgmmaTiles(64, 128, (2, 2)), 128: WgmmaTiles(32, 128, (2, 1))}
SIZES = pytest.mark.parametrize("size", TILES)


def check(rng, size, at_once=2, has_tdo=False, out="float16", **options):
    """size: the rounded head_dims; out: the dtype of tdq."""
    case = call(rng, DTYPE, **{"d": size - 40, "e": size - 24} | options)
    arrays, tile_m = (case.q, case.k, case.v), TILES[size].tile_m
    tangents = [random(rng, x.shape, DTYPE) for x in (*arrays, case.do)[: 3 + has_tdo]]
    if "poison" in options:
        case.do[~np.isfinite(case.lse)] = np.nan
    for tangent, x in zip(tangents, (*arrays, case.do)):
        tangent[np.isnan(x)] = np.nan
    tdo, tdlse = tangents[3] if has_tdo else None, random(rng, case.dlse.shape, case.dlse.dtype)
    options = {name: options[name] for name in ("causal", "mask") if name in options}
    rows = case.do, *arrays, *tangents[:3]
    wanted, plain = (
        formula(*rows, tdo=tdo, dlse=case.dlse, tdlse=tdlse, **options)
        for formula in (exact_backward_tangents, plain_backward_tangents)
    )
    lse, *others = (x.astype(np.float32) for x in statistics(case, [*tangents[:3], tdo], tdlse, **options))
    given = padded(lse, np.inf), *[padded(x, 0) for x in others]
    tdq, tdk, tdv = grads = [poisoned(x.shape, dtype) for x, dtype in zip(arrays, (out, DTYPE, DTYPE))]
    (batches, heads, _), (heads_k, n), length = case.lse.shape, case.k.shape[1:3], given[0].shape[-1]
    sums = np.zeros((batches, heads, length * size), np.float32)
    source = hopper_backward_tangent(
        dtype="float16", out_dtypes=("float16",) * 2, head_dim=size, head_dim_v=size, tiles=TILES[size],
        mask=case.kinds, nbytes=0, has_tdo=has_tdo,
    )  # fmt: skip
    maps = [tensor_map(x, of.box) for x, of in zip((*arrays, case.do, *tangents), source.tensor_maps)]
    launch(
        source.function, (batches * heads_k * -(-n // 128), 1, 1), source.threads, source.shared, *maps[:7],
        tuple(maps[7:]), tdk, tdv, sums, *given, case.mask_of("k", tile_m, 128), case.group_size, case.scale,
        case.scale_log2, np.int32(at_once), cc=(9, 0, "a"),
    )  # fmt: skip
    part = DqPart(tile_m, 64, 128, across=1, transposed=True)
    source = round_dq(
        dtype="float16", out_dtypes=(out,), col_parts=size // 64, nbytes=0, mask=(), **part._asdict()
    )  # fmt: skip
    blocks = batches * heads * length // tile_m * (size // 64)
    launch(source.function, (blocks, 1, 1), source.threads, source.shared, sums, (), tdq, case.scale, ())
    for name, got, *pair in zip(("tdq", "tdk", "tdv"), grads, wanted, plain):
        assert_accurate(name, got, *pair, DTYPE)


@simulated_only
@SIZES
def test_causal(rng, size):
    check(rng, size, m=190, n=150, causal=True, has_tdo=size == 64)


@simulated_only
@SIZES
def test_groups_of_heads(rng, size):
    """More tiles than stages, and heads of a group that see different queries and keys."""
    mask = na.Lengths(np.array([[100, 17, 150, 60]]), np.array([[130, 140, 0, 90]]))
    check(rng, size, heads=4, heads_k=2, m=140, n=150, mask=mask, poison=np.nan, has_tdo=size == 128)


@simulated_only
@SIZES
def test_nothing_is_seen(rng, size):
    check(rng, size, m=130, n=20, mask=na.Causal(offset=-128))


@simulated_only
def test_sums_over_a_batch(rng):
    """Where q is broadcast, tdq is in float32."""
    check(rng, 128, m=100, n=40, out="float32")


@pytest.mark.parametrize(("taken", "about"), [
    (True, {"dtype": "bfloat16", "d": 100, "e": 128}), (True, {"mask": ("lo", "hi", "queries", "keys")}),
    (True, {"along": ("q", "k", "v", "do"), "mask": ("packed",)}), (False, {"along": "qk"}), (False, {"along": "kv"}),
    (False, {"dtype": "float32"}), (False, {"d": 192, "e": 192}), (False, {"e": 128}), (False, {"device": AMPERE}),
    (False, {"mask": ("dense",)}), (False, {"deterministic": True}), (False, {"dropout": True}),
    (False, {"seqlen_q": 127}), (False, {"seqlen_k": 100}),
])  # fmt: skip
def test_what_it_takes(taken, about):
    """The kernels for any GPU take the rest."""
    assert takes(work(**{"along": "qkv"} | about)) == taken


PACKED = na.Segments([0, 40, 130], [0, 190, 400]) & na.Causal()
CALLS = {  # dtype, head_dim, batch of tangents, whether dO has one
    "float16": ("float16", 64, (), False, {"mask": na.Window(100, 10)}),
    "bfloat16": ("bfloat16", 128, (), True, {"causal": True}),
    "packed": ("float16", 128, (), False, {"mask": PACKED}),
    "two tangents": ("bfloat16", 64, (2,), True, {}),
}


@pytest.mark.parametrize("case", [
    "float16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("two tangents", "packed", "bfloat16")),
])  # fmt: skip
@compiled_only
def test_calls(rng, case):
    (dtype, d, lead, has_tdo, options), n = CALLS[case], 400 if case == "packed" else 150
    arrays = [random(rng, (heads, length, d), np.dtype(dtype)) for heads, length in ((2, 130), (1, n), (1, n))]
    tangents = [random(rng, (*lead, *x.shape), x.dtype) for x in arrays]
    do = random(rng, arrays[0].shape, arrays[0].dtype)
    tdo = random(rng, (*lead, *do.shape), do.dtype) if has_tdo else None
    with on(HOPPER) as gpu:
        _, _, saved, tsaved = na.attention_forward_jvp(*arrays, *tangents, **options)
        _, found = na.attention_backward_jvp(do, saved, tsaved, tdo=tdo)
        launched = [step.key.name for program in gpu.programs.values() for step in program.plan.steps]
    assert "hopper_backward_tangent" in launched
    wanted = reference.attention_backward_jvp(do, *arrays, *tangents, tdo=tdo, **options)
    for number in np.ndindex(lead):
        along = [None if x is None else x[number] for x in (*tangents, tdo)]
        plain = plain_backward_tangents(do, *arrays, *along, **options)
        for name, got, want, other in zip(("tdq", "tdk", "tdv"), found, wanted, plain):
            assert_accurate(name, got[number], want[number], other, got.dtype)


FAULTS = {
    "        wait(Q)\n        return start_scores": "        return start_scores",
    "            wait(dO)\n": "",
    "S, tS + more": "S, more",
    "return S, dot(tS, allocate(TK": "return S, dot(layout, allocate(TK",
    "            if masks:\n": "            if False:\n",
    "dP - of_queries(SHARED_D, Q), tdP - of_queries(SHARED_TD, Q)": "dP, tdP - of_queries(SHARED_TD, Q)",
    "tdP - of_queries(SHARED_TD, Q))": "tdP)",
    "            release(dO)\n": "",
    "            release(Q)\n": "",
    "operand(dS, SHARED_Q), allocate(TQ": "operand(tdS, SHARED_Q), allocate(TQ",
    "operand(P, ONLY_DO)": "operand(tP, ONLY_DO)",
    "2 * has_tdo, 2 + OF_DQ": "1 + 2 * has_tdo, 2 + OF_DQ",
    "2 + OF_DQ  ": "3 + OF_DQ  ",
    "else GROUPS_OF_S\n": "else GROUPS_OF_S + 1\n",
    "        clear(allocate(TQ, Q.index), length)\n": "",
    "        clear(allocate(TK, consumer), left)\n": "",
    "(clear_both, clear_tile)": "(clear_both,)",
    "        drain_dq(advance(stages.dS, 1), walk.current, tile, args.mSums)\n": "",
    "sync_warpgroups(CONSUMERS)                              # all have read K": "pass",
    "test_what_it_takes": {
        "and head_dim == head_dim_v": "and True",
        ">= SHORTEST": "> 0",
        "and work.dtypes.keys() >= {\"tq\", \"tk\", \"tv\"}": "and True",
    },
    "cuda/kernels/hopper/tdq_sums.py": {
        "        wait(sdS)\n": "",
        "of.m_block >= 0": "True",
        "first * PARTS + part": "first * PARTS",
        "LATER = started_later": "LATER = started_later + 1",
        "        wait_for_store()                                        #": "        pass  #",
        "        wait_for_store()\n        sync_warpgroup()\n        add(": "        add(",
        "number % HALVES, HALVES": "0, HALVES",
        "        commit(sdS)\n": "",
        "        else:\n            release(sdS)\n": "",
    },
    "cuda/kernels/hopper/forward_steps.py": {
        "clear_rows(stages[NUMBER], length)\n": "clear(stages[NUMBER].tile, length)\n",
    },
    "cuda/kernels/any/round_dq.py": {
        "(tile_n, tile_m) if transposed else (tile_m, tile_n)": "(tile_m, tile_n)",
    },
    "test_calls": {
        "cuda/tile/tma.py": {
            "filled = emit_expect(b, stage.pipeline, index, I32(plan.loaded))":
                "filled = emit_expect(b, stage.pipeline, index, I32(plan.nbytes))",
        },
    },
}
