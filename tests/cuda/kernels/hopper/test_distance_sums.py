"""Gradients of arrays that parts of the score read by distance, or by offset on a grid, by warps beside the producer's.
"""

import cupy
import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from numbattn.cuda.build import assemble, compile_ptx
from numbattn.cuda.passes import BACKWARD, plans
from numbattn.cuda.tile import bfloat16
from numbattn.cuda.views import without_memory
from tests.accuracy import random, to_numpy
from tests.cuda.works import HOPPER
from tests.tools.device import on
from tests.tools.launch import mostly_simulated, simulated_only


def of_distances(s, batch, head, i, j, table):
    return s + 2 * table[head, min(abs(i - j), 40)]


def of_slopes(s, batch, head, i, j, slopes):
    return s - slopes[head] * abs(i - j)


def of_past(s, batch, head, i, j, table, factors):
    """What it reads of later keys, which are masked, has an infinite factor in float32."""
    return s + table[head, min(abs(i - j), 40)] * factors[min(max(j - i, 0), 1)]


def function(of, *shape, factors=()):
    """A Score, beside another part that is linear."""

    def score_of(rng):
        arrays = [some(rng, *shape), *factors]
        wanted = [True, False][: len(arrays)]
        return [na.Score(of, arrays=arrays, gradient=wanted), na.Alibi(np.ones(2, np.float32) / 9, gradient=False)]

    return score_of


def part(of, *shape, dtype=np.float32, **options):
    return lambda rng: [of(some(rng, *shape).astype(dtype), **options)]


def some(rng, *shape):
    """Positive: else far keys weigh most."""
    return abs(random(rng, shape, np.float32))


SCORES = {  # of two heads
    "distances": function(of_distances, 2, 41), "slopes": function(of_slopes, 2),
    "alibi": part(na.Alibi, 2), "alibi of all": part(na.Alibi, dtype=np.float16),
    "alibi with an offset": part(na.Alibi, 3, 1, offset=np.array([[5, -7], [0, 3], [2, 2]])),
    "relative": part(na.RelativeBias, 2, 41), "relative of all": part(na.RelativeBias, 41, dtype=np.float16),
    "relative by batch": part(na.RelativeBias, 3, 2, 3, offset=np.array([[3], [0], [-9]])),
    "relative far": part(na.RelativeBias, 2, 999, offset=2),
}


TOLERANCES = {np.float16: 0.01, bfloat16: 0.04}  # of the largest element


def lengths(n):
    return na.Causal() & na.Lengths(np.array([[n - 9]]))


MASKS = {
    "none": lambda n: None,
    "lengths": lengths,
    "segments": lambda n: na.Segments([0, n // 3, n - 20]),
}


def check(rng, score, n, d, mask, xp=np, dtype=np.float16, batch=1):
    """Two heads a key head. What is summed is dS rounded, as for dQ and dK."""
    q, do = (xp.asarray(random(rng, (batch, 2, n, d), dtype)) for _ in range(2))
    k, v = (xp.asarray(random(rng, (batch, 1, n, d), dtype)) for _ in range(2))
    _, saved = na.attention_forward(q, k, v, mask=mask, score=score)
    found = na.attention_backward(do, saved)
    want = reference.attention_backward(*map(to_numpy, (do, q, k, v)), mask=mask, score=score)
    for got, right in zip((*found[:3], found.score[0]), (*want[:3], want.score[0]), strict=True):
        np.testing.assert_allclose(to_numpy(got), right, rtol=0, atol=TOLERANCES[dtype] * abs(right).max())


@pytest.mark.parametrize("score_of", [
    pytest.param(function(of_past, 2, 41, factors=[np.array([2, 1e300])]), marks=mostly_simulated),
    pytest.param(part(na.RelativeBias, 2, 41, offset=-1), marks=mostly_simulated),
    pytest.param(part(na.Alibi, 2, offset=np.array([[5, -7]])), marks=simulated_only),
], ids=["function", "relative", "alibi"])  # fmt: skip
def test_gradients(rng, score_of):
    with on(HOPPER):
        check(rng, score_of(rng), 100, 64, lengths(100))


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "dtype"), [(64, bfloat16), (128, np.float16)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_gradients_on_a_gpu(rng, score, d, dtype, mask):
    check(rng, SCORES[score](rng), 300, d, MASKS[mask](300), cupy, dtype, batch=3)


GRIDS = {  # shape, extra, windows
    "image": ((9, 15), 0, {"window": (2, 4)}),
    "extra": ((6, 15), 5, {"window": (2, 4)}),
    "volume": ((3, 4, 12), 1, {"window": (2, 3, 3), "causal": (True, False, False)}),
    "packed": ([(9, 15), (18, 14)], 2, {"window": (2, 4), "edges": "cut"}),
    "of other sizes": ([(9, 15), (4, 60)], 0, {"window": (2, 4)}),
    "periodic": ((10, 14), 0, {"window": (2, 9), "edges": ("cut", "periodic")}),
    "dilated": ((30, 21), 0, {"window": (2, 3), "dilation": (3, 2)}),
}


def check_on_a_grid(rng, name, d, *about, heads=2, **options):
    shape, extra, windows = GRIDS[name]
    grid, others = na.Grid(shape, extra), {key: x for key, x in windows.items() if key != "window"}
    table = some(rng, heads, *(2 * n - 1 for n in windows["window"]))
    mask, score = grid.window(**windows), grid.relative_bias(table, **others)
    check(rng, [score], mask._windows.tokens, d, mask, *about, **options)


@pytest.mark.parametrize(("name", "heads"), [
    pytest.param("extra", 1, marks=mostly_simulated), pytest.param("volume", 1, marks=simulated_only),
    pytest.param("packed", 2, marks=simulated_only), pytest.param("of other sizes", 1, marks=simulated_only),
])  # fmt: skip
def test_gradients_on_grids(rng, name, heads):
    with on(HOPPER):
        check_on_a_grid(rng, name, 64, heads=heads)


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "dtype"), [(64, bfloat16), (128, np.float16), (192, np.float16)])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", GRIDS)
def test_gradients_on_grids_on_a_gpu(rng, name, heads, d, dtype):
    check_on_a_grid(rng, name, d, cupy, dtype, heads=heads, batch=3)


