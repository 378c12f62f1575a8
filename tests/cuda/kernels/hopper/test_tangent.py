"""What the kernel does not share, see test_forward_skeleton, simulated; and plans, compiled."""

import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from numbattn.cuda.kernels.hopper.forward_tiles import Warpgroups
from numbattn.cuda.kernels.hopper.tangent import hopper_tangent
from numbattn.cuda.kernels.hopper.tangent_tiles import takes
from tests.accuracy import assert_accurate, plain_forward_tangents, plain_tangents, random
from tests.cuda.works import work
from tests.tools.device import AMPERE, HOPPER, on
from tests.tools.launch import compiled_only, launch, poisoned, simulated_only, tensor_map

from ..calls import call

TILES = Warpgroups(64, 2, stages=2, q_stages=3)


def tangents_of(rng, arrays, given="qkv"):
    """NaN where rows of the arrays are."""
    found = [random(rng, x.shape, x.dtype) if name in given else None for name, x in zip("qkv", arrays)]
    for tangent, x in zip(found, arrays):
        if tangent is not None:
            tangent[np.isnan(x)] = np.nan
    return found


def check(rng, at_once=1, heads_per_tile=1, ascending=0, blocks=1, tiles=TILES, sizes=(64, 64), given="qkv", **problem):
    case = call(rng, np.float16, **{"d": 24, "e": 40} | problem)
    dropout, arrays, (head_dim, head_dim_v) = case.kept_scale != 1, (case.q, case.k, case.v), sizes
    tangents = tangents_of(rng, arrays, given)
    source = hopper_tangent(
        dtype="float16", head_dim=head_dim, head_dim_v=head_dim_v, tiles=tiles, tangents=tuple(given), mask=case.kinds,
        score=(), tscore=(), dropout=dropout,
    )  # fmt: skip
    o, to, lse, tlse = (poisoned(x.shape, x.dtype) for x in (case.do, case.do, case.lse, case.lse))
    moved, boxes = [*arrays, *[x for x in tangents if x is not None], o, to], iter(source.tensor_maps)
    q, k, v, *along, o_map, to_map = [tensor_map(x, next(boxes).box) for x in moved]
    along, counters = iter(along), np.zeros(2, np.uint32)
    launch(
        source.function, (blocks, 1, 1), source.threads, source.shared, q, k, v,
        *[() if x is None else (next(along),) for x in tangents], o_map, to_map, (), (), lse, tlse,
        case.mask_of("q", tiles.tile_m, tiles.tile_n), (), (), case.drops, counters, case.group_size,
        case.scale_log2, case.kept_scale, *map(np.int32, (at_once, heads_per_tile, ascending)),
        cc=(9, 0, "a"),
    )  # fmt: skip
    assert not counters.any()
    for name, got in (("o", o), ("lse", lse)):
        assert_accurate(name, got, case.wanted[name], case.plain[name], got.dtype)
    options = {name: problem[name] for name in ("causal", "mask", "dropout") if name in problem}
    formulas = reference.attention_jvp, plain_forward_tangents
    assert_accurate_tangents((to, tlse), *[formula(*arrays, *tangents, **options) for formula in formulas])


def assert_accurate_tangents(found, wanted, others):
    for name, got, want, other in zip(("to", "tlse"), found, wanted, others):
        assert_accurate(name, got, want, other, got.dtype)


@pytest.mark.parametrize("given", ["q", "k", "qk", "qv", "kv"])
@simulated_only
def test_tangents_that_are_not_given_are_zero(rng, given):
    check(rng, m=20, n=140, given=given)


@simulated_only
def test_uneven_head_dims(rng):
    """Both tiles are staged in the buffers of Q and tQ, whichever are wider."""
    check(rng, m=70, n=140, e=110, sizes=(64, 128))
    check(rng, m=70, n=140, d=150, sizes=(192, 64), tiles=Warpgroups(48, 2, 2, 2))


@pytest.mark.parametrize(("taken", "about"), [
    (True, {"dtype": "bfloat16", "d": 128, "e": 128, "along": "kv"}), (True, {"d": 192, "e": 128, "along": "q"}),
    (False, {"along": "v"}), (False, {"dtype": "float32", "along": "qkv"}), (False, {"d": 256, "along": "qkv"}),
    (False, {"e": 192, "along": "qkv"}), (False, {"device": AMPERE, "along": "qkv"}),
])  # fmt: skip
def test_what_it_takes(taken, about):
    """The kernel for any GPU takes the rest."""
    assert takes(work(**about)) == taken


