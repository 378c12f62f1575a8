"""Gradients of the arrays that functions read, on any GPU."""

import math

import cupy
import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from tests.accuracy import assert_equal, check, present, random, to_numpy
from tests.scores.test_function import arrays_of, trained
from tests.tools.device import HOPPER, TURING, on
from tests.tools.launch import compiled_only, simulated_only

pytestmark = compiled_only  # but for the tests that say otherwise


def scores(rng, n, heads, dtype):
    """With a part before the function, one after it, and another function, that of each element of a batch."""
    return [na.Softcap(5.0), na.Score(trained, arrays=arrays_of(rng, n, heads, dtype), gradient=True),
            na.Score(lambda s, batch, head, i, j, x: s - x[batch] * abs(i - j), arrays=[random(rng, 2, dtype) / 9],
                     gradient=True)]  # fmt: skip


@pytest.mark.parametrize(("device", "dtype", "deterministic"), [
    pytest.param(TURING, np.float32, False, marks=[simulated_only, pytest.mark.slow]),
    pytest.param(HOPPER, np.float64, True, marks=simulated_only),
    pytest.param(HOPPER, np.float32, False, marks=pytest.mark.slow),
])  # fmt: skip
def test_gradients(rng, device, dtype, deterministic):
    q, (k, v) = random(rng, (2, 2, 19, 8), dtype), random(rng, (2, 2, 1, 23, 8), dtype)
    score = scores(rng, 23, 2, np.float64 if dtype == np.float64 else np.float32)
    with on(device):
        check(q, k, v, rng, score=score, mask=na.Causal() & na.Lengths(np.array([[9], [23]])),
              deterministic=deterministic)  # fmt: skip


def check_half(rng, xp, n, d, deterministic=False, batch=2):
    """Beside float16, whose o is rounded, float32."""
    q, k, v, do = random(rng, (4, batch, 2, n, d), np.float16)
    score = scores(rng, n, 2, np.float32)
    _, saved = na.attention_forward(*map(xp.asarray, (q, k, v)), causal=True, score=score)
    found = na.attention_backward(xp.asarray(do), saved, deterministic=deterministic).score
    for got, want in zip(found, reference.attention_backward(do, q, k, v, causal=True, score=score).score):
        if want is not None:
            np.testing.assert_allclose(to_numpy(got), want, rtol=0, atol=0.01 * abs(want).max())


@simulated_only
@pytest.mark.slow  # Hopper sums what functions read beside dQ: hopper/test_read_sums
def test_gradients_of_halves(rng):
    with on(HOPPER):
        check_half(rng, np, 70, 8, batch=1)


def tilted(s, batch, head, i, j, x, n, y):
    return s * x[n[i]] * x[n[j]] + math.exp(y[j]) * s * s


@pytest.mark.slow  # on CPUs: tests/test_jets
@pytest.mark.parametrize("device", [pytest.param(HOPPER, marks=simulated_only), TURING])
def test_tangents(rng, device):
    """Of what functions read, and of its gradients: of one that only adds, of one whose arrays stay as they are, and
    of another, after a part whose array does."""
    q, k, v, tq, tk, tv, do = rng.standard_normal((7, 1, 9, 4), np.float32)
    x, y, z, tx, ty, tz = rng.standard_normal((6, 9), np.float32)
    functions = (lambda s, batch, head, i, j, x: s + x[i] * x[j]), (lambda s, batch, head, i, j, x: s * x[j]), tilted
    arrays = [z], [y], [x, np.arange(9) % 4, y]
    score = [na.Score(function, arrays=own, gradient=True) for function, own in zip(functions, arrays)]
    options = {"score": [*score[:2], na.Bias(np.zeros(9, np.float32)), *score[2:]], "causal": True}
    given, tscore = (q, k, v, tq, tk, tv), [tz, None, None, tx, None, ty]
    with on(device):
        _, to, saved, tsaved = na.attention_forward_jvp(*given, tscore=tscore, **options)
        _, grads = na.attention_backward_jvp(do, saved, tsaved, deterministic=device is TURING)
    want = reference.attention_backward_jvp(do, *given, tscore=tscore, **options)
    wanted = *reference.attention_jvp(*given, tscore=tscore, **options), *want, *present(want.score)
    for got, exact in zip((to, tsaved.tlse, *grads, *present(grads.score)), wanted, strict=True):
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-4 * abs(exact).max())


@simulated_only
def test_elements_of_the_batch_are_counted_through_all_launches(rng):
    """Where strides do not allow one for all of it."""
    q = random(rng, (2, 3, 1, 5, 8), np.float32)
    k, v = q[:, :1], q[:1].swapaxes(0, 1)[:1]
    score = na.Score(lambda s, batch, head, i, j, x: s * x[batch], arrays=[rng.random(6)], gradient=True)
    with on(TURING):
        check(q, k, v, rng, score=score)


# ----------------------------------------------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize(("d", "deterministic"), [(64, False), (128, True), (256, False)])
def test_gradients_of_halves_on_a_gpu(rng, d, deterministic):
    check_half(rng, cupy, 150, d, deterministic)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "d"), [(np.float32, 64), (np.float64, 128)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_on_a_gpu(rng, dtype, d, deterministic):
    q, (k, v) = random(rng, (2, 4, 150, d), dtype), random(rng, (2, 2, 2, 200, d), dtype)
    score = scores(rng, 200, 4, np.float64 if dtype == np.float64 else np.float32)
    check(q, k, v, rng, cupy, score=score, mask=na.Causal() & na.Lengths(np.array([[90], [200]])),
          dropout=na.Dropout(0.1, 3), deterministic=deterministic)  # fmt: skip


@pytest.mark.gpu
def test_the_same_bits_on_a_gpu(rng):
    q, k, v, do = (cupy.asarray(random(rng, (2, 4, 1000, 64), np.float16)) for _ in range(4))
    score = na.Score(trained, arrays=[cupy.asarray(x) for x in arrays_of(rng, 1000, 4, np.float32)], gradient=True)
    _, saved = na.attention_forward(q, k, v, score=score)
    first, *others = (na.attention_backward(do, saved, deterministic=True).score for _ in range(4))
    for other in others:
        assert_equal(other[0], first[0])
        assert_equal(other[1], first[1])


FAULTS = {
    "S * to_scaled(ONE, given.scores), dS": "S, dS",
    "(end + TILE_N - 1) // TILE_N": "end // TILE_N",
    "heads, matrix % heads": "heads, matrix // heads",
    "sum_of(walk, given, (NONE, ZERO)), walk.sums)": "(NONE, ZERO), walk.sums)",
    "test_tangents": {
        "sum(map(bool, tangents[:after]))": "after",
        "S * scale, tS * scale": "S * scale, tS",
    },
}
