"""Scaled frequencies by name, compared with the loops of their papers and models, and with known numbers."""

import math

import numpy as np
import pytest

import numbattn as na
from numbattn.rotations.scaling import PARAMETERS

LLAMA = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def found(width, base, scaling):
    """Radians of a step of each pair, and the factor."""
    turns, factor = na.Rotary(base, scaling=scaling)._turns(width)
    return turns * 2 * math.pi, factor


def of_default(width, base):
    return np.array([base ** (-2 * f / width) for f in range(width // 2)])


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}, {"type": "default"}])
def test_default(scaling):
    angles, factor = found(8, 10000.0, scaling)
    np.testing.assert_allclose(angles, [1, 0.1, 0.01, 0.001], rtol=1e-15)
    assert factor == 1


def test_linear():
    angles, factor = found(64, 10000.0, {"rope_type": "linear", "factor": 4})
    np.testing.assert_allclose(angles, of_default(64, 10000.0) / 4, rtol=1e-15)
    assert factor == 1


def test_ntk():
    """The fastest pair stays, the slowest one is slowed by the factor."""
    angles, factor = found(64, 10000.0, {"rope_type": "ntk", "factor": 4})
    want = of_default(64, 10000.0)
    np.testing.assert_allclose(angles[[0, -1]], want[[0, -1]] / [1, 4], rtol=1e-14)
    np.testing.assert_allclose(angles, of_default(64, 10000.0 * 4 ** (64 / 62)), rtol=1e-14)
    assert factor == 1
    assert found(2, 10000.0, {"rope_type": "ntk", "factor": 4})[0] == 1


def test_llama3():
    """Llama 3.1's, by wavelengths; three pairs as its own code computes them."""
    angles, factor = found(128, 500000.0, LLAMA)
    want = []
    for angle in of_default(128, 500000.0):
        wavelength = 2 * math.pi / angle
        if wavelength < 8192 / 4:
            want.append(angle)
        elif wavelength > 8192:
            want.append(angle / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            want.append((1 - smooth) * angle / 8 + smooth * angle)
    np.testing.assert_allclose(angles, want, rtol=1e-14)
    np.testing.assert_allclose(angles[[0, 31, 63]], [1, 0.00085682, 3.0689e-07], rtol=1e-4)
    assert factor == 1


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("width", "base", "length", "factor"), [(128, 1e6, 32768, 4.0), (64, 10000.0, 64, 16.0)])
def test_yarn(width, base, length, factor, truncate):
    """Section 3 of the paper: r turns within the trained length; a ramp over pairs, between whole ones if truncated."""
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length, "truncate": truncate}
    angles, size = found(width, base, scaling)
    low, high = (width * math.log(length / (2 * math.pi * turns)) / (2 * math.log(base)) for turns in (32, 1))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    want = []
    for f, angle in enumerate(of_default(width, base)):
        kept = 1 - min(max((f - low) / (high - low), 0), 1)
        want.append(angle / factor * (1 - kept) + angle * kept)
    np.testing.assert_allclose(angles, want, rtol=1e-14)
    assert size == pytest.approx(0.1 * math.log(factor) + 1)


def test_factors_of_yarn():
    """DeepSeek's two numbers, of which the second divides; a factor of one's own; none below 1."""
    both = {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    size = 0.1 * math.log(40) + 1, 0.05 * math.log(40) + 1
    assert found(64, 1e4, both)[1] == pytest.approx(size[0] / size[1])
    assert found(64, 1e4, {**both, "attention_factor": 1.5})[1] == 1.5
    assert found(64, 1e4, {**YARN, "factor": 0.5})[1] == 1
    fewer = found(64, 1e4, {**YARN, "beta_fast": 64, "beta_slow": 2})[0]
    assert (fewer <= found(64, 1e4, YARN)[0]).all()
    assert np.isfinite(found(64, 1e4, {**YARN, "original_max_position_embeddings": 6})[0]).all()


@pytest.mark.parametrize(("scaling", "error", "words"), [
    (4.0, TypeError, "got 4.0, expected a dict with a rope_type and its numbers"),
    ({"factor": 4.0}, ValueError, "got the rope_type None, allowed default, linear, ntk, yarn, llama3"),
    ({"rope_type": "dynamic", "factor": 2}, ValueError, "got the rope_type 'dynamic', allowed default, linear"),
    ({"rope_type": "linear"}, ValueError, "got no factor, which linear needs"),
    ({"rope_type": "linear", "factor": 2, "beta_fast": 3}, ValueError, "got beta_fast for linear, allowed factor"),
    ({"rope_type": "default", "factor": 2}, ValueError, "got factor for default, allowed nothing"),
    ({"rope_type": "linear", "factor": "two"}, TypeError, "Rotary scaling factor: got 'two', expected a number"),
    ({"rope_type": "linear", "factor": 0}, ValueError, "Rotary scaling factor: got 0.0, expected a finite number"),
    ({**YARN, "original_max_position_embeddings": 1.5}, TypeError, "embeddings: got 1.5, expected an integer"),
    ({**YARN, "truncate": 1}, TypeError, "Rotary scaling truncate: got 1, expected True or False"),
    ({**YARN, "beta_slow": 32.0}, ValueError, "Rotary scaling beta_fast: got 32.0, expected more than beta_slow"),
    ({**LLAMA, "high_freq_factor": 1}, ValueError, "high_freq_factor: got 1.0, expected more than low_freq_factor"),
])  # fmt: skip
def test_errors(scaling, error, words):
    with pytest.raises(error, match=words):
        na.Rotary(scaling=scaling)


def test_all_that_each_takes_is_said():
    for name, numbers in PARAMETERS.items():
        assert all(word in na.Rotary.__doc__ for word in (name, *numbers))


FAULTS = {
    "width > 2": "width > 0",
    "/ factor, 1.0": "* factor, 1.0",
    "width / (width - 2)": "1",
    "if truncate:": "if not truncate:",
    "max(first, 0)": "first",
    " or 0.001": "",
    "if factor > 1 else 1.0": "",
    "size(mscale) / size(mscale_all_dim)": "size(mscale)",
    "(1 - kept) / factor": "(1 - kept)",
    "high_freq_factor - low_freq_factor": "high_freq_factor",
    "found[low] >= found[high]": "found[low] > found[high]",
}
