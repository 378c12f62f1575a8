"""Counts of tests of other projects: added up by suite and device, on the page and in the README."""

import json
import sys
from types import SimpleNamespace

import conformance
import pytest
import report


def counted(suite, passed, failed=0, device="CPU", ends=""):
    numbers = {"passed": passed, "failed": failed, "skipped": 2}
    return {"suite": suite, "package": f"{suite} 1.0", "device": device, **numbers, "ends": ends}


def test_counts_are_added_up():
    counts = [counted("A", 3), counted("B", 4, ends="4 passed"), counted("A", 5, 1)]
    one, other = conformance.rows(counts, "3 passed", "0123456789ab")
    assert one == counted("A", 8, 1, ends="3 passed") | {"skipped": 4, "commit": "0123456789ab"}
    assert other == counted("B", 4, ends="4 passed") | {"commit": "0123456789ab"}


def test_what_did_not_run_again_is_kept(tmp_path):
    a, b, on_a_gpu = counted("A", 3), counted("B", 4), counted("A", 3, device="GPU")
    assert conformance.others(tmp_path / "none.json", [a]) == []
    (tmp_path / "some.json").write_text(json.dumps({"suites": [a, b, on_a_gpu]}))
    assert conformance.others(tmp_path / "some.json", [counted("A", 5)]) == [b, on_a_gpu]


def test_tests_that_fail_without_a_count_are_named():
    found = conformance.Found()
    properties = [("conformance", counted("A", 3, 1))]
    for when, failed, given in (("setup", False, []), ("call", True, properties), ("call", True, [])):
        report = SimpleNamespace(when=when, failed=failed, user_properties=given, nodeid=f"{when} {len(given)}")
        found.pytest_runtest_logreport(report)
    assert found.counts == [counted("A", 3, 1)]
    assert found.broken == ["call 0"]


def test_what_pytest_does_not_finish_has_no_results(monkeypatch, tmp_path):
    monkeypatch.setattr(pytest, "main", lambda *_, **__: pytest.ExitCode.INTERNAL_ERROR)
    monkeypatch.setattr(sys, "argv", ["conformance.py", "--json", str(tmp_path / "results.json")])
    with pytest.raises(SystemExit, match="INTERNAL_ERROR"):
        conformance.main()
    assert not [*tmp_path.iterdir()]


def test_what_is_said_of_them():
    counts = [counted("A", 8, 1), counted("A", 9, device="NVIDIA H100", ends="9 passed in 1 s"), counted("B", 4)]
    results = {"suites": conformance.rows(counts, "5 passed", "0123456789ab")}
    assert conformance.sentence(results).endswith("on a CPU A 8 of 9, B 4; on an NVIDIA H100 A 9.")
    said = conformance.section(results)
    assert "| A 1.0" in said
    assert "| 9 passed in 1 s " in said
    assert "| 0123456789ab " in said
    start = list(report.FILLED)[-1]
    filled = report.filled(f"{start}\nold\n{report.END}\n", {report.COUNTS: results})
    assert "old" not in filled
    assert "A 8 of 9" in filled
