"""Cosines and sines of one element; what backends make of them is tested where they are."""

import numpy as np
import pytest

from numbattn.rotations.turns import cosine_and_sine


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-7), (np.float64, 3e-16)])
def test_all_around(rng, dtype, tolerance):
    """Where quadrants meet, next to these, and between, either way round."""
    whole = np.arange(-16, 17) / 8
    turns = np.concatenate([whole, np.nextafter(whole, 9), np.nextafter(whole, -9), rng.uniform(-3, 3, 500)])
    with np.errstate(under="ignore"):
        found = [np.array([of(t) for t in turns]) for of in cosine_and_sine(dtype)]
    assert all(x.dtype == dtype for x in found)
    angles = 8 * np.arctan(np.longdouble(1)) * turns  # in extended precision, where there is any
    for got, want in zip(found, (np.cos(angles), np.sin(angles))):
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


def test_many_turns_cost_nothing():
    """They are taken away exactly."""
    for of in cosine_and_sine(np.float64):
        for turns in (0.25, 0.375, -0.0625):
            assert of(2.0**40 + turns) == of(turns)
            assert of(-(2.0**40) + turns) == of(turns)


def test_quarters_are_exact():
    cosine, sine = cosine_and_sine(np.float32)
    assert [cosine(n / 4) for n in range(-4, 5)] == [1, 0, -1, 0, 1, 0, -1, 0, 1]
    assert [sine(n / 4) for n in range(-4, 5)] == [0, 1, 0, -1, 0, 1, 0, -1, 0]
    assert np.isnan(cosine(np.nan))


FAULTS = {
    '"float32": 9, "float64": 17': '"float32": 7, "float64": 17',
    '9, "float64": 17': '9, "float64": 15',
    "quadrant -= 4 *": "quadrant -= 2 *",
    "abs(quadrant) == 1": "quadrant == 1",
    "quadrant == 0 or quadrant == -1": "quadrant == 0",
    "ahead_by(0), ahead_by(1)": "ahead_by(0), ahead_by(-1)",
}