PACKED = na.Segments([0, 40, 100], [0, 90, 150]) & na.Causal()
CALLS = {
    "float16": ("float16", 64, 64, {"dropout": na.Dropout(0.3, seed=5)}),
    "bfloat16": ("bfloat16", 128, 100, {"causal": True}),
    "packed": ("float16", 64, 64, {"mask": PACKED}),
    "scores": ("float16", 64, 64, {"score": "softcap, bias, sink", "causal": True}),
}


@pytest.mark.parametrize("case", [
    "scores", *(pytest.param(name, marks=pytest.mark.slow) for name in ("packed", "float16", "bfloat16")),
])  # fmt: skip
@compiled_only
def test_calls(rng, case):
    (dtype, d, e, options), tscore = CALLS[case], []
    arrays = [random(rng, shape, np.dtype(dtype)) for shape in ((2, 100, d), (1, 150, d), (1, 150, e))]
    tangents = tangents_of(rng, arrays)
    if "score" in options:
        bias, sink, *tscore = (random(rng, shape, np.float32) for shape in ((2, 100, 150), (2,)) * 2)
        options = options | {"score": [na.Softcap(3.0), na.Bias(bias), na.Sink(sink)]}
    with on(HOPPER._replace(multiprocessors=1)) as gpu:
        o, to, _, tsaved = na.attention_forward_jvp(*arrays, *tangents, tscore=tscore, **options)
        launched = [step.key.name for program in gpu.programs.values() for step in program.plan.steps]
    assert "hopper_tangent" in launched
    np.testing.assert_allclose(o.astype(np.float64), reference.attention_forward(*arrays, **options)[0], atol=0.02)
    wanted = reference.attention_jvp(*arrays, *tangents, tscore=tscore, **options)
    others = plain_tangents(np.zeros_like(o), *arrays, *tangents, tscore=tscore, **options)
    assert_accurate_tangents((to, tsaved.tlse), wanted, others)


FAULTS = {
    ("cuda/kernels/hopper/test_tangent.py", "cuda/kernels/hopper/test_forward_skeleton.py"): {
        "            wait(K)\n            S": "            S",
        "            if masks:\n                S = masked(": "            if False:\n                S = masked(",
        "rescaled(O, alpha), rescaled(tO, alpha)": "rescaled(O, alpha), tO",
        "            wait(V)\n            v": "            v",
        "                clear_beyond(V, tile, args.mask, here)\n": "                pass\n",
        "tS = wgmma_wait(tS, 2) if": "tS = wgmma_wait(tS, 3) if",
        "else wgmma_wait(tS, 1)\n": "else wgmma_wait(tS, 2)\n",
        "                release(K)\n            if masks:": "                pass\n            if masks:",
        "where(P != ZERO, tS, ZERO)": "tS",
        "tS = tS * (args.scale_log2 * LN2)\n": "pass\n",
        "tl * alpha)                   # (5)": "tl)                   # (5)",
        "operand(kept * tS, ONLY_V)": "operand(P * tS, ONLY_V)",
        "            O, tO = wgmma_wait(O, 0), wgmma_wait(tO, 0)\n            release(V)\n":
            "            release(V)\n            O, tO = wgmma_wait(O, 0), wgmma_wait(tO, 0)\n",
        "row_sum(tl) * over_l": "row_sum(tl)",
        "tO * (over_l * args.kept_scale) - O * tlse": "tO * over_l - O * tlse",
        "        fence_async_proxy()\n": "",
        "        release(Q)                                              #": "        pass  #",
        "        release(W)\n": "",
        "        acquire(Q)  ": "            pass  ",
        "        wait(Q)\n": "",
        "K, V, _, _ = skip(K, V, tile, args.mask, here, known_of(tile, args.mask, here), tile.n_blocks)": "pass",
        "LEFT_OF_TS = SHARED_Q if HAS_TK else ONLY_TQ[0]": "LEFT_OF_TS = SHARED_Q",
        "test_calls": {
            "with_tsink(tlse, m, total, args.scores, args.tscores, tile.batch, tile.head)": "tlse",
            "save(args.by_rows[1][tile.batch, tile.head][first:end], tO, tile.m0)": "pass",
        },
        "cuda/kernels/hopper/tangent_steps.py": {
            "abs(P), maximum(P, 0)": "maximum(P, 0), maximum(P, 0)",
            "return positive_operand(P, SHARED_V)": "return operand(P, SHARED_V)",
            "test_calls": {
                "mask_of(args.mask, at), scores_of": "args.mask, scores_of",
                "n_block * TILE_N": "n_block",
            },
        },
        "cuda/kernels/hopper/tangent_tiles.py": {
            "head_dim_v <= LARGEST_V": "True",
            "(\"tq\" in dtypes or \"tk\" in dtypes)": "True",
        },
        "cuda/tile/boxes.py": {
            "first // self.width * self.box_bytes": "first * self.box_bytes",
        },
    },
}
