"""The page of measurements says what the stored results say; nothing that fails replaces a result."""

import json
import re
import signal
import subprocess
from pathlib import Path

import common
import pytest
import report

from .conftest import BENCH

README = BENCH.parent / "README.md"


def test_the_page_is_up_to_date():
    results = report.load(BENCH)
    text, figures = report.page(results)
    assert (BENCH / "README.md").read_text() == text, "python bench/report.py"
    assert {*figures} == {f"plots/{file.name}" for file in BENCH.glob("plots/*.png")}
    assert report.filled(README.read_text(), results) == README.read_text()
    assert {*results} == {file.stem for file in BENCH.glob("results/*.json")}


def test_what_has_no_results_is_left_out(tmp_path):
    text, figures = report.page({"cpu": report.load(BENCH)["cpu"]})
    assert list(figures) == ["plots/cpu.png"]
    command = report.RUNS["speed"].command
    assert f"- speed: `python bench/{command} --json bench/results/speed.json`" in text
    assert "- cpu: " not in text
    with pytest.raises(SystemExit, match=r"There are no results in .*--run"):
        report.write(tmp_path, readme=None)


def test_what_runs_where(monkeypatch, capsys, tmp_path):
    """Whole commands; small ones if they are asked for, or if GPUs are missing. What needs several GPUs begins."""
    ran = []

    class Recorded:
        def __init__(self, command, env, **output):
            ran.append((f"{command[1].stem}{command[3]}", env.get("CUDA_VISIBLE_DEVICES")))
            self.returncode = command[1].stem == "c"

        def poll(self):
            return self.returncode

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(report, "RUNS", {"a": report.Run("a.py --n 9"), "c": report.Run("c.py --n 9", "c.py --n 1", 0),
                                         "d": report.Run("d.py --n 9", "d.py --n 1", gpus=2)})  # fmt: skip
    monkeypatch.setattr(report.subprocess, "Popen", Recorded)
    monkeypatch.setattr(report, "POLL", 0)
    for small, gpus, expected in (
        (False, ["3", "5"], [("d9", "3,5"), ("a9", "3"), ("c9", None)]), (True, [], [("d1", None), ("c1", None)]),
        (False, ["3"], [("d1", None), ("a9", None), ("c9", None)]),
    ):  # fmt: skip
        monkeypatch.setattr(report, "gpus_here", lambda gpus=gpus: gpus)
        assert report.run(report.RUNS, small, tmp_path) == 1  # which failed
        assert ran == expected
        ran.clear()
    assert "a: left out, it needs a GPU" in capsys.readouterr().out


STUB = """
import json, os, signal, subprocess, sys, time
of, part = sys.argv[1], sys.argv[3]
if of == "late":
    time.sleep(1000)
sleeper = subprocess.Popen(["sleep", "1000"]).pid if of == "stuck" else None
with open(part, "w") as file:
    json.dump({"sleeper": sleeper}, file)
if of == "stuck":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(1000)
sys.exit(of == "bad")
"""


def test_only_whole_results_replace_others(monkeypatch, capsys, tmp_path):
    """Results survive commands that fail, take too long, or are interrupted; none of them, or of theirs, goes on."""
    (tmp_path / "stub.py").write_text(STUB)
    (tmp_path / "results").mkdir()
    runs = {name: report.Run(f"stub.py {name}") for name in ("good", "bad", "late", "stuck")}
    monkeypatch.setattr(report, "RUNS", runs)
    monkeypatch.setattr(report, "BENCH", tmp_path)
    monkeypatch.setattr(report, "gpus_here", lambda: ["0", "1"])
    monkeypatch.setattr(report, "GRACE", 0.05)
    files = {name: tmp_path / f"results/{name}.json" for name in runs}
    for file in files.values():
        file.write_text("{}")
    assert report.run(["late"], False, tmp_path, minutes=0) == 1
    assert report.run(["good", "bad"], False, tmp_path) == 1
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            report.run(["stuck"], False, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [name for name, file in files.items() if file.read_text() == "{}"] == ["bad", "late", "stuck"]
    sleeper = json.loads((tmp_path / "results/stuck.part.json").read_text())["sleeper"]
    assert not running(sleeper)
    said = capsys.readouterr().out
    assert re.search(r"bad: failed after \d+ s; what it has measured is in bad.part.json", said)
    assert re.search(r"good: done after \d+ s\n", said)


def running(process):
    """Whether a process does more than wait to be buried."""
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_results_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "x.json"
    common.save(file, {"records": [1]})
    before = file.read_text()

    def half(path, text):
        with open(path, "w") as written:
            written.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        common.save(file, {"records": [2]})
    assert file.read_text() == before


def test_the_commit_is_gits(monkeypatch):
    monkeypatch.delenv("NUMBATTN_COMMIT", raising=False)
    said = {"rev-parse": "0123456789ab\n", "diff": ""}
    monkeypatch.setattr(common, "_git", lambda what, *_: subprocess.CompletedProcess([], 0, said[what]))
    assert common.commit() == "0123456789ab"
    said["diff"] = "numbattn/api.py\n"
    assert common.commit() == "0123456789ab+"
