"""Functions of the user's own, and their derivatives."""

import math

import cupy
import numpy as np
import pytest

import numbattn as na
from numbattn.functions.compiled.errors import naming
from tests.accuracy import check, random
from tests.scores import test_parts as scores
from tests.tools import device
from tests.tools.device import HOPPER, TURING, on
from tests.tools.launch import compiled_only, simulated_only

pytestmark = compiled_only  # but for the tests that say otherwise


def half_squared(s, batch, head, i, j):
    return s * s / 2


@pytest.mark.parametrize("dropout", [
    pytest.param(None, id="", marks=simulated_only),
    pytest.param(na.Dropout(0.3, 1), id="dropout", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_derivative_may_be_negative(rng, small, dropout):
    with on(HOPPER):
        check(*scores.qkv(rng, np.float16, heads_k=1), rng, score=na.Score(half_squared), dropout=dropout)


@simulated_only
def test_what_was_minus_infinity_has_no_gradient(rng):
    with on(TURING):
        scores.check_behind_minus_infinity(rng)


@pytest.mark.slow
@simulated_only
def test_a_function_sees_the_element_of_the_batch(rng):
    """Also where strides do not allow one launch for all of it."""
    q = random(rng, (2, 3, 1, 5, 8), np.float32)
    k, v = q[:, :1], q[:1].swapaxes(0, 1)[:1]
    score = na.Score(lambda s, batch, head, i, j, x: s * x[batch] + batch, arrays=[rng.random(6)])
    with on(TURING):
        check(q, k, v, rng, score=score)


def test_functions_of_too_many_places_are_refused():
    """Which are no float32 any more."""
    q, k = np.zeros((1, 8), np.float16), np.broadcast_to(np.float16(0), (2**24 + 1, 8))
    with on(HOPPER), pytest.raises(NotImplementedError, match="1 queries and 16777217 keys, at most 16777216 on a GPU"):
        na.attention(q, k, k, score=na.Score(lambda s, batch, head, i, j: s))


def hides(s, batch, head, i, j):
    return i >= j


def unruly(s, batch, head, i, j):
    return 2 * s.real


def test_a_derivative_is_only_asked_for_in_the_backward_pass(rng, small):
    """Of a function of which none can be found; and a mask is refused at once."""
    q, k, v = scores.qkv(rng, np.float32, heads_k=1, d=8)
    with on(TURING):
        o, saved = na.attention_forward(q, k, v, score=na.Score(unruly))
        np.testing.assert_allclose(o, na.reference.attention_forward(2 * q, k, v)[0], rtol=1e-4, atol=1e-5)
        message = r"derivative of unruly, line .*\nattribute 'real' of type Dual.* has no rule here\n.*derivative="
        with pytest.raises(TypeError, match=message), naming(unruly):
            na.attention_backward(o, saved)
        with pytest.raises(TypeError, match=r"hides, line .* returns True or False, as a mask does"), naming(hides):
            na.attention(q, k, v, score=na.Score(hides))


@simulated_only
@pytest.mark.parametrize("route", [TURING, HOPPER], ids=["CUDA cores", "warpgroups"])
def test_what_prints_or_may_fail_is_refused(rng, route):
    def prints(s, batch, head, i, j):
        print(i)
        return s

    q = random(rng, (1, 2, 40, 64), np.float16)
    with on(route):
        with pytest.raises(TypeError, match=r"Score function: prints, line \d+ of .*leave it out"):
            na.attention(q, q, q, score=na.Score(prints))
        with pytest.raises(TypeError, match="looks up an entry of a tuple"):    # of what only adds
            na.attention(q, q, q, score=na.Score(lambda s, batch, head, i, j: s + (1, 2)[j]))


@pytest.mark.parametrize("dtype", [np.uint8, pytest.param(np.uint32, marks=pytest.mark.slow)])
def test_differences_of_unsigned_entries_are_negative(rng, small, dtype):
    def apart(s, batch, head, i, j, place, flag):
        return s * (1 + flag[i] - flag[j]) - 0.1 * (place[0, i] - place[0][j] - i) * (flag[j] - flag[i])

    arrays = [rng.integers(0, 9, (1, 70)).astype(dtype), rng.random(70) < 0.5]
    q, k, v = scores.qkv(rng, np.float32, heads_k=1, d=8)
    score = na.Score(apart, arrays=arrays)
    with on(TURING):
        o = na.attention(q, k, v, score=score)
    np.testing.assert_allclose(o, na.reference.attention_forward(q, k, v, score=score)[0], rtol=1e-4, atol=1e-5)


def test_floats_in_a_function_do_not_make_float64_of_float32(rng, monkeypatch):
    def function(s, batch, head, i, j, x):
        return 30.0 * math.tanh(s / 30.0) - 0.1 * abs(i - j) + x[j] * 0.3

    q, found, kept = random(rng, (70, 16), np.float32), [], device.kept_ptx
    monkeypatch.setattr(device, "kept_ptx", lambda *about: found.append(kept(*about)) or found[-1])
    for dtype in np.float32, np.float64:
        with on(TURING):
            na.attention(q, q, q, score=na.Score(function, arrays=[q[:, 0].astype(dtype)]))
    narrow, wide = [".f64" in ptx for ptx in found]
    assert not narrow
    assert wide


# ----------------------------------------------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dropout", [None, na.Dropout(0.3, 1)], ids=["", "dropout"])
def test_a_derivative_may_be_negative_on_a_gpu(rng, d, dropout):
    check(*scores.qkv(rng, np.float16, heads_k=2, d=d, e=d), rng, cupy, score=na.Score(half_squared), dropout=dropout)


@pytest.mark.gpu
def test_functions_that_numba_cannot_compile_are_named():
    def strange(s, batch, head, i, j):
        return s.nothing

    q = cupy.zeros((2, 40, 64), np.float16)
    with pytest.raises(TypeError, match=r"score: Numba cannot compile .*strange, line"):
        na.attention(q, q, q, score=na.Score(strange))


FAULTS = {
    "test_floats_in_a_function_do_not_make_float64_of_float32[compiled]": {
        "identity = part._identity_of(problem.sum_dtype)": "identity = part._identity",
    },
    "cuda/test_origin.py::test_part_of_the_heads_and_of_the_batch": {
        "(first + at.batch + batch, at.head + head, arrays)": "(first + batch, at.head + head, arrays)",
        "at.batch + batch, at.head + head, arrays)": "at.batch + batch, head, arrays)",
    },
    "cuda/test_origin.py::test_parts_make_the_whole": {
        "of_rows, S, i + m0, j + n0,": "of_rows, S, i + m0, n0,",
        "of_rows, S, i + m0, j + n0, (i + seqlen_q, j + seqlen_k)": "of_rows, S, i + m0, j + n0, (seqlen_q, seqlen_k)",
    },
    (
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-softcap-alibi-sink]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-relative-softcap]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-bias of keys]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-pair bias-softcap-bias "
        "of queries]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-relative-function-shift]",
    ): {
        "map_elements(of_cols, S, j + n0, i + m0": "map_elements(of_rows, S, j + n0, i + m0",
        "where(seen, slope_of(S, scores, batch, head, m0, n0), 0)": "slope_of(S, scores, batch, head, m0, n0)",
        "(first + at.batch + batch, at.head + head": "(at.batch + batch, at.head + head + 1",
    },
    ("test_a_derivative_may_be_negative[simulated-]", "test_what_was_minus_infinity_has_no_gradient"): {
        "S = S * to_scaled(ONE, scores)": "pass",
        "(S != HIDDEN) & (value != HIDDEN)": "(value != HIDDEN)",
    },
}
