"""Random problems of tests/problems.py: a fixed set, and new ones for NUMBATTN_SECONDS on each device.

Without the variable there are new ones for 2 seconds on the CPU, for 2 more that are planned for a GPU, since kernels
take long where there is none, and a few small ones that run there, too.
"""

import os
from importlib.util import find_spec

import numpy as np
import pytest

from .problems import LIMITS, Problem, again, checked, many

GIVEN = os.environ.get("NUMBATTN_SECONDS")
SECONDS = 2 if GIVEN is None else float(GIVEN)  # for the new ones of each device
SEED = int.from_bytes(os.urandom(4), "big")  # of the new ones
WITHOUT_GPU = ["hopper", "ampere", "turing"] if find_spec("numba_cuda") else []
with_kernels = pytest.mark.skipif(GIVEN is None, reason="NUMBATTN_SECONDS is not set")


def assert_right(seed, number, device, world, problem, found, small=False):
    assert not found, "\n".join([again(seed, number, device, world, small), repr(problem), *found])


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (10, 20, 30))])
def test_on_the_cpu(first):
    for number in range(first, first + 10):
        assert_right(0, number, "cpu", "compiled", *checked(0, number, "cpu"))


@pytest.mark.skipif(not WITHOUT_GPU, reason="needs numba-cuda")
@pytest.mark.parametrize(("seed", "number", "world"), [
    *(pytest.param(5, number, "compiled", marks=pytest.mark.slow) for number in (132, 242, 155)),
    (5, 276, "planned"), (5, 113, "planned"), (301, 226, "planned"),
], ids=["scores of -inf, broadcast", "no keys", "sums along rows of several warps",
        "one query, slopes without axes", "one query, slopes of heads", "a bias, then a function"])  # fmt: skip
def test_without_a_gpu(seed, number, world):
    """What was wrong once."""
    assert_right(seed, number, "hopper", world, *checked(seed, number, "hopper", world))


NOT_THERE = [pytest.param(name, marks=with_kernels) for name in WITHOUT_GPU]


@pytest.mark.parametrize("device", ["cpu", *NOT_THERE, pytest.param("gpu", marks=pytest.mark.gpu)])
def test_new_ones(device):
    for number, problem, found in many(SEED, SECONDS, device):
        assert_right(SEED, number, device, "compiled", problem, found)


@pytest.mark.skipif(not WITHOUT_GPU, reason="needs numba-cuda")
def test_new_ones_are_planned():
    """Without kernels there is time for many."""
    for number, problem, found in many(SEED, SECONDS, "hopper", "planned"):
        assert_right(SEED, number, "hopper", "planned", problem, found)


@pytest.mark.skipif(not WITHOUT_GPU, reason="needs numba-cuda")
@pytest.mark.parametrize("world", ["simulated", pytest.param("compiled", marks=pytest.mark.slow)])
def test_new_small_ones(world):
    """By the kernels: simulated; and compiled, which takes the time, and interpreted."""
    for number, problem, found in many(SEED, SECONDS if GIVEN else 1, "hopper", world, small=True):
        assert_right(SEED, number, "hopper", world, problem, found, small=True)


def test_a_problem_is_always_the_same():
    one, other = (Problem(3, 14, LIMITS["cpu"]) for _ in range(2))
    assert repr(one) == repr(other)
    for x, y in zip((*one.arrays, one.do), (*other.arrays, other.do)):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("number", [*range(20, 27), 29, 30, 31])  # the bounds of 27 and 28 are wide
def test_what_is_wrong_is_found(number):
    """The largest element of each result, doubled; where terms may cancel, in tangents and gradients of scores, by
    more than these."""
    problem = Problem(0, number, LIMITS["cpu"])
    results = [np.asarray(x) for x in problem.run()]
    assert not list(problem.wrong(results))
    for at, (name, x) in enumerate(zip(problem.names_of_results, results)):
        if not x.size or not np.isfinite(x).all():
            continue
        changed, place = x.copy(), abs(x).argmax()
        changed.flat[place] *= 2
        if name.startswith(("tangent", "Laplacian")) or name.endswith("of score"):
            changed.flat[place] += x.dtype.type(3 * problem.expected[1][at].max())
        found = list(problem.wrong([*results[:at], changed, *results[at + 1 :]]))
        assert not x.any() or [line.partition(":")[0] for line in found] == [name]
