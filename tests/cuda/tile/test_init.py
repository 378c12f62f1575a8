"""What the words of the language have in common."""

from types import FunctionType

import pytest

from numbattn.cuda import tile
from tests.tools.launch import simulated_only

pytestmark = simulated_only
WORDS = [name for name in tile.__all__ if isinstance(getattr(tile, name), type | FunctionType)]


@pytest.mark.parametrize("name", WORDS)
def test_a_word_shows_what_it_does(name):
    """By an example in its own docstring, which runs as a test."""
    assert ">>> " in (getattr(tile, name).__doc__ or "")
