"""The page of measurements: it says what the results say, and draws all of them."""

import json
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import common
import pytest
import report
from paper import answers
from pictures import basics
from PIL import Image

from ..conftest import no_gpu
from . import synthetic
from .conftest import BENCH

README = BENCH.parent / "README.md"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with results of all runs, and what is made from them."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "results").mkdir()
    for name in report.RUNS:
        (folder / f"results/{name}.json").write_text(json.dumps(synthetic.results(name)))
    report.write(folder, readme=None)
    return folder


# ---------------------------------------------------------------------------------------------------------------- page
def test_every_result_has_a_picture_and_sentences(made):
    text = (made / "README.md").read_text()
    for title, name, draw in report.SECTIONS:
        path = made / f"plots/{draw.__name__}.png"
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            assert 1200 < picture.width < 1800
        assert path.stat().st_size < 100_000
        said = text.partition(f"## {title}\n\n![")[2].partition("\n\n## ")[0]
        assert f"](plots/{draw.__name__}.png)\n\n" in said
        assert len(said.split()) > 20
        assert "nan" not in said
        assert f"| [{name}](results/{name}.json) " in text
    assert {section.results for section in report.SECTIONS} == set(report.RUNS)
    assert "python bench/speed.py" in text
    assert "0123456789ab" in text
    assert "1. NVIDIA H200, driver 580.1, made up (none), 2 cores, python 3.0, numpy 2.0\n2. made up" in text
    assert "Not measured" not in text


def test_numbers_are_those_of_the_results(made):
    text = (made / "README.md").read_text()
    record = synthetic.speed()["speed"][1]
    rates = [f"{record['tflops'][name]:.0f}" for name in ("numbattn", "fa4", "cudnn", "flash")]
    row = next(line for line in text.splitlines() if line.startswith("| backward, head_dim 64 "))
    assert row.split("|")[2].strip() == " / ".join(rates)
    ratios = [over for x in synthetic.speed()["speed"] if (over := basics.over_best(x["tflops"])[0])]
    mean = f"{basics.geometric_mean(ratios):.2f} times as fast as the best of 3 others, the geometric mean of 16 cells"
    assert f"![{mean}; slower in 4](plots/speed.png)" in text


def test_what_has_no_results_is_left_out():
    text, figures = report.page({"cpu": synthetic.results("cpu")})
    assert list(figures) == ["plots/cpu.png"]
    command = report.RUNS["speed"].command
    assert f"- speed: `python bench/{command} --json bench/results/speed.json`" in text
    assert "- cpu: " not in text


def test_without_any_results_nothing_is_written(tmp_path):
    with pytest.raises(SystemExit, match=r"There are no results in .*--run"):
        report.write(tmp_path, readme=None)
    assert not list(tmp_path.iterdir())


def test_a_peer_that_does_not_run_is_left_out():
    results = synthetic.results("speed")
    for record in results["speed"]:
        record["tflops"] = {"numbattn": 100.0}
    del results["speed"][0]["tflops"]["numbattn"]
    text, _ = report.page({"speed": results})
    assert "cuDNN" not in text
    assert "![TFLOP/s of numbattn](plots/speed.png)" in text
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| forward, head_dim 64")]
    assert [[cell.strip() for cell in row[1:]] for row in rows] == [["-", "100"], ["100", "100"]]


def test_small_attentions_against_a_copy():
    """The limit is a line, and numbattn's share of it is in the title; parts and peers may be missing."""
    results = synthetic.results("small")
    figure, text = report.small(results)
    assert all(any(line.get_label() == "a copy of the same bytes" for line in axis.lines) for axis in figure.axes)
    shares = [100 * cell["seconds"]["copy"] / cell["seconds"]["numbattn"] for cell in results["cells"]
              if (cell["pass"], cell["bias"]) == ("forward", "none")]  # fmt: skip
    assert f"forward {basics.geometric_mean(shares):.0f}%" in figure.get_suptitle()
    assert "takes 1.05 times as long as without" in text
    assert "Lengths 1.10; Bits 1.20; Segments 1.25." in text
    for cell in results["cells"]:
        cell["seconds"] = {name: cell["seconds"][name] for name in ("numbattn", "copy")}
    results["cells"].append({**results["cells"][0], "seconds": {"copy": 1.0}})
    figure, text = report.small({"cells": results["cells"]})
    assert "microseconds: copy / numbattn (batch x seqlen, head_dim)" in text
    assert not any(word in text for word in ("nan", "fastest other", "batches,", "plain call"))


