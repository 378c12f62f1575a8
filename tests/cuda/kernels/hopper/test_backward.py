"""Small tiles of queries and keys, simulated; test_passes has those of a plan, compiled."""

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.any.round_dq import DqPart, round_dq
from numbattn.cuda.kernels.hopper.backward_kv import hopper_backward_kv
from numbattn.cuda.kernels.hopper.backward_q import hopper_backward_q
from numbattn.cuda.kernels.hopper.backward_steps import WgmmaTiles
from numbattn.cuda.kernels.hopper.backward_wide import hopper_backward_wide
from numbattn.cuda.kernels.hopper.variants import BOTH, DP_DS_DV, DP_DV_DS, DV_DP_DS, SUMS, TURNS, Variant
from tests.accuracy import assert_accurate
from tests.tools.launch import launch, poisoned, simulated_only, tensor_map

from ..calls import call, padded

pytestmark = simulated_only
DTYPE = np.float16
SIZES = {  # tile_m, tile_n
    "kv": (128, 128), "sums": (128, 128), "late": (128, 128), "turns": (128, 128), "wide": (64, 64), "q": (128, 64),
}  # fmt: skip
KERNELS = pytest.mark.parametrize("kernel", SIZES)


def check(rng, kernel, order=DP_DV_DS, at_once=2, sizes=None, workers=2, **problem):
    """workers: how many blocks of a persistent kernel share the work."""
    case = call(rng, DTYPE, **{"d": 24, "e": 40} | problem)
    tile_m, tile_n = sizes or SIZES[kernel]
    is_late, in_turn = kernel == "late", kernel == "turns"
    adds_dq = is_late or in_turn or kernel == "sums"
    of = "q" if kernel == "q" else "qkv" if adds_dq else "kv"
    grads = {name: poisoned({"q": case.q, "k": case.k, "v": case.v}[name].shape, DTYPE) for name in of}
    common = {"dtype": "float16", "head_dim": 64, "head_dim_v": 64, "nbytes": 0, "mask": case.kinds, "score": (),
              "dropout": case.kept_scale != 1}  # fmt: skip
    tiles = WgmmaTiles(tile_m, tile_n, (2, 1) if kernel == "q" else 2)
    statistics = padded(case.lse_log2, np.inf), padded(case.delta, 0)
    (batches, heads, m), (heads_k, n) = case.lse.shape, case.k.shape[1:3]
    rows = statistics[0].shape[-1]
    sums = np.full((batches, heads, rows * 64), np.nan if in_turn else 0, np.float32)
    turns = np.zeros((batches, heads, rows // 64), np.uint32) if in_turn else ()
    numbers = (case.drops, case.group_size, case.ds_scale, case.scale_log2, case.kept_scale, np.int32(at_once),
               case.delta_scale)  # fmt: skip
    if kernel == "q":
        source = hopper_backward_q(**common, tiles=tiles, out_dtypes=("float16",))
        blocks, arrays = batches * heads * -(-m // tile_m), (grads["q"], ())
    elif kernel == "wide":
        source = hopper_backward_wide(**common, tiles=tiles, out_dtypes=("float16",) * 2)
        blocks, arrays = batches * heads_k * -(-n // tile_n), (grads["k"], grads["v"], (), ())
    else:
        kernels = TURNS if in_turn else SUMS if adds_dq else BOTH
        variant = Variant(kernels, order, dq_late=is_late, statistics_early=is_late)
        source = hopper_backward_kv(**common, tiles=tiles, variant=variant, out_dtypes=("float16",) * 2)
        blocks, arrays = min(batches * heads_k * -(-n // tile_n), workers), (grads["k"], grads["v"], sums, turns, ())
        numbers += (counters := np.zeros(2, np.uint32),)
    inputs = case.q, case.k, case.v, case.do
    launch(
        source.function, (blocks, 1, 1), source.threads, source.shared,
        *(tensor_map(x, found.box) for x, found in zip(inputs, source.tensor_maps)), (), *arrays, *statistics,
        case.mask_of("q" if kernel == "q" else "k", tile_m, tile_n), (), *numbers,
    )  # fmt: skip
    if of != "q" and kernel != "wide":
        assert not counters.any()                               # as the next kernel needs them
    if adds_dq:
        part = DqPart(64, 64, 128, across=1, turn=128 * in_turn)
        source = round_dq(dtype="float16", out_dtypes=("float16",), col_parts=1, nbytes=0, mask=(), **part._asdict())
        parts = batches * heads * -(-m // 64)
        arguments = sums, turns, grads["q"], case.ds_scale, ()
        launch(source.function, (parts, 1, 1), source.threads, source.shared, *arguments)
    for name, got in grads.items():
        assert_accurate("d" + name, got, case.wanted["d" + name], case.plain["d" + name], DTYPE)


@KERNELS
def test_causal(rng, kernel):
    check(rng, kernel, m=190, n=150, causal=True)


@KERNELS
def test_groups_of_heads(rng, kernel):
    """More tiles than stages, and heads of a group that see different queries and keys."""
    mask = na.Lengths(np.array([[100, 17, 150, 60]]), np.array([[130, 140, 0, 90]]))
    check(rng, kernel, heads=4, heads_k=2, m=140, n=150, mask=mask, poison=np.nan)


@pytest.mark.parametrize("mask", [na.Window(60, 100), na.Window(-140, 300), na.Window(130, -20)])
def test_turns_of_tiles_that_see_others(rng, mask):
    """The first in turn is not always the first tile of keys; queries that see nothing have no turn."""
    check(rng, "turns", heads=2, heads_k=1, m=300, n=500, mask=mask, workers=3)


@pytest.mark.parametrize("kernel", [kernel for kernel in SIZES if kernel != "turns"])
def test_blocks(rng, kernel):
    blocks = np.array([[[[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]]]], bool)
    check(rng, kernel, m=192, n=256, mask=na.BlockSparse(blocks, (64, 64)))


@pytest.mark.parametrize("kernel", ["kv", "q"])
def test_one_consumer(rng, kernel):
    """Whose tiles of queries and of keys are small blocks of a mask, all or nothing, but for the last ones."""
    blocks = np.array([[[[0, 0, 1], [1, 0, 0], [1, 1, 0]], [[0, 0, 0], [1, 0, 1], [0, 0, 0]]]], bool)
    check(rng, kernel, heads=2, m=180, n=140, mask=na.BlockSparse(blocks, (64, 64)), sizes=(64, 64))


@pytest.mark.parametrize("kernel", ["kv", "q"])
def test_one_consumer_and_lengths(rng, kernel):
    """It clears both of the tiles where a sequence ends."""
    mask = na.Lengths(np.array([[100]]), np.array([[90]]))
    check(rng, kernel, m=128, n=128, mask=mask, sizes=(64, 64), poison=np.nan)


@KERNELS
def test_nothing_is_seen(rng, kernel):
    check(rng, kernel, m=130, n=20, mask=na.Causal(offset=-128))


@KERNELS
def test_dropout(rng, kernel):
    check(rng, kernel, batch=2, heads=2 if kernel == "kv" else 1, m=60, n=60, dropout=na.Dropout(0.3, seed=5))


@pytest.mark.parametrize("kernel", ["sums", "q"])
def test_dropout_of_more_tiles_than_stages(rng, kernel):
    check(rng, kernel, m=300, n=130, causal=True, dropout=na.Dropout(0.5, seed=7), order=DP_DS_DV)


@pytest.mark.parametrize(("kernel", "order"), [("kv", DV_DP_DS), ("sums", DP_DS_DV)])
def test_other_orders_of_products(rng, kernel, order):
    check(rng, kernel, m=300, n=130, order=order)


def test_parts_of_dq_are_those_of_the_consumers():
    with pytest.raises(ValueError, match="tile_m: got 64 for head_dim 64, expected 2 parts of dQ"):
        hopper_backward_kv(
            dtype="float16", out_dtypes=("float16",) * 2, head_dim=64, head_dim_v=64,
            tiles=WgmmaTiles(64, 128, 2), variant=Variant(), mask=(), score=(), dropout=False, nbytes=0,
        )  # fmt: skip


FAULTS = {
    "cuda/kernels/hopper/variants.py": {
        "cuda/plan/test_planner.py::test_a_consumer_has_registers_for_both_sums_unless_much_is_looked_up": {
            'Case("128 nonlinear dropout", {': 'Case("192 nonlinear dropout", {',
            '"128 nonlinear dropout", {': '"nonlinear dropout", {',
            "is_looked_up(work.mask) or looks_up(work.score)": "is_looked_up(work.mask)",
            '"64 intervals", {': '"192 intervals", {',
            'Case("64 intervals", {': 'Case("intervals", {',
        },
        "cuda/plan/test_planner.py::test_no_sums_that_are_much_larger_than_dq": {
            'Case("narrow", {': 'Case("192 narrow", {',
            "work.problem.head_dim <= 32": "False",
        },
        "cuda/plan/test_planner.py::test_short_sequences_of_few_features_have_kernels_for_ampere": {
            '"narrow short plain any-order", {': '"narrow short any-order", {',
            'short plain any-order", {': 'short plain", {',
            "longest_sequence(work) <= SHORT": "longest_sequence(work) < SHORT",
        },
    },
    "cuda/kernels/hopper/kv_schedule.py": {
        "cuda/kernels/shared/test_segments.py::test_nan_stays_in_its_segment_simulated": {
            "tile.segment.first_key + tile.first": "tile.first",
            "tile.segment.first_query + m0)": "m0)",
            "tile.segment.first_padded_row + m0": "m0",
        },
        "finish(args.counters, grid_size())": "pass",
        "sync_warpgroup()                                            # all have read it": "pass",
    },
    "cuda/kernels/hopper/backward_kv.py": {
        "cuda/kernels/hopper/test_backward.py::test_one_consumer": {
            "pipelines_within(shared, *given, CONSUMERS)": "pipelines_within(shared, *given)",
        },
        "publish_ds(dS, advance(sdS, 1)": "publish_ds(dS, sdS",
        "sync_warpgroup()                                    # all have read": "pass  # all have read",
        "publish_ds(full(S_TILE, ZERO), stages.dS, nowhere, mSums, tile, args.mask)": "pass",
        "if HAS_MASK and not needs_mask": "if HAS_MASK or not needs_mask",
        "keys < tile.first + TILE_N": "keys < tile.first",
        "dK = wgmma_wait(dK, AHEAD)": "dK = wgmma_wait(dK, 1)",
        "wgmma_wait(dQ, AHEAD)": "wgmma_wait(dQ, 1)",
        "sync_warpgroups(CONSUMERS)                              # all have read K": "pass  # all have read K",
        "    fence_async_proxy()\n    sync_warpgroup()\n    release(place)": "    sync_warpgroup()\n    release(place)",
        "done(advance(stages.V, consumer))": "pass",
    },
    "cuda/kernels/hopper/kv_steps.py": {
        "dS_of(PF, wgmma_wait(dP, 0), delta_of(delta, Q), args.delta_scale)     #":
            "dS_of(PF, wgmma_wait(dP, 1), delta_of(delta, Q), args.delta_scale)     #",
        "return dS_of(PF, wgmma_wait(dP, 1)": "return dS_of(PF, wgmma_wait(dP, 2)",
        (
            "cuda/kernels/scores/test_bias.py::test_biases_that_tma_loads[compiled-sums]",
            "cuda/kernels/scores/test_bias.py::test_biases_that_tma_loads_simulated",
        ): {
            "tile.segment.first_key + tile.first + consumer * ROWS": "tile.segment.first_key + tile.first",
            "sync_warpgroup()                                    # all have read it": "pass  # all have read it",
        },
    },
    "cuda/kernels/hopper/backward_q.py": {
        "cuda/kernels/hopper/test_backward.py::test_one_consumer": {
            "wgmma(cols), tile_m // ROWS": "wgmma(cols), 2",
        },
        "m_blocks - 1 - number, seqlen_q": "number - 1, seqlen_q",
        "tile, head // group_size": "tile, head",
        "cuda/kernels/scores/test_bias.py::test_biases_that_tma_loads[compiled-deterministic]": {
            "work.m_block * TILE_M + consumer * ROWS, n0": "work.m_block * TILE_M, n0",
        },
    },
    "cuda/kernels/hopper/dq_sums.py": {
        "        release(sdS)\n": "",
        "first * CONSUMERS + part, dq_place(sdS, part)": "first * CONSUMERS, dq_place(sdS, part)",
        "send_dq(sdS, walk.leaving, mSums, tile)": "pass",
        "            add_dq(sdS, walk.previous, mSums, tile)": "            pass",
        "sdS.index % PLACES * CONSUMERS": "0",
    },
    "cuda/kernels/hopper/dq_turns.py": {
        "maximum(of.m_block * TILE_M + lo, 0) // TILE_N": "0",
        "if walk.previous.m_blocks > 0:": "if walk.current.m_blocks > 0:",
        "        hand_over(sdS, walk.previous, tile, mask)\n": "",
        "        acquire(P)\n        put_registers": "        put_registers",
        "if turn > 0:": "if turn >= 0:",
        "number * CONSUMERS + part, dQ)\n            else": "number * CONSUMERS, dQ)\n            else",
        "number, turn + 1)": "number, turn)",
        "cuda/plan/test_planner.py::test_matrices_that_are_computed_in_turn_stay_in_the_cache": {
            "min(32, 4 * L2_BYTES // of_matrix)": "4 * L2_BYTES // of_matrix",
            "+ 1) // 2 * 2 or 2": "+ 1)",
        },
    },
    "cuda/kernels/any/round_dq.py": {
        "                dQ = full(LAYOUT, ZERO)\n": "                pass\n",
    },
    "cuda/kernels/shared/query_tiles.py": {
        "maximum(at.m_blocks - 1, at.m_block)": "at.m_blocks - 1",
        "if at.m_block > at.known:": "if at.m_block > 0:",
    },
    "cuda/kernels/hopper/backward_wide.py": {
        "sync_warpgroup()                                        # all have read P": "pass  # all have read P",
        "        sync_warpgroup()\n        commit(sP)\n": "        commit(sP)\n",
        "acquire(advance(V, 1))                                  # the other consumer has read V": "pass  # has read V",
    },
}
