import itertools

import numba
import numpy as np
import pytest

from numbattn.cpu.points import differences


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weighted_differences(rng, dtype):
    """Of points far off, too: they lose no digits."""
    add = numba.njit(lambda *args: differences.add_differences(*args))
    for features, cols, points in itertools.product([0, 1, 3, 8], [1, 31, 75], [0, 1, 20]):
        shapes = (features, cols), (points, features)
        x, y = (rng.standard_normal(shape).astype(dtype) + dtype(1000) for shape in shapes)
        weights = rng.random((points, cols)).astype(dtype)
        around = np.full((features + 2, cols + 5), 7, dtype)
        out = around[1:-1, 2:-3]
        add(out, x, y, weights)
        exact = 7 + np.einsum("ji,jfi->fi", weights, x - y[:, :, None].astype(np.longdouble))
        np.testing.assert_allclose(out, exact, rtol=0, atol=100 * np.finfo(dtype).eps)
        out[...] = 7
        assert (around == 7).all()  # nothing is written beside it


FAULTS = {
    "points[r, c], others[r]": "others[r], points[r, c]",
    "builder.fadd(before[place], builder.load(total))": "builder.load(total)",
    "cols // (VECTORS * width) * (VECTORS * width)": "(cols + width) // (VECTORS * width) * (VECTORS * width)",
}
