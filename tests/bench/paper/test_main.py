"""The paper's experiments run by their names, and their results say how."""

import json
import runpy
import sys

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


@pytest.mark.parametrize("options", [(), ("--help",), ("figure4", "--json", "unused.json")])
def test_without_a_name_all_are_listed(options, monkeypatch):
    said = run(monkeypatch, *options)
    names = [line.split()[0] for line in said.splitlines() if line and line[0].islower()]
    assert names == ["figure2", "figure3", "training", "long_range", "io_model"]
    assert all((BENCH / f"paper/{name}.py").exists() for name in names)
