"""Partial sums added up, whatever their number."""

import numpy as np
import pytest

from numbattn.cuda.kernels.any.sum_parts import TILES, sum_parts
from tests.tools.launch import launch, poisoned


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("parts", "elements", "dtype", "out"), [
    (2, 100, np.float32, np.float16), (32, 64, np.float64, np.float64), (65, 40, np.float32, np.float32),
])  # fmt: skip
def test_sums_of_parts(rng, parts, elements, dtype, out):
    """Matrices lie after one another or, as here, their parts do; elements beyond the last one are nobody's."""
    given = rng.standard_normal((parts, 3, elements)).astype(dtype).swapaxes(0, 1)
    found = poisoned((3, elements), out)
    source = sum_parts(dtype=np.dtype(dtype).name, out_dtype=np.dtype(out).name)
    blocks = 3 * -(-elements // TILES.tile_n)
    launch(source.function, (blocks, 1, 1), source.threads, source.shared, given, found)
    expected = given.sum(axis=1, dtype=np.float64)
    error = 4 * np.finfo(out).eps * abs(given).sum(axis=1)
    assert (abs(found - expected) <= error).all()


FAULTS = {
    "total + load(mParts": "load(mParts",
    "matrix, place = split(": "place, matrix = split(",
}
