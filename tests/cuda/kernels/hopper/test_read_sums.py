"""Gradients of the arrays that a function reads, of tiles of dS of which dQ is computed."""

import cupy
import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from tests.accuracy import random, to_numpy
from tests.scores.test_function import bucket
from tests.tools.device import HOPPER, on
from tests.tools.launch import mostly_simulated, simulated_only


def of_kinds(s, batch, head, i, j, weights, kinds):
    return s - 2 * weights[head, kinds[i], kinds[j]]


def of_distances(s, batch, head, i, j, table, gain):
    return s * gain[head] + table[bucket(abs(i - j)), head]


def check(rng, name, n, d, xp=np, dtype=np.float16, batch=2, **options):
    """Between other parts; causal, with queries and keys that nobody sees."""
    q, k, v, do = (xp.asarray(random(rng, (batch, 2, n, d), dtype)) for _ in range(4))
    function, arrays = {
        "kinds": (of_kinds, [random(rng, (2, 5, 5), np.float32), rng.integers(5, size=n)]),
        "distances": (of_distances, [random(rng, (8, 2), np.float32), 1 + rng.random(2)]),
    }[name]
    mask = na.Causal() & na.Lengths(np.array([[n - 9], [n]])[:batch])
    score = [na.Softcap(5.0), na.Score(function, arrays=arrays, gradient=True), na.Alibi(np.ones(2, np.float32) / 9)]
    options |= {"mask": mask, "score": score}
    o, lse = reference.attention_forward(*map(to_numpy, (q, k, v)), **options)
    saved = na.Saved.of(q, k, v, xp.asarray(o.astype(dtype)), xp.asarray(lse.astype(np.float32)), **options)
    found = na.attention_backward(do, saved)
    want = reference.attention_backward(*map(to_numpy, (do, q, k, v)), **options)
    for got, right in zip((*found[:3], *found.score), (*want[:3], *want.score), strict=True):
        if right is not None:
            np.testing.assert_allclose(to_numpy(got), right, rtol=0, atol=0.01 * abs(right).max())


@pytest.mark.parametrize(("name", "n"), [
    pytest.param("kinds", 40, marks=mostly_simulated), pytest.param("distances", 70, marks=simulated_only),
])  # fmt: skip
def test_gradients(rng, name, n):
    with on(HOPPER):
        check(rng, name, n, 8, batch=1)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("name", ["kinds", "distances"])
def test_gradients_on_a_gpu(rng, name, d):
    check(rng, name, 300, d, cupy)


FAULTS = {
    "classes_of(args.scores, tile.batch, tile.head, col)": "classes_of(args.scores, tile.batch, tile.head, col + 1)",
    "cuda/kernels/scores/function.py": {
        "ONE if last == column else ZERO": "ONE if last <= column else ZERO",
        "first + column, SUM": "first, SUM",
        "others | (at ^ element), element": "others, element",
    },
}
