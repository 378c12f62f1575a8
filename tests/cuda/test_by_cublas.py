"""Attention by matrix products of an emulated cuBLAS, kernels simulated or interpreted; and of cuBLAS, on a GPU."""

import numpy as np
import pytest

import numbattn as na
from numbattn.base.checks import DTYPES
from numbattn.call.problem import describe
from numbattn.cuda import by_cublas as module
from tests.tools.cublas import emulated
from tests.tools.device import HOPPER, on
from tests.tools.launch import launch, mostly_simulated

from ..accuracy import check, random

BFLOAT16 = DTYPES[1]


@pytest.fixture
def small(monkeypatch):
    """All head_dims are computed here, in small blocks, with and without a GPU. Returns the names of the passes."""
    passes = []

    def noted(pass_):
        def run(*args):
            passes.append(pass_.__name__)
            return pass_(*args)

        return run

    widest = dict.fromkeys((2, 4, 8), 8)
    sizes = {"LONG": 1, "LONG_BAND": 1, "BYTES": 1 << 13, "LEAST": 16}
    for name, value in {"WIDEST": {4: 8, 8: 8}, "WIDEST_OF_LONG": widest, "WIDEST_OF_BAND": widest, **sizes}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "has_cublas", lambda: True)
    for pass_ in (module.forward, module.backward):
        monkeypatch.setattr(module, pass_.__name__, noted(pass_))
    module.fits.cache_clear()
    yield passes
    module.fits.cache_clear()


@pytest.fixture
def in_world(world, monkeypatch):
    emulated(monkeypatch)
    monkeypatch.setattr(module, "launch", launch)
    with on(HOPPER, small=True):
        yield


def qkv(rng, dtype, heads, heads_k, m, n, d=24, e=40):
    sizes = (heads, m, d), (heads_k, n, d), (heads_k, n, e)
    return [random(rng, (2, *shape), dtype) for shape in sizes]


BANDS = {
    "none": {}, "causal": {"causal": True}, "window": {"mask": na.Window(5, 2)},
    "far": {"mask": na.Window(3, 0, offset=-20) & na.Causal()}, "scale": {"mask": na.Causal(50), "scale": 2.0},
}  # fmt: skip


@pytest.mark.parametrize(("sizes", "band", "dtype"), [
    ((2, 1, 40, 70), "causal", np.float32),
    pytest.param((2, 1, 40, 70), "none", np.float64, marks=mostly_simulated),
    pytest.param((2, 1, 40, 70), "window", np.float32, marks=mostly_simulated),
    pytest.param((2, 1, 40, 70), "far", np.float32, marks=mostly_simulated),
    pytest.param((4, 4, 37, 5), "causal", np.float64, marks=mostly_simulated),
    pytest.param((3, 1, 1, 300, 200), "scale", np.float32, marks=mostly_simulated),
])  # fmt: skip
def test_passes(rng, small, in_world, dtype, sizes, band):
    """In blocks; queries that see nothing; groups of heads."""
    check(*qkv(rng, dtype, *sizes), rng, **BANDS[band])
    assert small == ["forward", "backward"]


@mostly_simulated
@pytest.mark.parametrize("dtype", [BFLOAT16, np.float16], ids=["bfloat16", "float16"])
def test_gradients_in_half_precision(rng, small, in_world, dtype):
    check(*qkv(rng, dtype, 2, 1, 40, 70), rng, causal=True)
    assert small == ["backward"]


@mostly_simulated
def test_arrays_of_any_strides(rng, small, in_world):
    q, k, v = (x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in qkv(rng, np.float32, 2, 2, 20, 30))
    out = np.empty((2, 20, 2, 80), np.float32).swapaxes(1, 2)[..., ::2]
    assert na.attention(q, k[..., ::-1], v, out=out) is out
    np.testing.assert_array_equal(out, na.attention(q, k[..., ::-1].copy(), v))
    check(q[0, 0], k[0, 0], v[0, 0], rng)
    assert set(small) == {"forward", "backward"}


