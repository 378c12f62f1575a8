import json
import time

import numpy as np
import pytest
from paper import figure3
from paper.figure3 import Case, Clock

TINY = ["--seqlen", "64", "128", "--heads", "1", "--rounds", "1"]
KNOWN = {  # peers that cannot, by setting
    "dropout+padding": {"linear"}, "none": set(), "causal": {"linformer", "linear"},
}  # fmt: skip


def test_script(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figure3, "SAMPLE_SECONDS", 0)
    monkeypatch.setattr(figure3, "cupy", None)
    path = tmp_path / "figure3.json"
    figure3.main([*TINY, "--json", str(path)])
    assert "dropout+padding, memory, MB beyond the inputs" in capsys.readouterr().out
    results = json.loads(path.read_text())
    assert {"machine", "arguments", "records"} <= results.keys()
    assert len(results["records"]) == 3 * 2 * len(figure3.peers_here(on_gpu=False))
    for record in results["records"]:
        assert bool(record["failed"]) == (record["peer"] in KNOWN[record["setting"]])
        if not record["failed"]:
            assert list(record["seconds"]) == list(figure3.PASSES)
            assert min(record["seconds"].values()) > 0
            assert record["bytes"] > 0


@pytest.mark.parametrize("setting", ["none", "causal", "padding", "padding+causal"])
def test_exact_peers_agree(setting):
    case = Case(setting, 300, 2, 2, "float64", 16)
    results = []
    for name in ("standard", "rabe-staats", "numbattn"):
        o, backward = figure3.make_forward(np, name, case)()
        results.append([o, *backward()])
    for others in results[1:]:
        for got, want in zip(others, results[0], strict=True):
            np.testing.assert_allclose(got, want, atol=1e-12)


@pytest.mark.parametrize(("name", "seqlen", "growth"), [("standard", 256, 4), ("numbattn", 2048, 2)])
def test_memory_of_the_standard_formula_is_quadratic_and_numbattns_linear(name, seqlen, growth):
    """From a length with work for all cores, whose sums of gradients take memory, too."""
    runs = [figure3.one_pass(figure3.make_forward(np, name, Case("none", n, 1, 1, "float32")), "both")
            for n in (seqlen, 2 * seqlen)]  # fmt: skip
    short, long = map(Clock().extra_bytes, runs)
    assert long / short == pytest.approx(growth, rel=0.1)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 1 GiB"),
                                   RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")])  # fmt: skip
def test_what_is_out_of_memory_is_not_tried_again(error, monkeypatch):
    tried = []

    def measured(clock, name, case, rounds):
        tried.append(case.seqlen)
        raise error

    monkeypatch.setattr(figure3, "measured", measured)
    args = figure3.parse([*TINY, "--setting", "none", "--peers", "standard"], on_gpu=False)
    records = figure3.records_of(Clock(), args)
    assert [x["failed"] for x in records] == [figure3.OUT_OF_MEMORY] * 2
    assert tried == [64]


def test_what_takes_long_is_not_tried_at_longer_lengths(monkeypatch):
    found = {"seconds": {"both": 1.5 * figure3.TOO_SLOW}, "bytes": 1}
    monkeypatch.setattr(figure3, "measured", lambda *about: found)
    args = figure3.parse([*TINY, "--setting", "none", "--peers", "standard"], on_gpu=False)
    first, second = figure3.records_of(Clock(), args)
    assert (first["failed"], first["seconds"]) == (None, found["seconds"])
    assert (second["failed"], second["seconds"]) == (figure3.TOO_LONG, None)


def test_what_there_is_no_time_for_is_recorded():
    args = figure3.parse([*TINY, "--peers", "linear", "--minutes", "0"], on_gpu=False)
    assert {x["failed"] for x in figure3.records_of(Clock(), args)} == {figure3.NO_TIME}


def test_other_failures_are_told():
    record = figure3.record_of(Clock(), "linear", Case("causal", 64, 1, 1, "float32"), 1, time.monotonic() + 9, {})
    assert record["failed"].startswith("ValueError: linear attention that is causal")


def test_batches_are_smaller_at_long_lengths():
    args = figure3.parse(["--minutes", "0", "--setting", "none", "--peers", "linear"], on_gpu=True)
    batches = {x["seqlen"]: x["batch"] for x in figure3.records_of(Clock(), args)}
    assert batches == {2**n: min(16, 2 ** (17 - n)) for n in range(7, 17)}
