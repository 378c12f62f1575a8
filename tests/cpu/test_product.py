"""Products of tiles, also as CPUs with shorter vectors make them."""

import itertools

import numba
import numpy as np
import pytest

from numbattn.cpu import product
from numbattn.cpu.tile import address_of

FORMS = {
    "product": lambda x: x, "product_tn": lambda x: x.T, "product_few": lambda x: x, "product_tn_row": lambda x: x.T,
}  # fmt: skip
DTYPES = pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])


def check(multiply, form, rng, dtype, rows, cols, inner):
    a, b = rng.standard_normal((rows, inner)), rng.standard_normal((inner, cols))
    stored = [np.hstack([x, np.full((len(x), 3), np.nan)]).astype(dtype)[:, : x.shape[1]]  # rows apart
              for x in (FORMS[form](a), b)]  # fmt: skip
    around = np.full((rows + 2, cols + 5), 7, dtype)
    out = around[1:-1, 2:-3]
    out[...] = 1
    multiply(out, *stored, dtype(2), True)
    tolerance = {"rtol": 1e-5, "atol": 1e-5 if dtype == np.float32 else 1e-12}
    np.testing.assert_allclose(out, 2 * a @ b + 1, **tolerance)
    out[...] = np.nan
    multiply(out, *stored, dtype(1), False)  # forgets what was there
    np.testing.assert_allclose(out, a @ b, **tolerance)
    out[...] = 7
    assert (around == 7).all()  # nothing is written beside it


@pytest.mark.parametrize("form", FORMS)
@DTYPES
def test_products(rng, form, dtype):
    function = getattr(product, form)
    multiply = numba.njit(lambda *args: function(*args))
    vectors = product.ROW_VECTORS if form == "product_few" else product.VECTORS
    whole = vectors * product.VECTOR_BYTES // dtype().itemsize
    for rows, cols, inner in itertools.product([1, 8, 13], [1, 7, whole, whole + 9], [0, 1, 30]):
        check(multiply, form, rng, dtype, rows, cols, inner)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_distances(rng, dtype):
    """Of points far off, too: they lose no digits."""
    distances = numba.njit(lambda *args: product.distances(*args))
    for rows, cols, features in itertools.product([1, 13], [7, 41], [0, 1, 3, 30]):
        shapes = (rows, features), (features, cols)
        a, b = (rng.standard_normal(shape).astype(dtype) + dtype(1000) for shape in shapes)
        out = np.full((rows, cols), np.nan, dtype)
        distances(out, a, b, dtype(1), False)
        exact = ((a[:, :, None].astype(np.longdouble) - b) ** 2).sum(axis=1)
        np.testing.assert_allclose(out, exact, rtol=20 * np.finfo(dtype).eps)


@DTYPES
def test_product_nt(rng, dtype):
    multiply = numba.njit(lambda *args: product.product_nt(*args))
    for rows, cols, inner in itertools.product([1, 2, 4, 5], [1, 3, 16, 37], [0, 1, 16, 30]):
        a, b = (np.hstack([rng.standard_normal((n, inner)), np.full((n, 3), np.nan)]).astype(dtype)[:, :inner]
                for n in (rows, cols))  # fmt: skip
        around = np.full((rows + 2, cols + 5), 7, dtype)
        out = around[1:-1, 2:-3]
        multiply(out, a, b)
        np.testing.assert_allclose(out, a @ b.T, rtol=1e-5, atol=1e-5 if dtype == np.float32 else 1e-12)
        one_by_one = np.empty((rows, cols), dtype)
        for row in range(rows):
            multiply(one_by_one[row : row + 1], a[row : row + 1], b)
        np.testing.assert_array_equal(one_by_one, out)  # to the bit: a row does not depend on the others
        out[...] = 7
        assert (around == 7).all()  # nothing is written beside it


@numba.njit
def row_dots(out, a, b):
    product.row_dots(out, a, b)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_row_dots(rng, dtype):
    for rows, cols in itertools.product([1, 8, 16, 37], [0, 1, 16, 30]):
        a, b = (np.hstack([rng.standard_normal((rows, cols)), np.full((rows, 3), np.nan)]).astype(dtype)[:, :cols]
                for _ in range(2))  # fmt: skip
        out = np.full(rows + 2, 7, dtype)
        row_dots(out[1:-1], a, b)
        atol = 1e-5 if dtype == np.float32 else 1e-12
        np.testing.assert_allclose(out, [7, *(a * b).sum(axis=1), 7], rtol=1e-5, atol=atol)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("nbytes", "rows", "vectors"), [(16, 6, 2), (32, 6, 2), (64, 8, 2)])
def test_any_vectors(rng, monkeypatch, form, nbytes, rows, vectors):
    monkeypatch.setattr(product, "VECTOR_BYTES", nbytes)
    multiply = product.product_of("_tn" in form, f"{form}_of_{nbytes}_bytes", rows, vectors)
    check(numba.njit(lambda *args: multiply(*args)), form, rng, np.float32, 13, 75, 20)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_vectors_at_addresses(rng, dtype):
    """Of any length; nothing is written beside them."""

    @numba.njit
    def both(out, x, y, factor):
        total = product.dot(address_of(x), address_of(y), x.size, x.dtype)
        product.add_multiple(address_of(out), factor, address_of(x), x.size)
        return total

    for length in (0, 1, 7, 16, 37, 130):
        x, y, out = rng.standard_normal((3, length + 1)).astype(dtype)
        before = out.copy()
        found = both(out[:-1], x[:-1], y[:-1], dtype(3))
        np.testing.assert_allclose(found, x[:-1].astype(float) @ y[:-1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(out[:-1], before[:-1] + 3 * x[:-1], rtol=1e-5, atol=1e-5)
        assert out[-1] == before[-1]


FAULTS = {
    'icmp_signed("<", lanes, self.splat(cols))': 'icmp_signed("<=", lanes, self.splat(cols))',
    "self.b.mul(index, stride)": "self.b.mul(index, self.strides[0])",
    "builder.sub(end, LONG(1))": "end",
    "builder.fmul(builder.load(total), alpha)": "builder.load(total)",
    "difference = self.b.fsub(x, y)": "difference = self.b.fadd(x, y)",
    "builder.fadd(*halves)": "builder.fsub(*halves)",
    "if len(a) == 1:\n        product_row": "if len(a) == len(a):\n        product_row",
    "cols[n : n + DOTS]": "cols[n + 1 : n + DOTS]",
    "min(col, len(b) - width)": "col",
    "with builder.if_then(add):": "with builder.if_then(builder.not_(add)):",
    "cols // (vectors * width) * (vectors * width)":
        "(cols + vectors * width - 1) // (vectors * width) * (vectors * width)",
}
