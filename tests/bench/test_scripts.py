"""A smoke test for each script: it takes its command. What it measures, it checks itself.

`pytest -m slow` runs what can run without a GPU, at its smallest size.
"""

import json
import runpy
import shlex
import subprocess
import sys

import pytest
import report

from ..conftest import no_gpu
from .conftest import BENCH

HELPED = ["conformance.py", "rows.py", "paper io_model"]  # of which the page has no pictures


def run(command, *options, monkeypatch):
    script, *given = shlex.split(command)
    monkeypatch.setattr(sys, "argv", [script, *given, *options])
    runpy.run_path(str(BENCH / script), run_name="__main__")


@pytest.mark.skipif(not no_gpu(), reason="it would run for minutes")
@pytest.mark.parametrize("name", [name for name, run in report.RUNS.items() if run.small is None])
def test_on_a_gpu(name, monkeypatch):
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        run(report.RUNS[name].command, "--json", "unused.json", monkeypatch=monkeypatch)


@pytest.mark.parametrize("command", [*HELPED, *(run.command for run in report.RUNS.values() if run.small is not None)])
def test_help(command, monkeypatch):
    with pytest.raises(SystemExit, match=r"^0$"):
        run(command, "--help", monkeypatch=monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, run in report.RUNS.items() if run.small is not None])
def test_the_smallest_size_is_measured_and_drawn(name, tmp_path):
    path = tmp_path / f"{name}.json"
    script, *options = shlex.split(report.RUNS[name].small)
    subprocess.run([sys.executable, BENCH / script, *options, "--json", path], check=True, timeout=600)
    text, figures = report.page({name: json.loads(path.read_text())})
    assert f"results/{name}.json" in text
    assert figures
