import pytest

from ... import test_scores as scores


@pytest.fixture(autouse=True)
def both_worlds(world):
    """Each test of this folder runs in both, unless it is marked for one."""


@pytest.fixture
def sizes(monkeypatch):
    """Sets how many batches, heads, queries and keys there are in PARTS, and in the arrays beside them."""

    def set_sizes(*sizes):
        for name, size in zip("BHMN", sizes):
            monkeypatch.setattr(scores, name, size)

    return set_sizes


@pytest.fixture
def small(sizes):
    sizes(1, 2, 40, 70)