def planned(d, *score):
    q = without_memory((2, 2, 300, d), np.dtype(np.float16))
    (found,) = plans(HOPPER, q, q, q, passes=(BACKWARD,), mask=na.Causal(), score=score)
    return [step.key for step in found.steps]


OF_FUNCTION = na.Score(of_slopes, arrays=[np.ones(2, np.float32)], gradient=True)
OF_SLOPES, OF_TABLE = na.Alibi(np.ones(2, np.float32)), na.RelativeBias(np.ones((2, 9), np.float32))


@simulated_only
@pytest.mark.parametrize("part", [OF_FUNCTION, OF_SLOPES, OF_TABLE], ids=["function", "slopes", "table"])
@pytest.mark.parametrize(("before", "expected"), [((), True), ((na.Softcap(5.0),), False)])
def test_whether_one_kernel_suffices(part, before, expected):
    """dS in shared memory is that of S before all parts."""
    names = [key.name for key in planned(64, *before, part)]
    assert (names[1:] == ["hopper_backward_kv", "round_dq", "sum_parts"]) == expected


@simulated_only
@pytest.mark.slow
@pytest.mark.parametrize(("part", "d", "spills"), [
    (OF_FUNCTION, 64, 832), (OF_FUNCTION, 128, 376), (OF_SLOPES, 64, 808), (OF_SLOPES, 128, 284), (OF_TABLE, 64, 592),
    (OF_TABLE, 128, 240),
])  # fmt: skip
def test_registers(part, d, spills):
    """A little is spilled by warps that help; ptxas serialises no products, and deals registers out anew."""
    key = next(key for key in planned(d, part) if key.name == "hopper_backward_kv")
    _, report = assemble(compile_ptx(key.source(), key.cc), key.cc)
    assert report.spills <= spills
    assert not report.losses


FAULTS = {
    "consumer * ROWS": "0",
    "part * PART": "0",
    "is_nonlinear(work.score)": "False",
    "add_atomically(pending, sums)                   # a matrix has sums of its own": "pass",
    "after.head != at.head or": "",
    "cuda/kernels/scores/function.py": {
        "max(distance + apart, least), most)": "max(distance + apart, least), 0)",
    },
    "cuda/kernels/scores/by_distance.py": {
        "SUM(slope * total) if total != 0 else ZERO": "SUM(slope * total)",
        "m0 - n0 - KEYS": "m0 - n0",
        "query[i] != EXTRA and key[j] != EXTRA": "True",
        "minimum(place.head + head, heads - 1)": "(place.head + head)",
        "(found[NUMBER],), NUMBER": "(found[NUMBER],), 0",
    },
    "grids/windows.py": {"own == others and all(x == first for x in rest)": "True"},
    "cuda/kernels/scores/distance.py": {"read(-distance - key, reach)": "read(-distance, reach)"},
    "cuda/kernels/hopper/backward_kv.py": {
        "CONSUMERS * (1 + bool(reads))": "CONSUMERS",
    },
}