def test_pairs_of_points():
    """Ratios, rates and errors are those of the records; a part may be missing."""
    results = synthetic.results("kernels")
    figure, text = report.kernels(results)
    assert figure.get_suptitle() == "Sums over pairs of points: 4.0 times as fast as KeOps"
    assert ("Nearest 1 of 1000 to 4096 for 1000000 points, 128 features, float16: speed over that of others: standard "
            "formula 10.0; flash-kmeans 2.0; numbattn's products run at 256 TFLOP/s, 0.26 of the peak.") in text
    assert "features, bfloat16: speed over that of others: standard formula 4.0; KeOps 3.0; flash-sinkhorn 3.0" in text
    assert "moved by 1000: numbattn 2.0e-07, KeOps 3.0e-07, standard formula no digit right" in text
    figure, text = report.kernels({"sinkhorn": results["sinkhorn"]})
    assert figure.get_suptitle() == "Sums over pairs of points"
    assert [axis.get_visible() for axis in figure.axes] == [False] * 4 + [True] + [False] * 3
    assert "float32: speed over that of others: standard formula 4.0" in text


def test_sparse_products_are_faster_up_to_a_share():
    text = report.sparse_layers(synthetic.results("sparse_layers"))[1]
    assert "bfloat16, blocks of 64, 4.0 at 10% of them, faster up to 10%; bfloat16, blocks of 128, 8.0 at 10%" in text


def test_tasks_are_learned_if_more_than_the_most_frequent_answer_is_right():
    """By more than chance, in 1024 samples."""
    results = synthetic.results("long_range")
    assert "in this time" not in report.long_range(results)[1]
    for record in results["records"]:
        if record["part"] == "tasks" and record["task"] == "listops":
            record["curve"][-1][2] = record["guess"] + 0.01
    assert re.findall(r"(\w+)%; nothing is learned in this time", report.long_range(results)[1]) == ["0"]
    assert answers.task_accuracies(results).startswith("ListOps 14.0 / 14.0%, not learned, Pathfinder 69.9")


@pytest.mark.skipif(not report.load(BENCH), reason="there are no results")
def test_the_page_is_up_to_date():
    results = report.load(BENCH)
    text, figures = report.page(results)
    assert (BENCH / "README.md").read_text() == text, "python bench/report.py"
    assert all((BENCH / file).exists() for file in figures)
    assert report.filled(README.read_text(), results) == README.read_text()


def test_numbers_of_the_readme_are_filled_in():
    start, end = next(iter(report.FILLED)), report.END
    speed = synthetic.results("speed", head_dims=(128,), seqlens=(1024, 4096))
    results = {"speed": speed, "small": synthetic.results("small")}
    filled = report.filled(f"Before\n{start}\nold\n{end}\nafter\n", results)
    before, head, *_, last, after = filled.splitlines()
    assert [before, head, last, after] == ["Before", start, end, "after"]
    assert "old" not in filled
    assert filled.count("| forward, head_dim 128") == 2
    assert "| TFLOP/s on an NVIDIA H200: numbattn / FlashAttention 4 / " in filled
    shares = report.small(results["small"])[0].get_suptitle()
    assert re.findall(r"\d+%", filled) == re.findall(r"\d+%", shares)
    assert report.filled(filled, results) == filled
    assert report.filled("no numbers", results) == "no numbers"
    assert report.filled(filled, {"speed": speed}) == filled


def test_libraries_are_told_apart_without_colours():
    styles = {label: style for label, *style in basics.STYLES.values()}
    for i in (1, 2):    # marker, hatch
        found = [style[i] for label, style in styles.items() if label != "torch"]   # of CPUs, where that has one kernel
        assert len(set(found)) == len(found)


# ---------------------------------------------------------------------------------------------------------------- runs
@pytest.mark.skipif(not no_gpu(), reason="it would run for minutes")
@pytest.mark.parametrize("name", [name for name, run in report.RUNS.items() if run.small is None])
def test_commands_are_understood(name, monkeypatch):
    script, *options = shlex.split(report.RUNS[name].command)
    monkeypatch.setattr(sys, "argv", [script, *options, "--json", "unused.json"])
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        runpy.run_path(str(BENCH / script), run_name="__main__")


