"""Products by cuBLAS, which is emulated: how matrices are passed to it. Seen on a GPU by test_by_cublas and losses."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from numbattn.base.checks import DTYPES
from numbattn.cuda import products as module
from tests.tools.cublas import emulated

FLOAT64 = DTYPES[-1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize(("m", "n", "k"), [(6, 9, 5), (1, 1, 1), (1, 7, 3), (7, 1, 2)])
def test_products(rng, monkeypatch, dtype, lead, m, n, k):
    """Of parts of larger arrays, transposed, and copied where cuBLAS does not read them."""
    emulated(monkeypatch)
    sums = np.dtype(np.float64 if dtype == FLOAT64 else np.float32)
    whole = rng.standard_normal((*lead, m, n + 3)).astype(sums)
    a, b = rng.standard_normal((*lead, m, 2 * k)).astype(dtype), rng.standard_normal((*lead, n, k)).astype(dtype)
    columns = np.ascontiguousarray(a.swapaxes(-2, -1)).swapaxes(-2, -1)
    for left in (a[..., :k], a[..., ::2], columns[..., :k], np.broadcast_to(a[..., :1, :k], a[..., :k].shape)):
        for right in (b.swapaxes(-2, -1), np.ascontiguousarray(b.swapaxes(-2, -1))):
            for add, factor in ((False, 1), (True, 0.5)):
                found, wanted = whole.copy()[..., :n], factor * (left.astype(sums) @ right.astype(sums))
                wanted += found if add else 0
                module.product(found, left, right, add, factor)
                assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("m", "n", "k"), [(4, 5, 0), (0, 3, 2)])
def test_nothing_is_multiplied(m, n, k):
    out = np.full((2, m, n), 2.0)
    module.product(out, np.zeros((2, m, k)), np.zeros((2, k, n)), add=True)
    assert (out == 2).all()
    out.fill(np.nan)
    module.product(out, np.zeros((2, m, k)), np.zeros((2, k, n)))
    assert (out == 0).all()


def test_how_cublas_reads_a_matrix():
    x = np.zeros((6, 8), np.float32)
    assert [module.operand(z)[1:] for z in (x, x.T, x[::2], x[:, 2:5], x[:1], x[:, :1])] == [
        (8, False), (8, True), (16, False), (8, False), (8, False), (8, False)
    ]  # fmt: skip
    for odd in (x[:, ::2], x[::-1], np.broadcast_to(x[0], (3, 8))):
        copy, ld, turned = module.operand(odd)
        assert (ld, turned) == (odd.shape[1], False)
        assert_array_equal(copy, odd)


FAULTS = {
    "test_how_cublas_reads_a_matrix": {"step >= cols * itemsize": "step > cols * itemsize"},
    "test_products": {
        "number(add, dtype)": "number(1, dtype)",
        "number(factor, dtype)": "number(1, dtype)",
        "is_b_turned, is_a_turned,": "0, 0,",
        "x.strides[0] // x.itemsize if": "0 if",
    },
}
