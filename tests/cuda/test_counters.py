"""Who gets which pair of counters."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

counters = pytest.importorskip("numbattn.cuda.counters")


class Stream:
    def __init__(self, ptr=0, non_blocking=True):
        self.ptr = ptr

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def pair_of(monkeypatch):
    """pair_of(stream, capturing=False) of a device of NumPy's."""

    def zeros(n, dtype):
        memory = np.zeros(n, dtype)
        return SimpleNamespace(data=SimpleNamespace(ptr=memory.ctypes.data), memory=memory)

    pool = SimpleNamespace(malloc=None)
    fake = SimpleNamespace(zeros=zeros, get_default_memory_pool=lambda: pool, cuda=SimpleNamespace(
        Stream=Stream, using_allocator=lambda malloc: nullcontext()))  # fmt: skip
    monkeypatch.setattr(counters, "cupy", fake)
    memory = counters.Counters()

    def pair_of(stream, capturing=False):
        found = memory.of(stream, capturing)
        assert memory.first <= found < memory.scrap
        return found

    return pair_of


def test_a_stream_keeps_its_pair(pair_of):
    assert pair_of(16) == pair_of(16)
    assert len({pair_of(stream) for stream in (16, 32, 48)}) == 3


def test_what_is_captured_has_a_pair_of_its_own(pair_of):
    assert len({pair_of(16), *(pair_of(16, capturing=True) for _ in range(5))}) == 6


def test_pairs_do_not_overlap(pair_of):
    found = sorted([pair_of(16), pair_of(32), pair_of(16, capturing=True), pair_of(32, capturing=True)])
    assert np.diff(found).min() >= counters.PAIR_BYTES
    assert all(address % counters.PAIR_BYTES == 0 for address in found)
