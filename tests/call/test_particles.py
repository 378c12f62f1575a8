"""Laplacians of particles: against the plain formula, in which every tangent has all rows; errors of a user."""

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from numbattn.call import passes
from numbattn.call.particles import by_products, checked_particles
from numbattn.call.problem import describe
from numbattn.call.tangents import checked_tangents

from ..accuracy import random, to_numpy

NOT_ALL = -1, 2, 0, 0, 3, 3, 3, -1, 5, 0, 2  # of 11 rows; 1 and 4 have none
MANY = np.random.default_rng(3).integers(-1, 9, 300)


def shapes(m, n, batch=(2, 4), batch_k=(2, 2), d=8, e=6):
    return (*batch, m, d), (*batch_k, n, d), (*batch_k, n, e)


CALLS = {  # shapes of q, k and v; particle; which of jq, jk and jv are given; options
    "rows of several": (shapes(11, 11), list(NOT_ALL), "qkv", {"causal": True}),
    "without jq": (shapes(11, 11), np.array(NOT_ALL, np.int8), "kv", {}),
    "without jk": (shapes(11, 11), np.array(NOT_ALL), "qv", {}),
    "without jv": (shapes(11, 11), np.array(NOT_ALL), "qk", {"mask": na.Segments([0, 4, 4, 11]) & na.Causal()}),
    "nothing": (shapes(11, 11), np.array(NOT_ALL), "", {}),
    "one each": (shapes(70, 70, (4,), (1,)), range(70), "qkv", {"scale": 0.4}),
    "nuclei": (shapes(40, 5, (3, 1), (1,)), (np.arange(40) % 20, [-1] * 5), "qkv", {}),
    "of two": (shapes(5, 7, (), ()), ([4, 3, 0, 1, 2], [0, -1, 1, 1, 6, 2, 0]), "qkv",
               {"mask": np.random.default_rng(0).random((5, 7)) < 0.5}),
    "tiles": (shapes(200, 300, (2,), (2,), 8, 70), (MANY[:200], MANY), "qkv",
              {"mask": na.Lengths(keys=np.array([140, 280]), queries=np.array([190, 20])),
               "score": [na.Bias(np.random.default_rng(1).standard_normal((2, 200, 300))), na.Alibi([0.1, 0.2]),
                         na.Sink([1.0, 2.0])]}),
    "no queries": (shapes(0, 3), ([], [0, 1, 2]), "qkv", {}),
    "no keys": (shapes(3, 0), ([0, 1, 2], []), "qkv", {}),
    "nobody's": (shapes(3, 3), [-1] * 3, "qkv", {}),
}  # fmt: skip


def drawn(rng, shapes, given, dtype=np.float64):
    """q, k and v, their derivatives by two coordinates and their Laplacians."""
    arrays = [random(rng, shape, dtype) for shape in shapes]
    firsts = [random(rng, (2, *x.shape), dtype) if name in given else None for name, x in zip("qkv", arrays)]
    return arrays, firsts, [random(rng, x.shape, dtype) for x in arrays]


@pytest.mark.parametrize("name", CALLS)
def test_as_the_plain_formula(rng, xp, name):
    shapes, particle, given, options = CALLS[name]
    call = [x for xs in drawn(rng, shapes, given) for x in xs]
    want = reference.attention_laplacian(*call, particle=particle, **options)
    on_device = (x if x is None else xp.asarray(x) for x in call)
    for got, exact in zip(na.attention_laplacian(*on_device, particle=particle, **options), want):
        np.testing.assert_allclose(to_numpy(got), exact, rtol=0, atol=2e-14 * abs(exact).max(initial=1))


@pytest.mark.parametrize("name", CALLS)
def test_by_products(rng, name):
    """What GPUs take if keys are in another order; what nobody sees may be anything."""
    shapes, particle, given, options = CALLS[name]
    (q, k, v), firsts, _ = drawn(rng, shapes, given)
    _, jo, o2 = reference.attention_laplacian(q, k, v, *firsts, particle=particle, **options)
    if name == "tiles":
        for x in (k, v, *firsts[1:]):
            x[..., 280:, :] = np.nan
    problem, inputs = describe(q, k, v, **options)
    tangents, _ = checked_tangents(inputs, *firsts, prefix="j", several=True)
    particles = checked_particles(particle, problem, inputs, tangents)
    P = passes.weights(problem, inputs)
    found = by_products(problem, inputs, particles.own(tangents), particles, P)
    for got, exact in ((found["to"], jo), (found["o2"][0], o2)):
        np.testing.assert_allclose(got, exact, rtol=0, atol=2e-14 * abs(exact).max(initial=1))


