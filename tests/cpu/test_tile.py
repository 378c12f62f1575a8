import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numbattn as na
from numbattn.cpu import arguments, tile
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
def transposed(out, x, factor):
    tile.transpose(out, x, factor)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_transpose(rng, dtype):
    x, out = rng.standard_normal((5, 3)).astype(dtype), np.zeros((3, 5), dtype)
    transposed(out, x, dtype(2))
    np.testing.assert_array_equal(out, 2 * x.T)


@numba.njit
def sight_from(band, m0, m_end):
    return tile.keys_in_sight(band, m0, m_end)


@numba.njit
def seen_of_band(band, m0, n0, S):
    tile.hide_outside(S, band, m0, n0)


BAND = st.tuples(st.integers(-12, 12), st.integers(-12, 12), st.integers(0, 12), st.integers(0, 12))


@settings(max_examples=300, deadline=None)
@given(BAND, st.integers(0, 11), st.integers(1, 6), st.integers(0, 11), st.integers(1, 6))
def test_bands(band, m0, queries, n0, keys):
    lo, hi, band_queries, band_keys = band
    i, j = np.arange(m0, m0 + queries), np.arange(n0, n0 + keys)[:, None]

    def sees(i, j):
        return (i + lo <= j) & (j <= i + hi) & (i < band_queries) & (j < band_keys)

    S = np.zeros((keys, queries), np.float32)
    seen_of_band(band, m0, n0, S)
    np.testing.assert_array_equal(S == 0, sees(i, j))
    assert np.isneginf(S[S != 0]).all()
    n_first, n_end = sight_from(band, m0, m0 + queries)
    everything = np.arange(40)
    for seen in everything[sees(i[:, None], everything).any(axis=0)]:
        assert n_first <= seen < n_end
    assert n_end <= band_keys


@numba.njit
def state_and_tile(sight, m0, m_end, n0, n_end, S):
    tile.hide_cells(S, sight, 0, 0, m0, n0)
    return tile.state(sight, 0, 0, m0, m_end, n0, n_end)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 20), st.integers(1, 9), st.integers(0, 20), st.integers(1, 9), st.data())
def test_grids(m0, queries, n0, keys, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    share = data.draw(st.sampled_from([0, 0.05, 0.5, 0.95, 1]))
    size = data.draw(st.tuples(st.integers(1, 8), st.integers(1, 8)))
    masks = [na.Dense(rng.random((30, 30)) < share), na.Bits.pack(rng.random((30, 30)) < share),
             na.BlockSparse(rng.random((-(-30 // size[0]), -(-30 // size[1]))) < share, size)]  # fmt: skip
    mask = All(data.draw(st.lists(st.sampled_from(masks), max_size=3)))
    problem, inputs = describe(*np.zeros((3, 30, 4)), mask=mask)
    sight, alive = arguments.sight_of(problem, inputs.mask)
    S = np.zeros((keys, queries), np.float32)
    state = state_and_tile(sight, m0, m0 + queries, n0, n0 + keys, S)
    visible = np.broadcast_to(mask.dense(30, 30), (30, 30))[m0 : m0 + queries, n0 : n0 + keys].T
    np.testing.assert_array_equal(S == 0, visible)
    if state == tile.EMPTY:
        assert not visible.any()
    if state == tile.FULL:
        assert visible.all()
    if share == 0 and mask._parts:
        assert state == tile.EMPTY
    if share == 1 and not any(isinstance(part, na.Bits) for part in mask._parts):
        assert state == tile.FULL


@numba.njit
def draw(kept, words, drops, matrix, m0, n0):
    tile.draw(kept, words, drops, matrix, m0, n0)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 3), st.integers(1, 40), st.integers(0, 3), st.integers(1, 40), st.integers(0, 5))
def test_draw(m_block, queries, n_block, keys, matrix):
    dropout = na.Dropout(0.4, seed=2**40 + 1, offset=6)
    drops, scale = arguments.drops_of(dropout)
    m0, n0 = 16 * m_block, 16 * n_block
    kept = np.full((keys, queries), 9, np.uint8)
    draw(kept, np.empty(96, np.uint64), drops, matrix, m0, n0)
    want = na.dropout_mask(dropout, (6, 100, 100))[matrix, m0 : m0 + queries, n0 : n0 + keys].T
    np.testing.assert_array_equal(kept, want)
    assert scale == dropout.scale
