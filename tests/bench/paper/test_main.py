"""The paper's experiments run by their names, and their results say how."""

import json
import re
import runpy
import sys
from importlib import import_module

import pytest

from ..conftest import BENCH


def run(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", [str(BENCH / "paper"), *options])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(BENCH / "paper"), run_name="__main__")
    return end.value.code


def test_an_experiment_by_its_name(tmp_path, monkeypatch):
    options = "io_model", "--batch", "1", "--seqlen", "512"
    assert run(monkeypatch, *options, "--json", str(tmp_path / "io.json")) is None
    assert json.loads((tmp_path / "io.json").read_text())["command"] == f"python bench/paper {' '.join(options)}"


def test_help_describes_every_experiment(monkeypatch, capsys):
    assert run(monkeypatch, "--help") == 0
    described = re.findall(r"^(\w+)  +\w", capsys.readouterr().out, re.M)
    assert described == ["figure2", "figure3", "training", "long_range", "io_model"]
    assert all(hasattr(import_module(f"paper.{name}"), "main") for name in described)


def test_other_names_are_refused(monkeypatch, capsys):
    assert run(monkeypatch, "figure4", "--json", "unused.json") == 2
    assert "invalid choice: 'figure4'" in capsys.readouterr().err
