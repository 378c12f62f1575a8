"""Tokens appended to caches on a GPU; as caches do it on NumPy arrays."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn.base.checks import DTYPES
from numbattn.cuda.caches import append as module
from tests.tools.launch import launch, mostly_simulated

FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = DTYPES
INT8, FLOAT8 = np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.fixture(autouse=True)
def in_world(world, monkeypatch):
    monkeypatch.setattr(module, "launch", launch)


def caches(rng, dtype, paged):
    """Two alike: of 3 sequences, 10 heads, 24 tokens at most, 40 features, of which v has every other one."""
    table = rng.permutation(9).astype(np.int32).reshape(3, 3) if paged else None
    lead, rows = (9, 8) if paged else (3, 24)
    of_heads = rng.uniform(0.001, 1, (2, 10)).astype(np.float32)
    for _ in range(2):
        k, v = np.zeros((lead, 10, rows, 40), dtype), np.zeros((lead, 10, rows, 40), dtype)[..., ::2]
        scales = np.zeros((2, lead, 10, rows), np.float32) if dtype == INT8 else of_heads if dtype == FLOAT8 else ()
        yield na.KVCache(k, v, np.array([3, 0, 15], np.int32), table, *scales)


def assert_equal(cache, other):
    """Bit for bit."""
    for name in ("k", "v", "lengths", "k_scale", "v_scale"):
        one, two = getattr(cache, name), getattr(other, name)
        assert (one is None) == (two is None)
        if one is not None:
            bits = f"u{one.itemsize}"
            np.testing.assert_array_equal(one.view(bits), two.view(bits), err_msg=name)


@pytest.mark.parametrize(("held", "dtype", "paged"), [
    (INT8, FLOAT16, True), (FLOAT8, BFLOAT16, True),
    *(pytest.param(*which, marks=mostly_simulated) for which in (
        (FLOAT32, FLOAT32, False), (BFLOAT16, BFLOAT16, True), (INT8, FLOAT64, True), (BFLOAT16, FLOAT64, False),
    )),
    *(pytest.param(*which, marks=pytest.mark.slow) for which in (
        (FLOAT32, FLOAT32, True), (FLOAT16, FLOAT32, True), (FLOAT32, FLOAT64, True),
        (INT8, BFLOAT16, False), (FLOAT8, FLOAT16, False), (FLOAT8, FLOAT64, False),
    )),
], ids=str)  # fmt: skip
def test_as_on_numpy_arrays(rng, held, dtype, paged):
    cache, other = caches(rng, held, paged)
    k, v = (rng.standard_normal((3, 10, 9, size)).astype(dtype) for size in (40, 20))
    other.append(k, v)
    cache._append_on_gpu(k, v, None)
    assert_equal(cache, other)


@mostly_simulated
@pytest.mark.parametrize(("paged", "dtype"), [(False, FLOAT32), (True, INT8), (False, FLOAT8)], ids=str)
def test_ragged(rng, paged, dtype):
    """Tokens before the first offset and after the last one belong to no sequence."""
    cache, other = caches(rng, dtype, paged)
    k = rng.standard_normal((10, 15, 40)).astype(FLOAT32)
    offsets = [2, 7, 7, 13]
    other.append(k, k[..., :20], offsets)
    cache._append_on_gpu(k, k[..., :20], offsets)
    assert_equal(cache, other)


@mostly_simulated
@pytest.mark.parametrize(("paged", "dtype", "offsets"), [
    (False, FLOAT32, [2, 43, 43, 46]), (True, INT8, None)
], ids=["ragged", "batch"])  # fmt: skip
def test_tokens_take_turns(rng, paged, dtype, offsets):
    """More than a cache has rows, and few."""
    cache, other = (replace(each, window=20, first=2, chunk=3) for each in caches(rng, dtype, paged))
    for count in 40, 1:
        k = rng.standard_normal((10, 47, 40) if offsets else (3, 10, count, 40)).astype(FLOAT32)
        other.append(k, k[..., :20], offsets)
        cache._append_on_gpu(k, k[..., :20], offsets)
        assert_equal(cache, other)


@mostly_simulated
@pytest.mark.parametrize("rotary", [na.Rotary(), na.Rotary(500.0, 12, True, YARN)], ids=["halves", "yarn"])
@pytest.mark.parametrize(("held", "dtype", "ragged"), [
    (INT8, FLOAT16, False), (BFLOAT16, BFLOAT16, True), (FLOAT8, FLOAT32, False), (FLOAT32, FLOAT32, True),
    (INT8, FLOAT64, True),
], ids=str)  # fmt: skip
def test_turned_keys(rng, monkeypatch, held, dtype, ragged, rotary):
    """Before they are quantised: of 8 bits a few are rounded the other way. A block has one head, or several."""
    monkeypatch.setattr(module, "WIDE", 200)
    cache, other = caches(rng, held, paged=True)
    k, offsets = rng.standard_normal((10, 15, 40) if ragged else (3, 10, 9, 40)).astype(dtype), None
    if ragged:
        offsets = [2, 7, 7, 13]
    other.append(k, k[..., :20], offsets, rotary=rotary)
    cache._append_on_gpu(k, k[..., :20], offsets, rotary)
    (got, got_v), (want, want_v) = cache._dense(), other._dense()
    np.testing.assert_array_equal(got_v, want_v)
    error = abs(got - want)
    assert (error > 1e-5).mean() < 1e-3
    assert (error <= abs(want) / 8 + abs(want).max(axis=-1, keepdims=True) / 100).all()


@pytest.mark.parametrize(("paged", "dtype"), [(False, INT8), (True, FLOAT32)], ids=str)
def test_what_there_is_no_room_for_is_not_written(rng, paged, dtype):
    cache, other = caches(rng, dtype, paged)
    if paged:
        cache.table[1, 1] = other.table[1, 1] = 9  # a page that is not there
    k = rng.standard_normal((3, 10, 12, 40)).astype(FLOAT32)
    cache._append_on_gpu(k, k[..., :20], None)
    rooms = 12, 8 if paged else 12, 9
    packed = np.concatenate([x[:, :room] for x, room in zip(k, rooms)], axis=1)
    other.append(packed, packed[..., :20], segments=np.cumsum([0, *rooms]))
    assert cache.lengths.tolist() == [15, 12, 27]
    other.lengths[...] = cache.lengths  # they grow all the same
    assert_equal(cache, other)


def written(x, dtype, of=FLOAT32):
    """Two caches of tokens (tokens, features), one written as on a GPU."""
    k = x[None, None].astype(of)
    cache, other = (na.KVCache.zeros(1, 1, len(x), x.shape[1], like=k, dtype=dtype) for _ in range(2))
    with np.errstate(all="ignore"):
        cache._append_on_gpu(k, k, None)
        other.append(k, k)
    return cache, other


def test_every_float8_is_rounded_to_the_nearest(rng):
    """What is half way between two, and next to that; too large, infinite, subnormal, NaN, 0 of either sign."""
    numbers = np.arange(127, dtype=np.uint8).view(FLOAT8).astype(FLOAT32)
    middle = (numbers[1:] + numbers[:-1]) / 2
    near = [np.nextafter(middle, FLOAT32.type(side)) for side in (-np.inf, np.inf)]
    x = np.concatenate([numbers, middle, *near, [449, 464, 1e38, np.inf, 1e-45, 1e-39, np.nan]])
    cache, other = written(np.resize(np.concatenate([x, -x]), (16, 64)), FLOAT8)
    nan = np.isnan(other.k)
    np.testing.assert_array_equal(np.isnan(cache.k), nan)
    cache.k[nan] = cache.v[nan] = other.k[nan] = other.v[nan] = 1  # of either sign
    assert_equal(cache, other)


def test_edges_of_int8():
    """Numbers half way between two, of zeros, and so small that their scale is rounded, even to 0."""
    halves = np.concatenate([[127], np.arange(-126.5, 127)])
    x = halves * np.array([[1], [0], [0.4 * 2.0**-149], [2.0**-149], [1.5 * 2.0**-149], [2.0**-130], [2.0**120]])
    assert_equal(*written(x, INT8))


def test_float64_beyond_float32():
    x = np.array([[1e300, 1e37], [-1e300, 2e38], [3.4028235e38, 1.0], [1e-300, 0]])
    assert_equal(*written(x, FLOAT8, of=FLOAT64))
    cache, other = written(x, INT8, of=FLOAT64)
    assert_equal(cache, other)
    np.testing.assert_array_equal(cache.k[0, 0], [[127, 4], [-127, 75], [127, 0], [0, 0]])
    assert np.isfinite(127 * cache.k_scale).all()


def test_what_is_not_finite_in_int8():
    """The scale says so; what is infinite, where NumPy's conversion is not defined, becomes 0."""
    x = np.ones((3, 40))
    x[0, 3], x[1, 39], x[2, :2] = np.nan, -np.inf, [np.inf, np.nan]
    cache, other = written(x, INT8)
    np.testing.assert_array_equal(cache.k_scale, other.k_scale)
    np.testing.assert_array_equal(cache.k_scale, [[[np.nan, np.inf, np.nan]]])
    assert not cache.k.any()


