import pytest


@pytest.fixture(autouse=True)
def both_worlds(world):
    """Each test of this folder runs in both, unless it is marked for one."""
