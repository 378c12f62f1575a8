"""The language as a whole: attention, simulated or interpreted, against float64; and what ptxas makes of it."""

import functools

import numpy as np
import pytest

from numbattn.cuda.tile import SIMULATED, bfloat16, mma, simt
from tests.tools.launch import launch, poisoned

from .kernels import backward_kv, causal, every_key, forward_mma, forward_simt, window

LOG2E = np.log2(np.e)
MASKS = {
    "every_key": (every_key, lambda i, j, shift: np.full(np.broadcast_shapes(i.shape, j.shape), True)),
    "causal": (causal, lambda i, j, shift: j <= i + shift),
    "window": (window(20, 3), lambda i, j, shift: (i + shift - 20 <= j) & (j <= i + shift + 3)),
}


def problem(dtype, B, H, H_k, m, n, d, mask, pitch=0, seed=0):
    """q, k, v, do, laid out as (batch, seqlen, heads, dim), and o, lse, delta, dk, dv in float64."""
    rng = np.random.default_rng(seed)

    def make(heads, seqlen):
        x = rng.standard_normal((B, seqlen, heads, d + pitch)).astype(dtype)
        return x[..., :d].swapaxes(1, 2)

    q, k, v, do = make(H, m), make(H_k, n), make(H_k, n), make(H, m)
    Q, K, V, dO = (x.astype(np.float64) for x in (q, k.repeat(H // H_k, 1), v.repeat(H // H_k, 1), do))
    scale = 1 / np.sqrt(d)
    visible = MASKS[mask][1](np.arange(m)[:, None], np.arange(n)[None, :], n - m)
    S = np.where(visible, Q @ K.swapaxes(-1, -2) * scale, -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.log(np.exp(S).sum(-1))
        P = np.where(visible, np.exp(S - lse[..., None]), 0)
    o = P @ V
    delta = (dO * o).sum(-1)
    dS = P * (dO @ V.swapaxes(-1, -2) - delta[..., None])
    return (q, k, v, do), (o, lse, delta, dS.swapaxes(-1, -2) @ Q * scale, P.swapaxes(-1, -2) @ dO), scale


def as_device(x):
    return x.view(np.uint16) if x.dtype == bfloat16 else x


def check_forward(kernel, dtype, sums, shape, mask, tile_m, tolerance, pitch=0):
    (q, k, v, _), (o, lse, *_), scale = problem(dtype, *shape, mask, pitch)
    forward, threads, nbytes = kernel
    got, got_lse = poisoned(q.shape, dtype), poisoned(q.shape[:3], sums)
    grid = -(-q.shape[2] // tile_m), q.shape[1], q.shape[0]
    arrays = [as_device(x) for x in (q, k, v, got)]
    launch(forward, grid, threads, nbytes, *arrays, got_lse, np.int32(q.shape[1] // k.shape[1]), sums(scale * LOG2E))
    np.testing.assert_allclose(got.astype(np.float64), o, atol=tolerance)
    np.testing.assert_allclose(got_lse / LOG2E, lse, atol=max(tolerance / 10, 1e-13), rtol=1e-5)


# dtype, (batch, heads, heads_k, seqlen_q, seqlen_k, head_dim), mask, tile_m, tile_n, threads, lanes_per_row, pitch
SIMT = {
    "one tile": (np.float32, (1, 1, 1, 32, 32, 64), "every_key", 32, 32, 64, 8, 0),
    "grouped, ragged, strided": (np.float32, (1, 2, 1, 50, 70, 64), "causal", 32, 32, 64, 8, 16),
    "rows that see nothing": (np.float32, (2, 2, 2, 60, 40, 32), "causal", 32, 32, 64, 8, 0),
    "window": (np.float32, (1, 1, 1, 80, 90, 64), "window", 32, 32, 64, 8, 0),
    "head_dim below its tile": (np.float32, (1, 1, 1, 33, 40, 40), "every_key", 32, 32, 64, 8, 0),
    "float64": (np.float64, (1, 1, 1, 40, 50, 64), "causal", 32, 32, 64, 8, 0),
}


@pytest.mark.parametrize("case", SIMT.values(), ids=SIMT)
def test_forward_simt(case):
    dtype, shape, mask, tile_m, tile_n, threads, lanes, pitch = case
    tile_d = -(-shape[-1] // 32) * 32
    kernel = forward_simt(dtype, tile_d, tile_m, tile_n, MASKS[mask][0], threads, lanes)
    check_forward(kernel, dtype, dtype, shape, mask, tile_m, 1e-14 if dtype == np.float64 else 1e-5, pitch)


@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_forward_simt_of_16_bits(dtype):
    kernel = forward_simt(np.float32, 32, 32, 32, causal, 64, 8)
    check_forward(kernel, dtype, np.float32, (1, 2, 1, 40, 50, 32), "causal", 32, 4e-3 if dtype == np.float16 else 3e-2)


MMA = {
    "one tile": ((1, 1, 1, 64, 64, 64), "every_key", 64, 64),
    "grouped, ragged": ((1, 2, 1, 70, 100, 64), "causal", 64, 64),
    "rows that see nothing": ((1, 1, 1, 100, 70, 128), "causal", 64, 32),
    "head_dim 96": ((1, 1, 1, 30, 40, 96), "window", 64, 32),
}


@pytest.mark.parametrize("case", MMA.values(), ids=MMA)
@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_forward_mma(case, dtype):
    shape, mask, tile_m, tile_n = case
    kernel = forward_mma(dtype, shape[-1], tile_m, tile_n, MASKS[mask][0])
    check_forward(kernel, dtype, np.float32, shape, mask, tile_m, 3e-3 if dtype == np.float16 else 3e-2)


def backward_of(unit, dtype, head_dim, tile_m, tile_n, keys_of, threads):
    lanes = {64: 8, 128: 8, 256: 16}[threads]
    tile_of = {
        "fma": lambda rows, cols, vector: simt(rows, cols, threads, lanes, vector),
        "mma": lambda rows, cols, vector: mma(rows, cols, threads),
    }[unit]
    sums = np.float64 if dtype == np.float64 else np.float32
    return backward_kv(dtype, tile_of, head_dim, tile_m, tile_n, keys_of, threads, sums)


@pytest.mark.parametrize(("unit", "dtype", "tolerance"), [
    ("fma", np.float32, 1e-5), ("fma", np.float64, 1e-13), ("mma", np.float16, 1e-2), ("mma", bfloat16, 8e-2),
])  # fmt: skip
@pytest.mark.parametrize(("m", "n"), [(50, 70), (70, 50)])
def test_backward(unit, dtype, tolerance, m, n):
    kernel, threads, nbytes = backward_of(unit, dtype, 64, 32, 32, causal, 64)
    (q, k, v, do), (_, lse, delta, dk, dv), scale = problem(dtype, 1, 2, 2, m, n, 64, "causal")
    sums = np.float64 if dtype == np.float64 else np.float32
    rows = (lse * LOG2E).astype(sums), delta.astype(sums)
    got_dk, got_dv = poisoned(k.shape, dtype), poisoned(v.shape, dtype)
    arrays = [as_device(x) for x in (q, k, v, do)]
    outputs = as_device(got_dk), as_device(got_dv)
    launch(kernel, (-(-n // 32), 2, 1), threads, nbytes, *arrays, *rows, *outputs, sums(scale), sums(scale * LOG2E))
    np.testing.assert_allclose(got_dk.astype(np.float64), dk, atol=tolerance)
    np.testing.assert_allclose(got_dv.astype(np.float64), dv, atol=tolerance)


# ------------------------------------------------------------------------------------------------ what ptxas says
EVERYWHERE = (7, 5), (8, 0), (9, 0, "a")
AMPERE = EVERYWHERE[1:]
BUDGETS = {
    "simt d64 64x64": (EVERYWHERE, 255, functools.partial(forward_simt, np.float32, 64, 64, 64, causal, 128, 8)),
    "simt d64 128x64": (EVERYWHERE, 255, functools.partial(forward_simt, np.float32, 64, 128, 64, causal)),
    "simt d64 128x128": (AMPERE, 255, functools.partial(forward_simt, np.float32, 64, 128, 128, causal)),
    "simt d128 128x64": (AMPERE, 255, functools.partial(forward_simt, np.float32, 128, 128, 64, causal)),
    "simt d64 f64": (AMPERE, 255, functools.partial(forward_simt, np.float64, 64, 64, 32, causal)),
    "mma d64 128x64": (AMPERE, 255, functools.partial(forward_mma, np.float16, 64, 128, 64, causal)),
    "mma d128 128x64": (AMPERE, 255, functools.partial(forward_mma, np.float16, 128, 128, 64, causal, 256)),
}


@pytest.mark.skipif(SIMULATED, reason="looks at PTX")
@pytest.mark.parametrize(
    ("cc", "budget", "factory"),
    [(cc, *rest) for ccs, *rest in BUDGETS.values() for cc in ccs],
    ids=[f"{name} sm_{''.join(map(str, cc))}" for name, (ccs, *_) in BUDGETS.items() for cc in ccs],
)
def test_nothing_is_spilled(cc, budget, factory):
    from tests.tools.assembler import assemble, compile_ptx

    kernel, threads, _ = factory()
    dtype = factory.args[0]
    sums = np.float64 if dtype == np.float64 else np.float32
    x, lse = np.zeros((1, 1, 1, 1), dtype), np.zeros((1, 1, 1), sums)
    found = assemble(compile_ptx(kernel, (x, x, x, x, lse, np.int32(1), sums(1)), threads, cc))
    assert (found.spills, found.stack) == (0, 0)
    assert found.registers <= budget


@pytest.mark.skipif(SIMULATED, reason="looks at PTX")
@pytest.mark.parametrize(("unit", "dtype"), [("fma", np.float32), ("mma", np.float16)])
def test_backward_spills_nothing(unit, dtype):
    from tests.tools.assembler import assemble, compile_ptx

    kernel, threads, _ = backward_of(unit, dtype, 64, 64, 64 if unit == "fma" else 128, causal, 256)
    x, rows = np.zeros((1, 1, 1, 1), dtype), np.zeros((1, 1, 1), np.float32)
    arguments = x, x, x, x, rows, rows, x, x, np.float32(1), np.float32(1)
    found = assemble(compile_ptx(kernel, arguments, threads, (9, 0, "a")))
    assert (found.spills, found.stack) == (0, 0)