FAULTS = {
    "batch < ends - 1 and ": "",
    "batch if number >= first else ends": "batch",
    "batch if row < capacity else -1": "batch",
    "if position >= end - size": "if position > end - size",
    "first + (position - first) % size": "first + position % size",
    "position if position < first else row": "row",
    "batch + 1, ends - 1)]) - first": "batch + 1, ends - 1)])",
    "page if page < pages else -1": "page",
    "bitcast(row_max(bitcast(abs(X), np.uint32)), np.float32)": "row_max(abs(X))",
    "where(scale == 0, 1, scale)": "scale",
    "where(X == X, X, 0), -127)": "X, -127)",
    "X, 0), -127), 127)": "X, 0), -128), 128)",
    "save(scales[0][page, :, row], scale, head)": "save(scales[0][page, :, row], scale, 0)",
    "load(scales[0], ROWS, head)": "load(scales[0], ROWS, 0)",
    "capped(abs(X), 448)": "minimum(abs(X), 448)",
    " + (bits >> 20 & 1)": "",
    "size + 2**14": "size + 2**15",
    "size < 2**-6": "size < 2**-7",
    "normal, 0x7F)": "normal, normal)",
    ">> 24 & 0x80": ">> 31",
    "(heads + of_block - 1) // of_block": "heads // of_block",
    "minimum(part * of_block + of_block, heads)": "part * of_block + of_block",
    "range(part * of_block,": "range(part,",
    "* cosines + convert(take": "* cosines - convert(take",
    "turns[0], COLUMNS, 0)\n": "turns[1], COLUMNS, 0)\n",
    "test_float64_beyond_float32": {
        "capped_for_int8(X) if of_float64 else X": "X",
    },
}
