"""What mypy says of the package and of those who call it."""

import re
from pathlib import Path

import pytest

api = pytest.importorskip("mypy.api")

HERE = Path(__file__).parent
ROOT = HERE.parent


def said(*arguments):
    """The lines that mypy prints."""
    out, error, _ = api.run([*arguments, "--config-file", str(ROOT / "pyproject.toml"), "--hide-error-context"])
    assert not error
    return [line for line in out.splitlines() if ": note:" not in line]


def test_the_package():
    assert said()[-1].startswith("Success: no issues found")


def test_what_is_right():
    assert said(str(HERE / "typing" / "right.py"))[-1].startswith("Success: no issues found")


def test_what_is_wrong():
    path = HERE / "typing" / "wrong.py"
    lines = path.read_text().splitlines()
    wanted = {number: line.partition("# E: ")[2] for number, line in enumerate(lines, 1) if "# E: " in line}
    *errors, summary = said(str(path))
    found = [re.search(r"wrong\.py:(\d+): error: .*\[([\w-]+)\]$", line).groups() for line in errors]
    assert {int(number): kind for number, kind in found} == wanted
