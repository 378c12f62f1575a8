"""What mypy says of the package and of those who call it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

HERE = Path(__file__).parent
ROOT = HERE.parent


def said(*arguments):
    """The lines that mypy prints, in a process of its own: it takes 1 GB."""
    command = sys.executable, "-m", "mypy", *arguments, "--hide-error-context"  # as pyproject.toml says
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not done.stderr
    return [line for line in done.stdout.splitlines() if ": note:" not in line]


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
