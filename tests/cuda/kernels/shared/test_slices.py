"""Head_dims larger than those that kernels are compiled for: both passes, in any dtype, on any GPU."""

from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.hopper.forward_tiles import WIDE
from tests.accuracy import assert_accurate, exact, plain, random, to_numpy
from tests.cuda.test_origin import check_goes_on
from tests.tools.device import AMPERE, HOPPER, TURING, on, planned
from tests.tools.launch import compiled_only, mostly_simulated, simulated_only

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
GENERAL = ["forward", "delta", "backward_kv", "backward_q"]
ON_HOPPER = ["hopper_forward_wide", "delta", *["hopper_backward_wide"] * 2, *["hopper_backward_q"] * 2]


def check(rng, device, dtype, m, n, d, e, heads=2, **options):
    """o, lse and all gradients; on the GPU if there is no device."""
    shapes = (1, heads, m, d), (1, 1, n, d), (1, 1, n, e), (1, heads, m, e)
    q, k, v, do = (random(rng, shape, dtype) for shape in shapes)
    there = np if device else pytest.importorskip("cupy")
    with on(device) if device else nullcontext():
        o, saved = na.attention_forward(*map(there.asarray, (q, k, v)), **options)
        found = o, saved.lse, *na.attention_backward(there.asarray(do), saved)
    wanted, others = (formula(do, q, k, v, **options) for formula in (exact, plain))
    for name, *results in zip(("o", "lse", "dq", "dk", "dv"), map(to_numpy, found), wanted, others):
        assert_accurate(name, *results, dtype)


@pytest.mark.parametrize(("device", "dtype", "d", "e"), [
    pytest.param(AMPERE, "float32", 300, 270, marks=mostly_simulated),
    pytest.param(HOPPER, "bfloat16", 64, 260, marks=simulated_only),  # more slices of V than of K
    pytest.param(HOPPER, "float16", 500, 300, marks=simulated_only),
    pytest.param(HOPPER, "bfloat16", 576, 512, marks=[simulated_only, pytest.mark.slow]),
    pytest.param(TURING, "float16", 257, 40, marks=[simulated_only, pytest.mark.slow]),
    pytest.param(AMPERE, "float64", 385, 385, marks=[simulated_only, pytest.mark.slow]),
    pytest.param(HOPPER, "float16", 576, 512, marks=[compiled_only, pytest.mark.slow]),
])  # fmt: skip
def test_both_passes(rng, device, dtype, d, e):
    """Matrices of one slice, of a whole number of slices, and of a bit more."""
    dtype = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    check(rng, device, dtype, 17, 40, d, e, causal=True, score=na.Softcap(4.0))


OPTIONS = {
    "packed": {"mask": na.Segments([0, 7, 20], [0, 15, 40]), "causal": True, "heads": 1},
    "dropout and lengths": {"mask": na.Lengths([[31, 7]]), "dropout": na.Dropout(0.3, 5)},
    "blocks": {"mask": na.BlockSparse(np.tri(2, 3, 1, bool)[None, None], (16, 16)), "score": na.Sink(np.ones(2))},
    "slopes": {"score": na.Alibi([0.1, 0.2])},
}


@simulated_only
@pytest.mark.parametrize(("device", "dtype", "name"), [
    (AMPERE, np.float32, "packed"), (AMPERE, np.float32, "dropout and lengths"), (HOPPER, np.float16, "packed"),
    *(pytest.param(HOPPER, np.float16, name, marks=pytest.mark.slow) for name in OPTIONS if name != "packed"),
])  # fmt: skip
def test_options(rng, world, device, dtype, name):
    check(rng, device, np.dtype(dtype), 20, 40, 260, 260, **OPTIONS[name])


@simulated_only
def test_few_queries_and_a_cache(rng, world):
    """Keys in pages are copied, and nothing is split."""
    q, (k, v) = random(rng, (2, 2, 1, 260), np.float16), random(rng, (2, 2, 1, 30, 260), np.float16)
    cache = na.KVCache.zeros(2, 1, 40, 260, like=q, page_size=8)
    cache.append(k, v)
    with on(AMPERE):
        o = na.attention(q, cache)
    np.testing.assert_allclose(o, na.reference.attention_forward(q, k, v)[0], atol=2e-3)


@simulated_only
def test_goes_on_from_other_keys(rng):
    check_goes_on(rng, AMPERE, np.dtype(np.float16), 20, 64, 16, 260, causal=False, mask=None)


@simulated_only
def test_lse_alone(rng):
    q, k = random(rng, (1, 2, 20, 300), np.float32), random(rng, (1, 2, 30, 300), np.float32)
    with on(AMPERE):
        _, saved = na.attention_forward(q, k, k[..., :0])
    np.testing.assert_allclose(saved.lse, na.reference.attention_forward(q, k, k)[1], rtol=1e-5)


