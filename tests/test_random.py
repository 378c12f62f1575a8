"""Random problems of tests/problems.py: a fixed set, and new ones for so many seconds as NUMBATTN_SECONDS says."""

import os
from importlib.util import find_spec

import numpy as np
import pytest

from .problems import LIMITS, Problem, again, checked, many

SECONDS = float(os.environ.get("NUMBATTN_SECONDS", "5"))  # for the new ones of each device
SEED = int.from_bytes(os.urandom(4), "big")  # of the new ones
WITHOUT_GPU = ["hopper", "ampere", "turing"] if find_spec("numba_cuda") else []
FIXED = {  # (seed, number), and why it is here
    "cpu": [(0, number) for number in range(60)],
}


def assert_right(seed, number, device, world, problem, found):
    assert not found, "\n".join([again(seed, number, device, world), repr(problem), *found])


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_on_the_cpu(first):
    for number in range(first, first + 20):
        assert_right(0, number, "cpu", "compiled", *checked(0, number, "cpu"))


def faulty(seed, number, why, device="hopper", world="compiled"):
    """A problem that fails for now."""
    return pytest.param(device, world, seed, number, marks=pytest.mark.xfail(strict=True, reason=why), id=why)


@pytest.mark.skipif(not WITHOUT_GPU, reason="needs numba-cuda")
@pytest.mark.parametrize(("device", "world", "seed", "number"), [
    faulty(5, 224, "rows whose scores are all -inf"),
    faulty(5, 132, "rows whose scores are all -inf, broadcast"),
    faulty(5, 242, "no keys, and a score"),
    faulty(5, 155, "a row in several warps"),
    faulty(5, 276, "one query, slopes without axes", world="planned"),
    faulty(5, 113, "one query, slopes of heads", world="planned"),
])  # fmt: skip
def test_without_a_gpu(device, world, seed, number):
    assert_right(seed, number, device, world, *checked(seed, number, device, world))


@pytest.mark.parametrize("device", ["cpu", *WITHOUT_GPU, pytest.param("gpu", marks=pytest.mark.gpu)])
def test_new_ones(device):
    for number, problem, found in many(SEED, SECONDS, device):
        assert_right(SEED, number, device, "compiled", problem, found)


@pytest.mark.skipif(not WITHOUT_GPU, reason="needs numba-cuda")
def test_new_ones_are_planned():
    """Without kernels there is time for many."""
    for number, problem, found in many(SEED, SECONDS, "hopper", "planned"):
        assert_right(SEED, number, "hopper", "planned", problem, found)


def test_a_problem_is_always_the_same():
    one, other = (Problem(3, 14, LIMITS["cpu"]) for _ in range(2))
    assert repr(one) == repr(other)
    for x, y in zip((*one.arrays, one.do), (*other.arrays, other.do)):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("number", range(20, 30))
def test_what_is_wrong_is_found(number):
    """The largest element of each result, doubled."""
    problem = Problem(0, number, LIMITS["cpu"])
    results = [np.asarray(x) for x in problem.run()]
    assert not list(problem.wrong(results))
    for at, (name, x) in enumerate(zip(problem.names_of_results, results)):
        if not x.size or not np.isfinite(x).all():
            continue
        changed = x.copy()
        changed.flat[abs(x).argmax()] *= 2
        found = list(problem.wrong([*results[:at], changed, *results[at + 1 :]]))
        assert not x.any() or [line.partition(":")[0] for line in found] == [name]
