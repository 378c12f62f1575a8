"""The library of arrays decides who computes."""

import importlib

import numpy as np
import pytest

import numbattn as na
from numbattn.base import backends


def test_the_backend_of_numpy_is_the_one_that_calls_take(monkeypatch, rng):
    taken = []

    class Recorded:
        @staticmethod
        def forward(problem, inputs, out, save, onto):
            taken.append(problem.xp)
            return out, None

    monkeypatch.setitem(backends.BACKENDS, "numpy", Recorded)
    q, out = rng.standard_normal((8, 4)), np.zeros((8, 4))
    assert na.attention(q, q, q, out=out) is out
    assert taken == ["numpy"]


NAMES = {
    "MODULES": "forward run turn states_of_blocks shown_by_function",
    "POINTS": "sums gradient logsumexp nearest clusters",
    "SPARSE": "forward backward_x backward_w",
    "GRAPHS": "forward tangent backward backward_tangent",
}


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("library", ["numpy", "cupy"])
def test_backends_have_what_calls_ask_for(family, library):
    module = importlib.import_module(getattr(backends, family)[library])
    assert not [name for name in NAMES[family].split() if not callable(getattr(module, name, None))]


FAULTS = {
    "test_backends_have_what_calls_ask_for": {
        "cuda/backend.py": {"nearest, clusters = POINTS.nearest, POINTS.clusters": "nearest = POINTS.nearest"},
    },
    "return BACKENDS.get(library) or BACKENDS": "return BACKENDS",
    "base/test_faults.py": {
        "if faults.is_fault(error):": "if False:",
    },
}