@mostly_simulated
def test_kernels_compute_what_is_to_be_deterministic(rng, small, in_world):
    """The bits of cuBLAS may change where several streams use it."""
    check(*qkv(rng, np.float32, 2, 1, 20, 30), rng, deterministic=True)
    assert small == ["forward"]


@mostly_simulated
def test_what_is_left_to_kernels(rng, small, in_world):
    q, k, v = qkv(rng, np.float32, 2, 2, 12, 12)
    spare = {"score": na.Softcap(3.0)}, {"dropout": na.Dropout(0.1, seed=1)}, {"mask": na.Lengths(np.int32([[5], [7]]))}
    for options in (*spare, {"mask": na.Causal(np.int32([[3], [4]]))}):
        assert not module.takes(*describe(q, k, v, **options))
    halves = [x.astype(np.float16) for x in (q, k, v)]
    for arrays in ((q, k[:1], v), halves, (q[..., :8], k[..., :8], v[..., :8])):
        assert not module.takes(*describe(*arrays))
    assert module.takes(*describe(q, k, v, causal=True))


@mostly_simulated
def test_long_sequences(rng, small, in_world, monkeypatch):
    """Their backward pass is computed here from smaller head_dims on, with a mask that of longer ones."""
    of_long = {"WIDEST_OF_LONG": {4: 8}, "WIDEST_OF_BAND": {4: 8}}
    for name, value in {"WIDEST": {4: 256}, **of_long, "LONG": 12, "LONG_BAND": 13}.items():
        monkeypatch.setattr(module, name, value)
    q, k, v = qkv(rng, np.float32, 2, 2, 13, 13)
    calls = [(*(x[..., :n, :] for x in (q, k, v)), causal) for n in (11, 12, 13) for causal in (False, True)]
    assert [module.takes(*describe(*call), True) for call in calls] == [False, False, True, False, True, True]
    assert not any(module.takes(*describe(*call)) for call in calls)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("band", BANDS)
def test_passes_on_a_gpu(rng, small, dtype, band):
    import cupy

    for sizes in ((2, 1, 40, 70), (3, 3, 37, 5), (3, 1, 1, 300, 300)):
        check(*qkv(rng, dtype, *sizes), rng, cupy, bits=16, **BANDS[band])  # NumPy sums up a single row in parts
    assert small == 3 * (["backward"] if np.dtype(dtype).itemsize == 2 else ["forward", "backward"])


@pytest.mark.gpu
def test_kernels_compute_captured_calls(rng, small):
    """CuPy refuses cuBLAS in a capture."""
    import cupy

    q, k, v = map(cupy.asarray, qkv(rng, np.float32, 2, 2, 20, 30))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        want = na.attention(q, k, v)
        stream.begin_capture()
        o, saved = na.attention_forward(q, k, v)
        dq, dk, dv = na.attention_backward(o, saved)
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
    assert small == ["forward"]
    cupy.testing.assert_allclose(o, want, rtol=1e-5, atol=1e-6)
    cupy.testing.assert_allclose(dv, na.attention_backward(o, saved).dv, rtol=1e-4, atol=1e-5)


FAULTS = {
    "test_passes[simulated-sizes0-causal-float32]": {
        "row + hi - col": "row + hi + 1 - col",
        "range(problem.group_size)": "range(1)",
        "dS.swapaxes(1, 2), Q[at], add=True": "dS.swapaxes(1, 2), Q[at]",
        "product(dQ[at], dS, K[keys], factor=scale)": "product(dQ[at], dS, K[keys])",
        'D -= given["dlse"]': "pass",
    },
    "test_passes[simulated-sizes2-window-float32]": {"row + lo - col": "row + lo"},
    "test_what_is_left_to_kernels[simulated]": {
        "or problem.dropout or": "or",
        "and not inputs.mask._holds_arrays": "",
    },
}
