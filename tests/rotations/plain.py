"""The formula in NumPy, with nothing rounded but angles and, where they are of float32, cosines and products."""

import numpy as np


def angles(positions, width, base=10000.0):
    """Of each pair, (..., seqlen, width / 2): the angle of features 2 f and 2 f + 1, or f and f + width / 2."""
    return np.asarray(positions, float)[..., None] * base ** (-np.arange(0, width, 2) / width)


def turned(x, t, interleaved=False, factor=1.0, work=float):
    """The first features, two for each angle, in the dtype `work`; the others stay."""
    half, width, y = t.shape[-1], 2 * t.shape[-1], x.astype(work)
    pairs = (slice(0, width, 2), slice(1, width, 2)) if interleaved else (slice(0, half), slice(half, width))
    a, b = (y[..., pair].copy() for pair in pairs)
    c, s = ((factor * of(t)).astype(work) for of in (np.cos, np.sin))
    y[..., pairs[0]], y[..., pairs[1]] = a * c - b * s, b * c + a * s
    return y