def test_what_runs_where(monkeypatch, capsys, tmp_path):
    """Whole commands; small ones if they are asked for, or if GPUs are missing. Runs share the GPUs;
    what needs several begins, what needs none comes last."""
    ran = []

    class Recorded:
        def __init__(self, command, env, **output):
            ran.append((f"{command[1].stem}{command[3]}", env.get("CUDA_VISIBLE_DEVICES")))
            self.returncode = command[1].stem == "c"

        def poll(self):
            return self.returncode

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(report, "RUNS", {"a": report.Run("a.py --n 9"), "b": report.Run("b.py --n 9", "b.py --n 1"),
                                         "c": report.Run("c.py --n 9", "c.py --n 1", gpus=0),
                                         "d": report.Run("d.py --n 9", "d.py --n 1", gpus=2)})  # fmt: skip
    monkeypatch.setattr(report.subprocess, "Popen", Recorded)
    monkeypatch.setattr(report, "POLL", 0)
    pair, each = "3,5", ["3", "5"]
    for small, gpus, expected, where in (
        (False, 4, "d9 a9 b9 c9", [pair, "6", "7", None]), (False, 2, "d9 a9 b9 c9", [pair, *each, None]),
        (False, 1, "d1 a9 b9 c9", [None] * 4), (False, 0, "d1 b1 c9", [None] * 3), (True, 1, "d1 b1 c1", [None] * 3),
        (True, 0, "d1 b1 c1", [None] * 3), (True, 2, "d1 b1 c1", [pair, "3", None]),
    ):  # fmt: skip
        monkeypatch.setattr(report, "gpus_here", lambda gpus=gpus: ["3", "5", "6", "7"][:gpus])
        assert report.run(report.RUNS, small, tmp_path) == 1        # which failed
        assert ran == [*zip(expected.split(), where, strict=True)]
        ran.clear()
    assert "a: left out, it needs a GPU" in capsys.readouterr().out
    assert (tmp_path / "results/a.log").exists()


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
    assert re.search(r"late: failed after \d+ s", said)


def running(process):
    """Whether a process does more than wait to be buried."""
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_the_smallest_sizes_run(tmp_path, monkeypatch, capfd):
    """The smallest sizes on CPUs run, and are drawn."""
    options = ["--run", "speed", "cpu", "decoding_cpu", "--small", "--folder"]
    monkeypatch.setattr(sys, "argv", ["report.py", *options, str(tmp_path)])
    assert report.main() == 0
    assert "speed: left out" in capfd.readouterr().out
    results = report.load(tmp_path)
    assert set(results) == {"cpu", "decoding_cpu"}
    assert results["cpu"]["command"] == f"python bench/{report.RUNS['cpu'].small}"
    assert (tmp_path / "README.md").read_text() == report.page(results)[0]
    assert (tmp_path / "plots/decoding_cpu.png").exists()


# -------------------------------------------------------------------------------------------------------------- common
def test_results_say_what_made_them(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBATTN_COMMIT", "abc")
    monkeypatch.setattr(sys, "argv", ["/somewhere/bench/x.py", "--json", "/elsewhere/x.json", "--name", "a b"])
    made = {"machine": {"cores": 2}, "arguments": {"json": "/elsewhere/x.json", "name": "a b"},
            "records": [{"n": 1}, {}]}  # fmt: skip
    common.save(tmp_path / "new/x.json", made)
    text = (tmp_path / "new/x.json").read_text()
    assert json.loads(text) == {"command": "python bench/x.py --name 'a b'", "commit": "abc", **made,
                                "arguments": {"name": "a b"}}
    assert '{"n": 1},\n{}' in text      # a line each


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
    answers = {"rev-parse": "0123456789ab\n", "diff": ""}
    monkeypatch.setattr(common, "_git", lambda what, *_: subprocess.CompletedProcess([], 0, answers[what]))
    assert common.commit() == "0123456789ab"
    answers["diff"] = "numbattn/api.py\n"
    assert common.commit() == "0123456789ab+"
    answers["rev-parse"] = ""
    assert common.commit() is None
