"""Threads that call at once, for a moment: `python -m tests.tools.threads` does it for longer, and compiles."""

import math

from tests.tools.threads import bits, stress

CALLS = "few queries", "several threads", "a cache"


def test_calls_of_threads_at_once():
    assert not stress(math.inf, 3, names=CALLS, rounds=len(CALLS)).wrong


def test_a_wrong_result_is_noticed(monkeypatch):
    """In one call."""
    numbers = iter(range(1000))
    monkeypatch.setattr("tests.tools.threads.bits", lambda results: (bits(results), next(numbers) == 3))
    found = stress(math.inf, 3, names=CALLS, rounds=1)
    assert len(found.wrong) == 1
    assert "another result than at first" in found.wrong[0]
