"""The site has a page for every public name."""

import re
from pathlib import Path

import pytest

import numbattn as na

REFERENCE = Path(__file__).parents[2] / "examples" / "site" / "api.md"


@pytest.mark.parametrize("module", [na, na.points, na.distributed, na.sparse])
def test_public_names_have_pages(module):
    text = REFERENCE.read_text()
    listed = re.findall(rf"currentmodule:: {re.escape(module.__name__)}\n(.*?)```", text, re.S)
    names = re.findall(r"(?m)^   ([A-Za-z]\w*)$", "".join(listed))
    assert sorted(names) == sorted(set(module.__all__) - {"__version__"})