@pytest.mark.slow  # the kernels of float64, compiled once more
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_dtypes(rng, xp, dtype):
    """Sums are as exact as those of float32, and rounded once."""
    call = [x for xs in drawn(rng, shapes(40, 40, d=64, e=64), "qkv", dtype) for x in xs]
    want = reference.attention_laplacian(*call, particle=range(40))
    eps = float(ml_dtypes.finfo(dtype).eps)
    for got, exact in zip(na.attention_laplacian(*map(xp.asarray, call), particle=range(40)), want):
        assert got.dtype == dtype
        got, size = to_numpy(got).astype(float), abs(exact).max()
        if xp is np:
            np.testing.assert_allclose(got, exact, rtol=eps / 2 if dtype != np.float32 else 0, atol=3e-6 * size)
        else:
            np.testing.assert_allclose(got, exact, rtol=0, atol=max(8 * eps, 3e-6) * size)


def test_what_is_given_stays_as_it_is(rng):
    arrays, firsts, _ = drawn(rng, shapes(11, 11), "qkv")
    copies = [x.copy() for x in (*arrays, *firsts)]
    particle = np.array(NOT_ALL)
    na.attention_laplacian(*arrays, *firsts, particle=particle)
    for x, copy in zip((*arrays, *firsts, particle), (*copies, NOT_ALL)):
        np.testing.assert_array_equal(x, copy)


Q = np.zeros((2, 5, 8), np.float32)
BIAS = na.Bias(np.zeros((5, 5), np.float32))


@pytest.mark.parametrize(("particle", "options", "kind", "message"), [
    ([0, 1], {}, ValueError, r"particle: got the shape \(2,\), expected \(5,\), one for each row of q"),
    (([0] * 5, [[0]]), {}, ValueError, r"particle: got the shape \(1, 1\), expected \(5,\), one for each row of k"),
    (3, {}, ValueError, r"particle: got a number, expected an array \(rows,\)"),
    ([0.5] * 5, {}, TypeError, "particle: got list, expected an int or an integer array"),
    ([0, 1, -2, 3, 4], {}, ValueError, "particle: got -2 to 4, allowed -1 to 2147483647"),
    (np.array([0, 1, 2, 3, 2**63], np.uint64), {}, ValueError, "particle: got 0 to 9223372036854775808, allowed -1 to"),
    (([0] * 5,) * 3, {}, ValueError, "particle: got a tuple of 3, expected an array, or two: of queries and of keys"),
    (range(5), {"dropout": na.Dropout(0.1, 1)}, NotImplementedError, "particle: got one with Dropout"),
    (range(5), {"score": na.Softcap(3.0)}, NotImplementedError, "particle: got one with Softcap.* added to S"),
    (range(5), {"score": BIAS, "jscore": [np.zeros((3, 5, 5), np.float32)]}, NotImplementedError,
     "particle: got one with Bias"),
])  # fmt: skip
def test_errors(particle, options, kind, message):
    with pytest.raises(kind, match=message):
        na.attention_laplacian(Q, Q, Q, np.zeros((3, *Q.shape), Q.dtype), None, None, particle=particle, **options)


FAULTS = {
    "test_errors": {
        "array.min(initial=0) < -1": "array.min(initial=0) < -2",
        " for part in inputs.score if part._is_nonlinear]": " for part in () if part._is_nonlinear]",
        "inputs.dropout is not None or others:": "others:",
    },
    "test_as_the_plain_formula": {
        "q=_cleared(tangents.q, self.queries)": "q=tangents.q",
        "k=_cleared(tangents.k, self.keys)": "k=tangents.k",
        "v=_cleared(tangents.v, self.keys)": "v=tangents.v",
    },
    "test_what_is_given_stays_as_it_is": {"    x = x.copy()\n": ""},
    "test_by_products": {
        "V = np.where(seen, V, 0)": "V = V + np.zeros_like(seen)",
        "2 * same * (A * B + both)": "2 * same * A * B",
        "(B + same * A) @ jV": "B @ jV",
        " * is_key": "",
        "b[..., owners[own], own, :] += a[..., own, :]": "pass",
        "(A @ V - a * O)": "(A @ V)",
    },
    "cuda/kernels/any/test_particle_laplacian.py::test_as_the_plain_formula": {
        "own = particles._replace(keys=np.sort(particles.keys))": "own = particles",
    },
    "cuda/kernels/any/test_particle_laplacian.py::test_large_head_dims_and_other_orders_beside_a_mask": {
        "if inputs.mask._parts or any(": "if any(",
    },
}
