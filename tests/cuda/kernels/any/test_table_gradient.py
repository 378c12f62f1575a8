"""The gradient of a table from matrices of dS, wherever own keys are."""

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.any.table_gradient import TILES, table_gradient
from tests.tools.launch import launch, poisoned

FAR = 2**30


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("sizes", "entries", "offset", "dtypes"), [
    ((1, 20, 17), 39, -3, (np.float32, np.float16)),                    # all distances
    ((1, 45, 40), 5, 0, (np.float64, np.float64)),                      # most beyond the ends
    ((1, 33, 70), 65, 40, (np.float32, np.float32)),                    # more before than after
    ((2, 9, 8), 1, 4, (np.float32, np.float64)),                        # one for all
    ((1, 9, 8), 35, FAR, (np.float32, np.float32)), ((1, 9, 8), 35, -FAR, (np.float32, np.float32)),
    ((3, 7, 40), 33, np.array([[3, -3, FAR], [-40, 1, -FAR]], np.int32), (np.float32, np.float32)),
], ids=str)  # fmt: skip
def test_sums_by_entry(rng, sizes, entries, offset, dtypes):
    """For two tables, each of several matrices."""
    matrices, m, n = sizes
    given = rng.standard_normal((2, matrices, m, n)).astype(dtypes[0])
    found = poisoned((2, entries), dtypes[1])
    by_matrix, (dtype, out_dtype) = not isinstance(offset, int), (np.dtype(x).name for x in dtypes)
    source = table_gradient(dtype=dtype, out_dtype=out_dtype, by_matrix=by_matrix)
    blocks = 2 * -(-entries // TILES.tile_n)
    dS, offsets = given.reshape(2, matrices, m * n), offset if by_matrix else np.int32(offset)
    launch(source.function, (blocks, 1, 1), source.threads, source.shared, dS, found, offsets, np.int32(m), np.int32(n))
    offset = offset if by_matrix else np.full((2, matrices), offset)
    table = na.RelativeBias(np.zeros((2, 1, entries)), offset=offset)
    exact, size = (table._gradient(x.astype(np.float64), None, None)[:, 0] for x in (given, abs(given)))
    eps = max(np.finfo(x).eps for x in dtypes)
    assert (abs(found - exact) <= 4 * eps * size).all()


FAULTS = {
    "& (entry < end)": "",
    "& (j >= 0)": "",
    "own - seqlen_q + 1, 0)": "own - seqlen_q + 2, 0)",
    "entries, own + seqlen_k)": "entries, own + seqlen_k - 1)",
    "index(offsets[table, matrix])": "index(offsets[table, 0])",
}
