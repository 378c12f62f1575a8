import pytest

from tests.masks import calls
from tests.scores import test_parts


@pytest.fixture(autouse=True)
def both_worlds(world):
    """Each test of this folder runs in both, unless it is marked for one."""


@pytest.fixture
def sizes(monkeypatch):
    """Sets how many batches, heads, queries and keys the scores and masks of these tests are of, and their arrays."""

    def set_sizes(*sizes):
        for module in (test_parts, calls):
            for name, size in zip("BHMN", sizes):
                monkeypatch.setattr(module, name, size)

    return set_sizes


@pytest.fixture
def small(sizes):
    sizes(1, 2, 40, 70)
