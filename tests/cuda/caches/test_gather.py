"""Caches as plain arrays, on a GPU; as the reference reads them."""

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn.caches.eight_bits import FLOAT8, INT8, bits_of
from numbattn.cuda.caches import gather as module
from numbattn.cuda.caches.gather import gather
from tests.tools.launch import launch, mostly_simulated

FLOAT16, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def in_world(world, monkeypatch):
    monkeypatch.setattr(module, "launch", launch)


@pytest.mark.parametrize(("dtype", "held", "page_size"), [
    (BFLOAT16, INT8, 10), (np.float32, FLOAT8, None),
    *(pytest.param(*which, marks=mostly_simulated) for which in (
        (np.float32, np.float32, None), (BFLOAT16, BFLOAT16, 10), (np.float64, INT8, 10), (np.float32, BFLOAT16, 10),
    )),
    *(pytest.param(*which, marks=pytest.mark.slow) for which in (
        (np.float32, np.float32, 10), (BFLOAT16, BFLOAT16, None), (np.float32, INT8, None), (np.float32, INT8, 10),
        (BFLOAT16, INT8, None), (np.float32, FLOAT8, 10), (np.float64, FLOAT8, None), (np.float32, FLOAT16, None),
    )),
])  # fmt: skip
def test_as_the_reference_reads_them(rng, dtype, held, page_size):
    """Nothing is read or written beyond lengths, and nothing of pages in unused slots."""
    cache = na.KVCache.zeros(3, 2, 70, 24, like=np.zeros(0, dtype), head_dim_v=40, dtype=held, page_size=page_size)
    if held == FLOAT8:
        cache.k_scale[...], cache.v_scale[...] = rng.uniform(0.5, 2, (2, 2))
    new = rng.standard_normal((2, 110, 40)).astype(np.float32 if held != BFLOAT16 else held)
    cache.append(new[..., :24], new, segments=np.array([0, 37, 37, 107]))
    wanted = cache._dense()
    if page_size:
        cache.table[0, -(-37 // page_size) :] = 2147480000
    for x, of, scale, size in zip(wanted, (cache.k, cache.v), (cache.k_scale, cache.v_scale), (24, 40)):
        found = np.full((3, 2, cache.capacity, size), 99, dtype)
        gather(found, bits_of(of), cache.lengths, cache.table, scale)
        for b, length in enumerate(cache.lengths):
            got, want = found[b, :, :length].astype(float), x[b, :, :length].astype(dtype).astype(float)
            np.testing.assert_allclose(got, want, rtol=1e-15 if dtype == np.float64 else 1e-7)
            assert (found[b, :, length:] == 99).all()


def test_every_number_of_float8():
    cache = na.KVCache(*(np.arange(256, dtype=np.uint8).reshape(1, 1, 1, 256).view(FLOAT8) for _ in "kv"),
                       np.ones(1, np.int32))  # fmt: skip
    found = np.zeros((1, 1, 1, 256), np.float32)
    gather(found, bits_of(cache.k), cache.lengths, None, cache.k_scale)
    np.testing.assert_array_equal(found[0, 0, 0], cache.k[0, 0, 0].astype(np.float32))


FAULTS = {
    "np.float64 if dense.dtype == np.float64 else np.float32": "np.float32",
}
