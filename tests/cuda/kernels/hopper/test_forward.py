"""What the kernel does not share, simulated, see test_forward_skeleton; test_passes has tiles of a plan, compiled."""

import numpy as np

import numbattn as na
from numbattn.cuda.kernels.hopper.forward import hopper_forward
from numbattn.cuda.kernels.hopper.forward_tiles import Warpgroups
from tests.accuracy import assert_accurate
from tests.tools.launch import launch, poisoned, simulated_only, tensor_map

from ..calls import call

pytestmark = simulated_only
TILES = Warpgroups(64, 2, stages=2, q_stages=3)


def check(rng, at_once=1, heads_per_tile=1, ascending=0, blocks=1, tiles=TILES, head_dim_v=64, **problem):
    case = call(rng, np.float16, **{"d": 24, "e": 40} | problem)
    dtype, dropout = case.q.dtype.name, case.kept_scale != 1
    source = hopper_forward(
        dtype=dtype, out_dtypes=(dtype,), head_dim=64, head_dim_v=head_dim_v, tiles=tiles, mask=case.kinds, score=(),
        dropout=dropout,
    )  # fmt: skip
    o, lse, counters = poisoned(case.do.shape, case.q.dtype), poisoned(case.lse.shape), np.zeros(2, np.uint32)
    mask = case.mask_of("q", tiles.tile_m, tiles.tile_n)
    maps = [tensor_map(x, found.box) for x, found in zip((case.q, case.k, case.v, o), source.tensor_maps)]
    launch(
        source.function, (blocks, 1, 1), source.threads, source.shared, *maps, (), (), (), lse, mask, (), case.drops,
        counters, case.group_size, case.scale_log2, case.kept_scale,
        *map(np.int32, (at_once, heads_per_tile, ascending)),
        cc=(9, 0, "a"),
    )  # fmt: skip
    assert not counters.any()
    for name, got in (("o", o), ("lse", lse)):
        assert_accurate(name, got, case.wanted[name], case.plain[name], got.dtype)


def test_one_consumer(rng):
    """Whose tiles of queries and of keys are small blocks of a mask, all or nothing, but for the last ones."""
    blocks = np.array([[[[0, 0, 1], [1, 0, 0], [1, 1, 0]], [[0, 0, 0], [1, 0, 1], [0, 0, 0]]]], bool)
    mask, tiles = na.BlockSparse(blocks, (64, 64)), Warpgroups(64, 1, stages=2, q_stages=2)
    check(rng, heads=2, m=180, n=140, mask=mask, tiles=tiles, blocks=2)


def test_wide_heads(rng):
    check(rng, m=70, n=140, e=210, head_dim_v=256)


