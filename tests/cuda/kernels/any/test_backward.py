"""In tiles of 16 queries and keys, simulated, and rows of tables, compiled; test_passes has more of those of a plan."""

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.any.backward import backward_kv, backward_q
from numbattn.cuda.kernels.tables import Tiles
from tests.accuracy import assert_accurate, assert_all_accurate, random
from tests.tools.device import AMPERE, on
from tests.tools.launch import compiled_only, launch, mostly_simulated, poisoned, simulated_only

from ..calls import call, padded, padded_lse

SMALL = Tiles("fma", 16, 16, 32, 4)


def check(case, sums_of, tiles=SMALL, sizes=(16, 8), nbytes=0, partial_sums=None):
    """The gradients of `sums_of`, "q", "kv" or, of a block with all keys, "kvq"; what is known of the PTX, compiled.
    sizes: the rounded head_dims. partial_sums: of dS, to which the gradient of the case's bias of 0 is added."""
    dtype, kept = case.q.dtype, "q" if sums_of == "q" else "k"
    inputs = {"q": case.q, "k": case.k, "v": case.v}
    grads = {name: poisoned(inputs[name].shape, dtype) for name in sums_of}
    source = (backward_q if kept == "q" else backward_kv)(
        dtype=dtype.name, out_dtypes=(dtype.name,) * len(grads), head_dim=sizes[0], head_dim_v=sizes[1],
        tiles=tiles, mask=case.kinds, score=(), dropout=case.kept_scale != 1, nbytes=nbytes,
        with_sums=partial_sums is not None,
    )  # fmt: skip
    lse = (padded_lse if dtype.itemsize > 2 else padded)(case.lse_log2, np.inf)
    statistics = lse, padded(case.delta, 0)
    batches, heads, rows = inputs[kept].shape[:3]
    results, to_dq = [*grads.values()][:2], ((*grads.values(),)[2:],) if kept == "k" else ()
    parts = batches if partial_sums is None else min(partial_sums[..., 0, 0].size // heads, batches)
    blocks, sums = parts * heads * -(-rows // (tiles.tile_m if kept == "q" else tiles.tile_n)), ()
    if partial_sums is not None:
        sums, before = (partial_sums,), partial_sums.copy()
    known = launch(
        source.function, (blocks, 1, 1), tiles.threads, source.shared, case.q, case.k, case.v, case.do, *results,
        *statistics, case.mask_of(kept, tiles.tile_m, tiles.tile_n), (), case.drops, case.group_size, case.scale,
        case.kept_scale, *to_dq, sums, cc=(9, 0),
    )  # fmt: skip
    if sums:
        assert_accurate("dbias", (partial_sums - before).sum(0), case.wanted["dbias"], case.plain["dbias"], dtype)
    for name in sums_of:
        assert_accurate("d" + name, grads[name], case.wanted["d" + name], case.plain["d" + name], dtype)
    return known


BOTH = pytest.mark.parametrize("sums_of", ["q", "kv"])


@simulated_only
@BOTH
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("unit", "tile", "lanes", "sliced"), [
    ("fma", 16, 4, False), ("mma", 32, 4, False), ("mma", 16, 8, False), ("mma", 16, 8, True),
])  # fmt: skip
def test_two_warps(rng, unit, tile, lanes, sliced, stages, sums_of):
    """They share the tiles that they loop over; with 8 lanes the rows, too, or the depth of S and dP."""
    m, n, tile_m, tile_n = (16, 40, tile, 16) if sums_of == "q" else (40, 16, 16, tile)
    check(call(rng, heads=2, m=m, n=n), sums_of, Tiles(unit, tile_m, tile_n, 64, lanes, stages, sliced), (16, 16))


@compiled_only
@pytest.mark.parametrize(("sums_of", "tiles", "dtype", "size"), [
    ("q", Tiles("mma", 32, 32, 256, 16), "float64", 192), ("kv", Tiles("mma", 32, 32, 256, 16), "float64", 192),
    ("q", Tiles("mma", 32, 16, 128, 8, 1, True), "float64", 256),
    ("kv", Tiles("mma", 16, 32, 256, 16, 1, True), "float64", 256),
    ("q", Tiles("mma", 64, 64, 256, 8), "float32", 192), ("q", Tiles("mma", 64, 32, 256, 8, 1, True), "float32", 256),
    ("kv", Tiles("mma", 32, 64, 256, 8), "float32", 256),
])  # fmt: skip
def test_rows_of_tables(rng, sums_of, tiles, dtype, size):
    """Those whose warps share rows, with aligned rows."""
    case = call(rng, np.dtype(dtype), m=70, n=40, d=size, e=size, causal=True)
    known = check(case, sums_of, tiles, (size, size), nbytes=16)
    assert not (tiles.sliced and +known.conflicts)


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
    check(call(rng, heads=2, m=20, n=35, **MASKS[mask]), sums_of)


@simulated_only
@pytest.mark.parametrize(("mask", "stages", "parts"), [
    ({}, 2, 2), (MASKS["causal"], 1, 1), (MASKS["lengths"], 2, 1), (MASKS["one length"], 1, 2), (MASKS["blocks"], 2, 1),
], ids=["none", "causal", "lengths", "one length", "blocks"])  # fmt: skip
def test_all_keys_in_a_block(rng, mask, stages, parts):
    """It computes dQ, too: also where a tile of queries sees nothing."""
    tiles = Tiles("mma", 16, 64, 64, stages=stages, parts=parts)
    check(call(rng, heads=2, m=20, n=35, e=16, **mask), "kvq", tiles, (16, 16))


@simulated_only
def test_all_keys_of_groups(rng):
    tiles = Tiles("mma", 16, 32, 32)
    check(call(rng, heads=4, heads_k=2, m=20, n=30, dropout=na.Dropout(0.3, seed=5)), "kvq", tiles)


@simulated_only
@BOTH
def test_dropout(rng, sums_of):
    check(call(rng, batch=2, heads=2, m=16, n=16, dropout=na.Dropout(0.3, seed=5)), sums_of)


SUMMED = {  # by mask: dtype, heads, of the bias, queries, keys, stages
    "causal": (np.float32, 2, 2, 19, 18, 2), "lengths": (np.float64, 2, 1, 34, 35, 1),
    "one length": (np.float32, 3, 3, 33, 35, 2), "blocks": (np.float64, 2, 1, 20, 35, 1),
}  # fmt: skip


@pytest.mark.parametrize("mask", SUMMED)
def test_sums_of_dS(rng, world, mask):
    check_sums(rng, mask, "q", Tiles("mma", 16, 16, 32))


@pytest.mark.parametrize("mask", SUMMED)
def test_sums_of_dS_with_all_keys(rng, world, mask):
    check_sums(rng, mask, "kvq", Tiles("mma", 16, 64, 64))


@simulated_only
def test_more_parts_than_elements(rng):
    """Where a launch takes only a piece of the batch; each block has sums of its own."""
    partial_sums = check_sums(rng, "causal", "q", Tiles("mma", 16, 16, 32), parts=5)
    assert (partial_sums != 1).any((1, 2, 3)).tolist() == [True] * 3 + [False] * 2


def check_sums(rng, mask, sums_of, tiles, parts=2):
    """Those of three elements of a batch, for a bias by head or for all, added to those of another launch."""
    dtype, heads, own_heads, m, n, stages = SUMMED[mask]
    bias = na.Bias(np.zeros((own_heads, m, n), dtype))
    case = call(rng, dtype, batch=3, heads=heads, heads_k=heads, m=m, n=n, e=16, score=bias, **MASKS[mask])
    partial_sums = np.ones((parts * heads // own_heads, own_heads, m, n), dtype)
    check(case, sums_of, tiles._replace(stages=stages), (16, 16), partial_sums=partial_sums)
    return partial_sums


@mostly_simulated
@pytest.mark.parametrize(("d", "own_heads"), [(72, 2), (20, 2), (72, 1)])
def test_a_bias_that_a_batch_shares(rng, world, d, own_heads):
    """As planned: with all keys in a block, and without, in two launches."""
    q, k, v, do = (random(rng, (2, 2, 2, n, d), np.float64).swapaxes(0, 1) for n in (5, 7, 7, 5))
    options = {"score": na.Bias(random(rng, (own_heads, 5, 7), np.float64)), "causal": True}
    with on(AMPERE) as gpu:
        o, saved = na.attention_forward(q, k, v, **options)
        grads = na.attention_backward(do, saved)
    names = [step.key.name for program in gpu.programs.values() for step in program.plan.steps]
    assert "bias_gradient" not in names
    assert names.count("backward_q") == (0 if d == 20 else 2)
    assert_all_accurate((o, saved.lse, *grads, *grads.score), do, q, k, v, None, **options)


FAULTS = {
    "range(head_k * group_size, (head_k + 1) * group_size)": "range(head_k * group_size, head_k * group_size + 1)",
    "(end + TILE_M - 1) // TILE_M": "end // TILE_M",
    "sync_threads()                                      # all have": "pass  # all have",
    "wait_copies()\n                sync_threads()                                  # dO":
        "sync_threads()                                  # dO",
    "sync_threads()                                  # dO": "pass  # dO",
    "wait_copies()\n                    sync_threads()  ": "sync_threads()  ",
    "sync_threads()                              # Q has": "pass  # Q has",
    "sync_threads()                              # all have read dO": "pass  # all have read dO",
    "fetch_do(1 - stage": "fetch_do(stage",
    "fetch_rows(1 - stage": "fetch_rows(stage",
    "not IN_TURN:\n                    stage = 1 - stage": "IN_TURN:\n                    stage = 1 - stage",
    "allocate(SHARED_LSE, stage), COLS)": "allocate(SHARED_DELTA, stage), COLS)",
    "recompute(S, high, rest, to_log2(scale))": "recompute(S, high, rest, scale)",
    "                    P, F, dP = masked(": "                    P, F, _ = masked(",
    "mQ[batch, head][query : query + length]": "mQ[batch, head]",
    "\n                Z = drop(full(S_TILE, kept_scale), drops, batch, head":
        "\n                Z = drop(full(S_TILE, kept_scale), drops, head, batch",
    "left_P(P * Z)": "left_P(P)",
    "\n                dS = pull_back(P * (dP * Z - D)": "\n                dS = pull_back(P * (dP - D)",
    "\n                dS = pull_back(P * (dP * Z - D), F)": "\n                dS = pull_back(P * (dP * Z), F)",
    "dot(dK, left_dS(dS), sQ)": "dot(full(K_TILE, ZERO), left_dS(dS), sQ)",
    "left_P, left_dS = left_operand(S_TILE, shared, ACC), left_operand(S_TILE, shared, ACC)":
        "left_P = left_dS = left_operand(S_TILE, shared, ACC)",
    "dK * scale, n0": "dK, n0",
    "dV, n0": "dV * scale, n0",
    "head_k, key, row = head // group_size": "head_k, key, row = head",
    "mK[batch, head_k][key : key + length_k]": "mK[batch, head_k]",
    "(end + TILE_N - 1) // TILE_N": "end // TILE_N",
    "\n            wait_copies()\n            sync_threads()": "\n            sync_threads()",
    "\n            wait_copies()\n            sync_threads()  ": "\n            wait_copies()  ",
    "wait_copies()\n                sync_threads()                                  # K has":
        "sync_threads()                                  # K has",
    "sync_threads()                                  # K has": "pass  # K has",
    "fetch_v(1 - stage": "fetch_v(stage",
    "fetch_k(1 - stage": "fetch_k(stage",
    "not IN_TURN:\n                stage = 1 - stage": "IN_TURN:\n                stage = 1 - stage",
    "load(mLse[batch, head][row": "load(mDelta[batch, head][row",
    "recompute(S, lse, low, to_log2(scale))": "recompute(S, lse, low, scale)",
    "\n            Z = drop(full(S_TILE, kept_scale), drops, batch, head":
        "\n            Z = drop(full(S_TILE, kept_scale), drops, head, batch",
    "\n            dS = pull_back(P * (dP * Z - D)": "\n            dS = pull_back(P * (dP - D)",
    "dot(dQ, left(dS), sK)": "dot(dQ, left(P), sK)",
    "dQ * scale, m0": "dQ, m0",
    ("test_sums_of_dS[simulated-causal]",
     "test_sums_of_dS_with_all_keys[simulated-causal]"): {
        "mSums[0][own].T": "mSums[0][own]",
        "add_dS(turn, dS, n0, m0)": "add_dS(turn, P, n0, m0)",
        "add_dS(turn, dS, m0, n0)": "add_dS(turn, P, m0, n0)",
    },
    (
        "cuda/kernels/shared/test_segments.py::test_nan_stays_in_its_segment_simulated[simulated-CUDA cores]",
        "cuda/kernels/shared/test_segments.py::test_gradients_without_own_kernels[compiled-CUDA cores]",
    ): {
        "segment.first_query, segment.first_padded_row, keys_of": "segment.first_query, segment.first_query, keys_of",
        "mQ[batch, head][query : query + length]": "mQ[batch, head][query:]",
        "query + m0, key + n0)\n                high": "m0, n0)\n                high",
        "n_blocks * slices_of(work.problem),\n    packs=True": "n_blocks * slices_of(work.problem),\n    packs=False",
        "segment.first_key, segment.first_padded_row\n": "segment.first_key, segment.first_query\n",
        "mK[batch, head_k][key : key + length_k]": "mK[batch, head_k][key:]",
        "query + m0, key + n0)\n            P": "m0, n0)\n            P",
        "mDQ[batch, head][query:end_query]": "mDQ[batch, head][query:]",
        "*tiles) * slices_of(work.problem),\n    packs=True": "*tiles) * slices_of(work.problem),\n    packs=False",
    },
    "cuda/plan/test_planner.py": {
        "not work.segments and SPEC_ALL": "SPEC_ALL",
    },
    "cuda/plan/test_score_gradients.py": {
        "sums_dS(work) and problem": "problem",
        "problem.dtype.itemsize > 2 and": "",
        "<= SUMMED and not is_wide(problem)": "<= SUMMED",
        "<= SUMMED and": "<= SUMMED + 1 and",
        "is_short and batches > 1": "is_short",
    },
    "cuda/kernels/shared/layouts.py": {
        ("cuda/kernels/any/test_forward.py", "cuda/kernels/any/test_backward.py"): {
            "return row_index(layout, m0), col_index(layout, n0)":
                "return row_index(layout, n0), col_index(layout, m0)",
            "return col_index(layout, m0), row_index(layout, n0)":
                "return row_index(layout, m0), col_index(layout, n0)",
            "        arrive()\n": "",
        },
        "test_two_warps": {
            "columns(x, mine, SLICES)": "columns(x, 0, SLICES)",
            "sync_threads()                                          # all have read": "pass  # all have read",
            "put_registers(allocate(PLACE, mine), S)\n        sync_threads()":
                "put_registers(allocate(PLACE, mine), S)",
            "range(1, SLICES)": "range(2, SLICES)",
        },
        "test_all_keys_in_a_block": {
            "columns(y, part, PARTS)": "columns(y, 0, PARTS)",
        },
        "cuda/kernels/mma/test_backward.py::test_causal": {
            "cols // 16": "cols // 8",
            "        sync()\n        save(": "        save(",
        },
        "cuda/kernels/mma/test_backward.py::test_every_warp_has_sums_of_its_own": {
            "sixteens & -sixteens": "sixteens",
        },
    },
    "cuda/kernels/shared/sums_of_ds.py": {
        (
            "test_sums_of_dS[simulated-causal]",
            "test_sums_of_dS_with_all_keys[simulated-causal]", "test_more_parts_than_elements",
        ): {
            "        wait_copies()\n        sync_threads()": "        wait_copies()",
            "range(first, batches, parts)": "range(first, first + 1, parts)",
            "minimum(blocks * own_heads // heads, batches)": "blocks * own_heads // heads",
            "first * heads + head)": "head)",
            "load(to, S_TILE, row) + dS, row)": "dS, row)",
            "turn.sum_dS[:, col:]": "turn.sum_dS",
        },
    },
    "cuda/kernels/shared/all_keys.py": {
        "test_all_keys_in_a_block": {
            "maximum(longest(mask, tile), 1)": "end_key",
            "m_block < first or m_block >= end": "m_block < first or m_block > end",
            "sync_threads()                                          # dS": "pass  # dS",
            "dQ * scale, m0)\n\n    @device": "dQ, m0)\n\n    @device",
        },
    },
}
