"""Tokens appended to caches on a GPU; as caches do it on NumPy arrays."""

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda import append as module
from numbattn.cuda.append import append
from tests.tools.launch import launch

DTYPES = [np.dtype(np.float32), na.problem.DTYPES[1]]


@pytest.fixture(autouse=True)
def in_world(world, monkeypatch):
    monkeypatch.setattr(module, "launch", launch)


def caches(rng, dtype, paged):
    """Two alike: of 3 sequences, 10 heads, 24 tokens at most, 40 features, of which v has every other one."""
    table = rng.permutation(9).astype(np.int32).reshape(3, 3) if paged else None
    lead, rows = (9, 8) if paged else (3, 24)
    for _ in range(2):
        k, v = np.zeros((lead, 10, rows, 40), dtype), np.zeros((lead, 10, rows, 40), dtype)[..., ::2]
        yield na.KVCache(k, v, np.array([3, 0, 15], np.int32), table)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_on_numpy_arrays(rng, dtype, paged):
    cache, other = caches(rng, dtype, paged)
    k, v = (rng.standard_normal((3, 10, 9, size)).astype(dtype) for size in (40, 20))
    other.append(k, v)
    for held, new in ((cache.k, k), (cache.v, v)):
        append(held, new, cache.lengths, cache.table)
    np.testing.assert_array_equal(cache.k, other.k)
    np.testing.assert_array_equal(cache.v, other.v)


@pytest.mark.parametrize("paged", [False, True])
def test_ragged(rng, paged):
    """Tokens before the first offset and behind the last one belong to no sequence."""
    cache, other = caches(rng, DTYPES[0], paged)
    k = rng.standard_normal((10, 15, 40)).astype(DTYPES[0])
    offsets = np.array([2, 7, 7, 13], np.int32)
    other.append(k, k[..., :20], segments=offsets)
    append(cache.k, k, cache.lengths, cache.table, offsets)
    np.testing.assert_array_equal(cache.k, other.k)


@pytest.mark.parametrize("paged", [False, True])
def test_what_there_is_no_room_for_is_not_written(rng, paged):
    cache, other = caches(rng, DTYPES[0], paged)
    if paged:
        cache.table[1, 1] = other.table[1, 1] = 9  # a page that is not there
    k = rng.standard_normal((3, 10, 12, 40)).astype(DTYPES[0])
    append(cache.k, k, cache.lengths, cache.table)
    rooms = 12, 8 if paged else 12, 9
    packed = np.concatenate([x[:, :room] for x, room in zip(k, rooms)], axis=1)
    other.append(packed, packed[..., :20], segments=np.cumsum([0, *rooms]))
    np.testing.assert_array_equal(cache.k, other.k)
