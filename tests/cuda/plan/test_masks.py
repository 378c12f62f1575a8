"""Masks lowered: what kernels take of them is tested by tests/cuda/test_passes.py; here that nothing of it is kept."""

import gc

import numpy as np
import pytest

import numbattn as na
from numbattn.caches.masked import masked
from numbattn.cuda.plan.masks import intervals_and_arrays

TREE = na.Bits.tree([-1, 0, 0, 1])


@pytest.mark.parametrize("mask", [
    na.Tail(TREE) & na.Window(9, 0), na.Segments([0, 2, 4]) & (na.Window(1, 0) | na.First(1)),
    na.Intervals(np.zeros(4, int), np.ones(4, int)) | na.Window(1, 1),
], ids=["tree", "segments", "intervals"])  # fmt: skip
def test_arrays_are_freed_at_once(mask):
    """In a capture of a CUDA graph memory that is freed later is memory that the graph has not freed: it could be
    launched once."""
    cache = na.KVCache.zeros(1, 1, 20, 8, like=np.zeros(0))
    cache.append(*np.zeros((2, 1, 1, 10, 8)))
    fitted = masked(cache, cache.lengths, mask, None, 4) if mask._segments is None else mask
    intervals_and_arrays(fitted, 4, 20)
    gc.freeze()  # what there is already is looked through no more: in a long run that would take seconds
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        _, found, arrays = intervals_and_arrays(fitted, 4, 20)
        assert len(found) > 0
        assert len(arrays) > 0
        del found, arrays
        gc.collect()
        assert not [x for x in gc.garbage if str(getattr(x, "__module__", "")).startswith("numbattn")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