@simulated_only  # in either world plans are the same
@pytest.mark.parametrize("device", [TURING, AMPERE, HOPPER], ids=["7.5", "8.0", "9.0"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("d", [257, 512, 5000])
def test_no_call_is_refused(device, dtype, d):
    x = np.zeros((1, 1, 300, d), BFLOAT16 if dtype == "bfloat16" else dtype)
    with planned(device) as keys:
        _, backprop = na.attention_vjp(x, x, x, causal=True)
        backprop(x)
    by_wgmma = device == HOPPER and x.dtype.itemsize == 2 and d <= max(WIDE)
    assert [key.name for key in keys] == (ON_HOPPER if by_wgmma else GENERAL)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(("d", "e"), [(300, 300), (576, 512), (64, 1000)])
def test_on_a_gpu(rng, dtype, d, e):
    check(rng, None, BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype), 300, 257, d, e, causal=True)


@simulated_only
@pytest.mark.parametrize(("device", "d", "e", "score"), [
    (AMPERE, 33, 260, na.Alibi(np.array([0.1]))),
    (HOPPER, 300, 64, na.Bias(np.linspace(-1, 1, 20 * 40, dtype=np.float32).reshape(1, 20, 40))),
    pytest.param(AMPERE, 260, 260, na.RelativeBias(np.linspace(-1, 1, 31).reshape(1, 31)), marks=pytest.mark.slow),
    pytest.param(TURING, 260, 40, na.Score(lambda s, batch, head, i, j, w: s + w[i % 7], arrays=[np.linspace(-1, 1, 7)],
                                           gradient=True), marks=pytest.mark.slow),
], ids=["slopes", "bias", "table", "function"])  # fmt: skip
def test_gradients_of_scores(rng, world, device, d, e, score):
    q, k, v, do = (random(rng, (1, 1, rows, size), np.float32) for rows, size in ((20, d), (40, d), (40, e), (20, e)))
    with on(device):
        _, backprop = na.attention_vjp(q, k, v, score=score)
        grads = backprop(do)
    _, backprop = na.attention_vjp(*(x.astype(np.float64) for x in (q, k, v)), score=score)
    wanted = backprop(do.astype(np.float64))
    for got, want in zip((*grads, *grads.score), (*wanted, *wanted.score), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4 * max(1, abs(want).max()))


def test_tangents_are_refused():
    x = np.zeros((1, 1, 40, 257), np.float32)
    with planned(AMPERE), pytest.raises(ValueError, match="head_dim: got 257, at most 256 on a GPU"):
        na.attention_jvp(x, x, x, x, x, x)


FAULTS = {
    "range(own + 1, own + 1 + slices)": "range(own, own + slices)",
    "shape(Y)[3]) + WIDTH - 1) // WIDTH": "shape(Y)[3])) // WIDTH",
    "slices = (maximum(shape(X)[3], shape(Y)[3])": "slices = (maximum(shape(X)[3], shape(X)[3])",
    "            sync_threads()                                      # all have read the last slices\n": "",
    "cuda/kernels/any/delta.py": {
        "range(1, (shape(O)[1] + WIDTH - 1) // WIDTH)": "range(1, shape(O)[1] // WIDTH)",
    },
    "cuda/kernels/any/forward.py": {
        "block_per_query_tile(work, *tiles) * slices_of(work.problem)": "block_per_query_tile(work, *tiles)",
    },
    "cuda/kernels/any/backward.py": {
        "work.problem.heads_k * n_blocks * slices_of(work.problem)": "work.problem.heads_k * n_blocks",
    },
    "test_gradients_of_scores": {
        "cuda/kernels/any/score_gradient.py": {"(0, 0), x, y, m0, n0, 0)": "(0, 0), x, y, m0, m0, 0)"},
    },
    "cuda/plan/planner.py": {
        "        if is_wide(self.problem):\n": "        if False:\n",
        "range(max(counts, default=1))": "range(1)",
    },
    "cuda/views.py": {
        "self.pointer + first * self.strides[-1]": "self.pointer",
        "min(count, columns - first)": "count",
    },
    "cuda/kernels/hopper/backward_wide.py": {
        "SHARED_Q.part(first_k, cols_k)": "SHARED_Q.part(0, cols_k)",
        "SHARED_DO.part(first_v, cols_v)": "SHARED_DO.part(0, cols_v)",
    },
    "cuda/kernels/hopper/backward_q.py": {
        "SHARED_K.part(first_own, cols)": "SHARED_K.part(0, cols)",
    },
    "cuda/kernels/hopper/forward_tiles.py": {
        "return WIDE[size]": "return USUAL[256]",
    },
    "cuda/passes.py": {
        "if onto is not None and is_wide(problem):": "if False:",
        "self.forward(replace(problem, wide=True), inputs)": "self.forward(problem, inputs)",
    },
}
