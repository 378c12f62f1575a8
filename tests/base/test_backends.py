"""The library of arrays decides who computes."""

import numpy as np

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


FAULTS = {
    "return BACKENDS.get(library) or BACKENDS": "return BACKENDS",
    "base/test_faults.py": {
        "if faults.is_fault(error):": "if False:",
    },
}
