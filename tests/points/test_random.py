"""Random problems of problems.py: a fixed set, and new ones for NUMBATTN_SECONDS on each device; by default those
without a mask, for 2."""

import os
import time
from importlib.util import find_spec
from itertools import count

import numpy as np
import pytest

from .problems import Problem, wrong

GIVEN = os.environ.get("NUMBATTN_SECONDS")
SEED = int.from_bytes(os.urandom(4), "big")  # of the new ones
WITHOUT_GPU = ["hopper", "ampere", "turing"] if find_spec("numba_cuda") else []


def is_masked(seed, number):
    return Problem(seed, number).mask is not None


@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_on_the_cpu(masked):
    """Masks have kernels of their own, of which other tests take those of float64 alone."""
    for number in range(80 if masked else 40):
        assert is_masked(0, number) != masked or not wrong(0, number)


@pytest.mark.slow
@pytest.mark.parametrize("device", WITHOUT_GPU)
def test_without_a_gpu(device):
    for number in range(8):
        assert not wrong(1, number, device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_new_ones(device):
    end = time.monotonic() + float(GIVEN or 2)
    for number in count():
        assert (is_masked(SEED, number) and not GIVEN) or not wrong(SEED, number, device)
        if time.monotonic() > end:
            return


@pytest.mark.parametrize("number", range(10))
def test_what_is_wrong_is_found(number):
    """The largest element of each result, wrong by half of it, if that is more than rounding explains."""
    problem = Problem(0, number)
    with np.errstate(all="ignore"):
        moved, off_moved = problem.tangents()
        exact, off = [*problem.product(), *moved], [*problem.off_product(), *off_moved]
    assert not list(problem.compared("abcdefgh", exact, exact, off))
    for x, bound in zip(exact, off):
        at = np.unravel_index(abs(x).argmax(), x.shape) if x.size else ()
        if x.any() and 1e-7 < abs(x[at]) < 6e4:
            assert bound[at] < 1e5 * abs(x[at])
            changed = x.copy()
            changed[at] *= 1.5
            assert len(list(problem.compared("x", [changed], [x], [bound]))) == 1


FAULTS = {
    "test_on_the_cpu": {
        "points/tangents.py": {"found += self.term.sums(tb, rows, columns)": "pass"},
        "points/pairs.py": {"found = c @ (np.swapaxes(b, -2, -1) @ self.y)": "found = c @ (b.mT @ self.x[..., :1, :])"},
    },
}
