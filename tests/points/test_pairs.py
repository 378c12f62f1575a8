"""Points as backends sum over them."""

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from numbattn import points
from numbattn.points import pairs
from numbattn.points.pairs import Pairs, Term


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_points_of_half_precision_stay_about_the_origin(rng, dtype):
    x, y = rng.standard_normal((2, 500, 3)).astype(dtype)
    far = (y.astype(np.float32) + 9).astype(dtype)
    near, off = Pairs.of(x, y, ()).centre, Pairs.of(x, far, ()).centre
    assert near.dtype == off.dtype == np.float32
    assert (near == 0).all() == (dtype != np.float32)
    assert_allclose(off, far.astype(np.float64).mean(axis=0, keepdims=True), rtol=1e-5)


def test_a_centre_of_some_points(rng, monkeypatch):
    """Also where elements of the batch share them."""
    monkeypatch.setattr(pairs, "ENOUGH", 10)
    x, y = rng.standard_normal((3, 50, 2)), rng.standard_normal((1, 35, 2))
    assert_allclose(Pairs.of(x, y, (3,)).centre, y[:, ::3].mean(axis=1, keepdims=True))
    assert_allclose(Pairs.of(y, x[:1], (1,)).centre, x[:1, ::5].mean(axis=1, keepdims=True))


@pytest.mark.parametrize("kernel", [points.Gaussian(0.3), points.Cost(1.5, 7.0), points.Gaussian([0.3, 0.4])])
def test_points_of_half_precision_on_gpus(rng, monkeypatch, kernel):
    """Keep their digits; what is left of the length comes with them. Lengths of each feature are no such factor."""
    x, y = rng.standard_normal((2, 20, 2)).astype(ml_dtypes.bfloat16)
    term = Term(Pairs.of(x, y, ()), kernel)
    monkeypatch.setattr(pairs, "library", lambda x: "cupy")
    X, Y, options = term.in_halves
    if kernel._one_length is None:
        assert X is term.x
        assert not options
        return
    assert_array_equal(X.astype(x.dtype), X)
    assert_allclose((X - Y) ** 2 * options["rate"], (term.x - term.y) ** 2, rtol=1e-5)


def test_exchanged_points_are_those_of_their_twin(rng, monkeypatch):
    """Moved to one centre; of unit length only where they are asked for."""
    x, y = rng.standard_normal((2, 20, 2)).astype(np.float16) + np.float16(9)
    term = Term(Pairs.of(x, y, ()), points.Gaussian(0.3))
    monkeypatch.setattr(pairs, "library", lambda x: "cupy")
    assert all(a is b for a, b in zip(term.exchanged.in_halves[1::-1], term.in_halves[:2]))
    assert "units" not in vars(term)
    assert all(a is b for a, b in zip(term.exchanged.units[::-1], term.units))
    assert "centre" not in vars(term.pairs.exchanged)
    assert term.exchanged.exchanged is term


FAULTS = {
    "return self.exchanged.units[::-1]": "return self.exchanged.units",
    "return y, x, options": "return x, y, options",
    "2 * (centre * centre)": "0 * (centre * centre)",
    "is_near[..., None], 0, centre": "is_near[..., None], centre, 0",
    "mantissa**-2": "mantissa**-1",
    "points/test_sinkhorn.py::test_errors": {"length < least": "False"},
    "2.0**-exponent": "2.0**exponent",
    "max(points.shape[-2] // ENOUGH, 1)": "1",
}
