"""The forward pass of wide heads by clusters, by calls on a device that is not there."""

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.hopper.forward_wide import AHEAD, WIDTH
from tests.accuracy import assert_accurate, exact, plain, random, to_numpy
from tests.tools.device import HOPPER, on, planned
from tests.tools.launch import compiled_only, mostly_simulated, simulated_only

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NARROWEST = AHEAD * WIDTH  # as many chunks of K as there are products of S ahead
CALLS = {  # dtype, lengths, head_dims, heads of q and of k, options
    "a chunk": ("float16", 130, 40, 260, 257, 2, 1, {}),
    "several tiles": ("bfloat16", 70, 450, NARROWEST, NARROWEST, 1, 1, {}),
    "causal": ("float16", 200, 300, 257, 384, 2, 1, {"causal": True}),
    "causal, more queries": ("float16", 270, 150, 320, 260, 1, 1, {"causal": True}),
    "window": ("bfloat16", 300, 300, 300, 300, 2, 2, {"mask": na.Window(70, 10)}),
    "few columns": ("float16", 65, 129, 384, 40, 1, 1, {}),
    "largest": ("float16", 130, 260, 576, 512, 1, 1, {"causal": True, "scale": 0.3}),
}


def check(rng, dtype, m, n, d, e, heads, heads_k, options, attend):
    """attend: computes o and what is saved."""
    dtype = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    shapes = (2, heads, m, d), (2, heads_k, n, d), (2, heads_k, n, e)
    q, k, v = (random(rng, shape, dtype) for shape in shapes)
    o, saved = attend(q, k, v, **options)
    do = np.zeros(o.shape, dtype)
    for name, got, *others in zip(("o", "lse"), map(to_numpy, (o, saved.lse)), exact(do, q, k, v, **options),
                                  plain(do, q, k, v, **options)):  # fmt: skip
        assert_accurate(name, got, *others, dtype)


def attend_without_a_gpu(q, k, v, **options):
    with on(HOPPER) as gpu:
        found = na.attention_forward(q, k, v, **options)
        (program,) = gpu.programs.values()
    assert [step.key.name for step in program.plan.steps] == ["hopper_forward_wide"]
    return found


@simulated_only
@pytest.mark.parametrize("name", CALLS)
def test_calls(rng, name):
    check(rng, *CALLS[name], attend_without_a_gpu)


@compiled_only
@pytest.mark.parametrize("name", ["a chunk", "causal", pytest.param("largest", marks=pytest.mark.slow)])
def test_compiled_calls(rng, name):
    check(rng, *CALLS[name], attend_without_a_gpu)


@mostly_simulated
def test_rows_that_see_nothing(rng):
    """Some of a work tile, or all."""
    q, k, v = (random(rng, (1, 1, n, 260), np.float16) for n in (300, 70, 70))
    options = {"mask": na.Window(None, -150)}
    with on(HOPPER):
        o, saved = na.attention_forward(q, k, v, **options)
    wanted, lse = na.reference.attention_forward(q, k, v, **options)[:2]
    np.testing.assert_allclose(o.astype(np.float64), wanted, atol=2e-3)
    np.testing.assert_allclose(saved.lse, lse, atol=1e-4)
    assert (saved.lse == -np.inf).any()
    assert not o[saved.lse == -np.inf].any()


@simulated_only
def test_the_same_bits_whatever_lies_around(rng):
    """Of a batch and of one element, of arrays with other strides, of a matrix in memory of NaN."""
    around = np.full((3, 2, 150, 704), np.nan, np.float16)
    q, k, v = around[..., 64:384], around[..., 384:704].copy(), around[:, ::-1, :, 384:704]
    for x in (q, k, v):
        x[...] = random(rng, x.shape, np.float16)
    with on(HOPPER):
        o = na.attention(q[:, :, :140], k, v)
        one = na.attention(*(np.ascontiguousarray(x[1:2, 1:]) for x in (q[:, :, :140], k, v)))
    np.testing.assert_array_equal(o[1:2, 1:], one)
    assert np.isfinite(o.astype(np.float32)).all()


X = np.zeros((1, 1, 300, 512), np.float16)
OTHERS = {
    "lengths": (X[[0, 0]], X[[0, 0]], {"mask": na.Lengths([[200], [100]])}),
    "score": (X, X, {"score": na.Softcap(30.0)}),
    "dropout": (X, X, {"dropout": na.Dropout(0.1, 1)}),
    "packed": (X[:, 0], X[:, 0], {"mask": na.Segments([0, 100], [0, 100])}),
    "narrow keys": (X[..., :256], X, {}),
    "wide values": (X, np.zeros((1, 1, 300, 513), np.float16), {}),
    "no values": (X, X[..., :0], {}),
}


@simulated_only  # in either world plans are the same
@pytest.mark.parametrize("name", [*OTHERS, "this", "causal", "float32"])
def test_which_calls(name):
    qk, v, options = OTHERS.get(name, (X, X, {"causal": name == "causal"}))
    if name == "float32":
        qk = v = X.astype(np.float32)
    with planned(HOPPER) as keys:
        na.attention_forward(qk, qk, v, **options)
    assert ("hopper_forward_wide" in [key.name for key in keys]) == (name in ("this", "causal"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CALLS, "long"])
def test_on_a_gpu(rng, name):
    cupy = pytest.importorskip("cupy")
    case = CALLS.get(name, ("bfloat16", 1000, 1500, 512, 512, 4, 2, {}))
    check(rng, *case, lambda *arrays, **options: na.attention_forward(*map(cupy.asarray, arrays), **options))


FAULTS = {
    "2 * CONSUMERS)        # the next": "CONSUMERS)        # the next",
    "                release(R)\n                return sums, after": "                return sums, after",
    "                wait(after)\n": "",
    "dot(sums, left_of_chunk(left), chunk.T if transposed else chunk), 1)":
        "dot(sums, left_of_chunk(left), chunk.T if transposed else chunk), 2)",
    "range(PARTS))\n\n": "range(PARTS - 1))\n\n",
    "(tile * RANKS + (cluster_rank() ^ part)) * TILE_N": "(tile * RANKS + part) * TILE_N",
    "(tile * RANKS + cluster_rank()) * TILE_N": "(tile * RANKS + 1 - cluster_rank()) * TILE_N",
    "cluster_rank() * OWN_COLUMNS\n                tma_load": "0\n                tma_load",
    "tile.m0, cluster_rank() * OWN_COLUMNS)": "tile.m0, 0)",
    "number * RANKS + cluster_rank()\n": "number * RANKS\n",
    "maximum(own, get(M.tile.T, VECTOR))": "own",
    "        acquire(X)\n": "",
    "        wait(X)\n        fence": "        fence",
    "        fence_async_proxy()\n\n    @device\n    def prologue": "\n    @device\n    def prologue",
    "        O = rescaled(O, alpha)                                  #": "        #",
    "start_values(rescaled(O, alpha)": "start_values(O",
    "        release_in_peer(X)\n": "",
    "total = own + get(M.tile.T, VECTOR)": "total = own + own",
    "        sync_cluster()                                          # the peer's": "        #",
    "work.head // group_size": "work.head",
    "set(work.mask) <= set(SIDES)": "True",
    " and not has_key_lengths(work.mask)": "",
    " and not (work.score or work.problem.dropout or work.resumes)": "",
    "head_dim > MOST and ": "",
    "and work.problem.head_dim_v > 0": "",
}
