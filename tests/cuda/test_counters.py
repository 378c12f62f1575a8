"""Who gets which counters."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from numbattn.cuda.words.steps import MOST_COUNTERS

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
def address_of(monkeypatch):
    """address_of(stream, capturing=False, count=2) on a device of NumPy's."""

    def zeros(n, dtype):
        memory = np.zeros(n, dtype)
        return SimpleNamespace(data=SimpleNamespace(ptr=memory.ctypes.data), memory=memory)

    pool = SimpleNamespace(malloc=None)
    fake = SimpleNamespace(zeros=zeros, get_default_memory_pool=lambda: pool, cuda=SimpleNamespace(
        Stream=Stream, using_allocator=lambda malloc: nullcontext()))  # fmt: skip
    monkeypatch.setattr(counters, "cupy", fake)
    memory = counters.Counters()

    def address_of(stream, capturing=False, count=2):
        found = memory.of(stream, capturing, count)
        assert memory.first <= found <= memory.scrap - count * counters.COUNTER_BYTES
        return found

    return address_of


def test_a_stream_keeps_its_counters(address_of):
    assert address_of(16) == address_of(16, count=MOST_COUNTERS)
    assert len({address_of(stream) for stream in (16, 32, 48)}) == 3


def test_what_is_captured_has_counters_of_its_own(address_of):
    assert len({address_of(16), *(address_of(16, capturing=True) for _ in range(5))}) == 6


def test_counters_do_not_overlap(address_of):
    counts = {address_of(stream): MOST_COUNTERS for stream in (16, 32)}
    counts |= {address_of(stream, capturing=True, count=count): count for stream, count in ((16, 5), (32, 7), (16, 2))}
    starts = sorted(counts)
    ends = [start + counters.COUNTER_BYTES * counts[start] for start in starts]
    assert all(end <= start for end, start in zip(ends, starts[1:]))


def test_after_all_the_first_ones_are_used_again(address_of, monkeypatch):
    monkeypatch.setattr(counters, "CAPTURED", 10)
    first, second, third, fourth = (address_of(16, capturing=True, count=count) for count in (4, 6, 3, 8))
    assert first == third == fourth < second


FAULTS = {
    "return MOST_COUNTERS * found": "return found",
    "self.captured = first + count": "self.captured = first + 2",
    "if self.captured + count <= CAPTURED else 0": "if self.captured < CAPTURED else 0",
    "return STREAMS * MOST_COUNTERS + first": "return first",
}