FAULTS = {
    ("cuda/kernels/hopper/test_forward.py", "cuda/kernels/hopper/test_forward_skeleton.py"): {
        "skip(K, V, tile, args.mask, here, next_state, tile.n_blocks)": "K, V, here, next_state",
        "if RESCALES_FIRST:\n                O =": "if False:\n                O =",
        "if not RESCALES_FIRST:\n                O =": "if False:\n                O =",
        "            wait(K)\n            S = dot(": "            S = dot(",
        "            wait(V)\n            O = dot(O": "            O = dot(O",
        "            release(K)\n            if BY_PRODUCT:": "            if BY_PRODUCT:",
        "wgmma_wait(O, 0)\n            release(V)\n            P": "wgmma_wait(O, 0)\n            P",
        "            O = wgmma_wait(O, 0)\n            release(V)\n            P":
            "            release(V)\n            O = wgmma_wait(O, 0)\n            P",
        "args.drops, tile.batch, tile.head": "args.drops, 0, tile.head",
        "acquire(Q)                                              #": "pass  #",
        "        wait(Q)\n": "",
        "        wait(K)\n        S = wgmma_wait(": "        S = wgmma_wait(",
        "        wait(V)\n        O = dot(rescaled(": "        O = dot(rescaled(",
        "dot(rescaled(O, alpha), P, V.tile)": "dot(O, P, V.tile)",
        "O * (inverse(total, alpha) * args.kept_scale)": "O * inverse(total, alpha)",
        "        fence_async_proxy()\n        sync_warpgroup()\n": "        sync_warpgroup()\n",
        "        fence_async_proxy()\n        sync_warpgroup()\n        release":
            "        fence_async_proxy()\n        release",
        "release(Q)                                              #": "pass  #",
        "        release(W)\n        return": "        return",
        "cuda/test_origin.py::test_wide": {
            "if not IS_STAGED or (IS_PACKED and": "if (IS_PACKED and",
        },
        "cuda/kernels/hopper/test_linear_bias.py::test_slopes_far_from_the_diagonal": {
            "HAS_LINEAR_BIAS and not masks": "HAS_LINEAR_BIAS",
        },
        "cuda/kernels/shared/test_segments.py::test_nan_stays_in_its_segment_simulated": {
            "(IS_PACKED and not is_whole(tile.segment, tile.m0))": "False",
            "first, end = queries_of(tile.segment)": "first, end = tile.segment.first_query, 65",
        },
        "cuda/kernels/hopper/tma_bias.py": {
            (
                "cuda/kernels/scores/test_bias.py::test_biases_that_tma_loads[compiled-sums]",
                "cuda/kernels/scores/test_bias.py::test_biases_in_stages_that_are_filled_again",
            ): {
                "stage.index * CONSUMERS + consumer": "stage.index * CONSUMERS",
            },
        },
        "cuda/kernels/shared/warps.py": {
            "init_pipelines(*PIPELINES)": "init_pipelines(*PIPELINES[1:])",
            "sync_threads()                                          # all": "pass  # all",
        },
        "cuda/kernels/hopper/forward_tiles.py": {
            "cuda/test_registers.py::test_nothing_is_spilled[hopper_forward sm_90 bfloat16 256 256 lo+hi+queries+keys "
            "alibi keys=100 seqlen_k=100]": {
                "row._replace(q_stages=row.consumers)": "row",
            },
            "cuda/plan/test_planner.py": {
                "(GAIN if x is row else 1)": "1",
                "if is_uneven(work):": "if False:",
                "return may_be and (": "return (",
                "all_at_once * row.tile_m)": "all_at_once)",
                "-(-seqlen_q // row.tile_m)": "(seqlen_q // row.tile_m)",
            },
        },
        "cuda/kernels/hopper/walk.py": {
            (
                "cuda/kernels/scores/test_bias.py::test_biases_that_tma_loads[compiled-sums]",
                "cuda/kernels/scores/test_bias.py::test_biases_in_stages_that_are_filled_again",
            ): {
                "        loaded = look_up(scores, place, tile.batch, tile.head, 0, 0)\n        sync_warpgroup()":
                    "        loaded = look_up(scores, place, tile.batch, tile.head, 0, 0)\n        pass",
            },
        },
        "cuda/kernels/hopper/forward_steps.py": {
            "            sync_warpgroup()                                    # no warp": "            # no warp",
            "            release(K)\n            release(V)\n": "            release(K)\n",
            "            clear_beyond(V, tile, mask, n_block)\n": "",
            "clear(stage.tile, length)": "clear(stage.tile, length + 1)",
            "            fence_async_proxy()\n": "",
            "            sync_warpgroups(consumers)\n": "",
            "return where(seen_in_band(band, m0, n0), S, NO_SCORE)": "return where(seen_in_band(band, m0, n0), S, 0)",
            "return where(looked_up(mask, band, batch, head, m0, n0), S, NO_SCORE)": "return S",
            "length < rows:": "length < rows - 64:",
            "                wait(stages[NUMBER])\n": "",
            "cuda/kernels/hopper/test_backward.py": {
                "            sync_warpgroups(consumers)\n": "",
                "NUMBER % consumers": "NUMBER",
            },
        },
    },
}
