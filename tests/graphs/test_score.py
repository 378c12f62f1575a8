"""Scores of edges: derivatives are those of finite differences, and scores that can be written otherwise are equal."""

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import numbattn as na
from numbattn import graphs

from .scores import Call, assert_close

STEP = 1e-5


@pytest.mark.parametrize("softmax", [True, False])
def test_derivatives(rng, softmax):
    """First ones by tangents of results, second ones by those of gradients; gradients are transposed tangents."""
    call = Call(rng, softmax=softmax)
    found, ahead, behind = (each.results() for each in (call, call.moved(STEP), call.moved(-STEP)))
    for name, x in found.items():
        if name.startswith("t"):
            sees = np.isfinite(found[name[1:]])
            wanted = (ahead[name[1:]][sees] - behind[name[1:]][sees]) / (2 * STEP)
            assert_allclose(x[sees], wanted, rtol=0, atol=1e-7 * np.abs(wanted).max(), err_msg=name)
    along = (call.x["do"] * found["to"]).sum()
    if softmax:
        sees = np.isfinite(found["lse"])
        along += (call.x["dlse"] * found["tlse"])[sees].sum()
    names = ("q", "k", "v", "bias", "factor", "weight")
    assert_allclose(sum((found[f"d{name}"] * call.t[name]).sum() for name in names), along, rtol=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float16, 0.02), (ml_dtypes.bfloat16, 0.1)])
def test_dtypes(rng, dtype, tolerance):
    call = Call(rng).rounded(dtype)
    assert_close(call.results(np, dtype), call.results(), tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-5), (np.float16, 0.02)])
def test_on_a_gpu(rng, dtype, tolerance):
    """And the same bits from call to call."""
    import cupy

    call = Call(rng, 200, 6000).rounded(dtype)
    found = call.results(cupy, dtype)
    assert_close(found, call.results(), tolerance)
    for name, x in call.results(cupy, dtype).items():
        assert_array_equal(x, found[name])


FAULTS = {}
