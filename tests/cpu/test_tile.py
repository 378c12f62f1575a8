import itertools

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numbattn as na
from numbattn.cpu import launch, tile
from numbattn.masks import All
from numbattn.problem import describe


@numba.njit
def exp2_of(x):
    return np.array([tile.exp2(value) for value in x])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp2_is_right_to_the_last_bit_or_so(rng, dtype):
    x = np.concatenate([-rng.random(10000) * 130, rng.random(1000) * 5, np.arange(-126, 10)]).astype(dtype)
    x = x[x >= np.finfo(dtype).minexp]
    got, want = exp2_of(x), np.exp2(x.astype(np.longdouble))
    assert got.dtype == dtype
    assert np.abs((got - want) / want).max() <= np.finfo(dtype).eps
    whole = np.arange(-126, 10).astype(dtype)
    np.testing.assert_array_equal(exp2_of(whole), np.exp2(whole))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp2_at_the_ends(dtype):
    x = np.array([-np.inf, np.finfo(dtype).min, -1e5, -0.0, 0, np.nan], dtype)
    np.testing.assert_array_equal(exp2_of(x), np.array([0, 0, 0, 1, 1, np.nan], dtype))


@numba.njit
def products(form, out, a, b, alpha, beta):
    if form == 0:
        tile.product(out, a, b, alpha, beta)
    elif form == 1:
        tile.product_nt(out, a, b, alpha, beta)
    else:
        tile.product_tn(out, a, b, alpha, beta)


@pytest.mark.parametrize("form", range(3))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sizes", list(itertools.product([1, 5], [1, 7], [0, 1, 3])))
def test_products(rng, form, dtype, sizes):
    rows, cols, inner = sizes
    a, b = rng.standard_normal((rows, inner)), rng.standard_normal((inner, cols))
    stored = [a.T if form == 2 else a, b.T if form == 1 else b]
    stored = [np.hstack([x, np.full((len(x), 2), np.nan)]).astype(dtype)[:, : x.shape[1]] for x in stored]  # rows apart
    out = np.ones((rows, cols), dtype)
    products(form, out, *stored, 2.0, 3.0)
    np.testing.assert_allclose(out, 2 * a @ b + 3, rtol=1e-5)
    out[:] = np.nan
    products(form, out, *stored, 1.0, 0.0)      # beta = 0 forgets what was there
    np.testing.assert_allclose(out, a @ b, rtol=1e-5, atol=1e-6)


@numba.njit
def sights(band, i0, i1, j0, j1):
    return tile.keys_in_sight(band, i0, i1), tile.queries_in_sight(band, j0, j1)


@numba.njit
def seen_of_band(band, i0, j0, S):
    tile.hide_outside(S, band, i0, j0)


BAND = st.tuples(st.integers(-12, 12), st.integers(-12, 12), st.integers(0, 12), st.integers(0, 12))


@settings(max_examples=300, deadline=None)
@given(BAND, st.integers(0, 11), st.integers(1, 6), st.integers(0, 11), st.integers(1, 6))
def test_bands(band, i0, queries, j0, keys):
    lo, hi, band_queries, band_keys = band
    i, j = np.arange(i0, i0 + queries), np.arange(j0, j0 + keys)[:, None]

    def sees(i, j):
        return (i + lo <= j) & (j <= i + hi) & (i < band_queries) & (j < band_keys)

    S = np.zeros((keys, queries), np.float32)
    seen_of_band(np.array(band), i0, j0, S)
    np.testing.assert_array_equal(S == 0, sees(i, j))
    assert np.isneginf(S[S != 0]).all()
    (n_first, n_end), (m_first, m_end) = sights(np.array(band), i0, i0 + queries, j0, j0 + keys)
    everything = np.arange(40)
    for j_seen in everything[sees(i[:, None], everything).any(axis=0)]:
        assert n_first <= j_seen < n_end
    for i_seen in everything[sees(everything, j).any(axis=0)]:
        assert m_first <= i_seen < m_end
    assert n_end <= band_keys
    assert m_end <= band_queries


@numba.njit
def state_and_tile(see, i0, i1, j0, j1, S):
    tile.hide_cells(S, see, 0, 0, i0, j0)
    return tile.state(see, 0, 0, i0, i1, j0, j1)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 20), st.integers(1, 9), st.integers(0, 20), st.integers(1, 9), st.data())
def test_grids(i0, queries, j0, keys, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    share = data.draw(st.sampled_from([0, 0.05, 0.5, 0.95, 1]))
    size = data.draw(st.tuples(st.integers(1, 8), st.integers(1, 8)))
    masks = [na.Dense(rng.random((30, 30)) < share), na.Bits.pack(rng.random((30, 30)) < share),
             na.BlockSparse(rng.random((-(-30 // size[0]), -(-30 // size[1]))) < share, size)]  # fmt: skip
    mask = All(data.draw(st.lists(st.sampled_from(masks), max_size=3)))
    problem, _ = describe(*np.zeros((3, 30, 4)))
    see, alive = launch.visibility_of(problem, mask)
    S = np.zeros((keys, queries), np.float32)
    state = state_and_tile(see, i0, i0 + queries, j0, j0 + keys, S)
    visible = np.broadcast_to(mask.dense(30, 30), (30, 30))[i0 : i0 + queries, j0 : j0 + keys].T
    np.testing.assert_array_equal(S == 0, visible)
    if state == tile.NONE:
        assert not visible.any()
    if state == tile.EVERY:
        assert visible.all()
    if share == 0 and mask.parts:
        assert state == tile.NONE
    if share == 1 and not any(isinstance(part, na.Bits) for part in mask.parts):
        assert state == tile.EVERY


@numba.njit
def draw(kept, drops, matrix, i0, j0):
    tile.draw(kept, drops, matrix, i0, j0)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 3), st.integers(1, 40), st.integers(0, 3), st.integers(1, 40), st.integers(0, 5))
def test_draw(m_block, queries, n_block, keys, matrix):
    dropout = na.Dropout(0.4, seed=2**40 + 1, offset=6)
    drops, scale = launch.drops_of(dropout)
    i0, j0 = 16 * m_block, 16 * n_block
    kept = np.full((keys, queries), 9, np.uint8)
    draw(kept, drops, matrix, i0, j0)
    want = na.dropout_mask(dropout, (6, 100, 100))[matrix, i0 : i0 + queries, j0 : j0 + keys].T
    np.testing.assert_array_equal(kept, want)
    assert scale == dropout.scale
