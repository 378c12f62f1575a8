"""bench/sparse_layers.py up to what needs a GPU: that both peers are right, what is timed and what is shown."""

import numpy as np
import pytest
import small
import sparse_layers
import timing

CASE = sparse_layers.Case("float32", 16, 0.4, rows=70, features=64)


@pytest.fixture
def on_numpy(monkeypatch):
    """NumPy's arrays instead of CuPy's, and a clock that does not run."""
    for module in (sparse_layers, small):
        monkeypatch.setattr(module, "release", lambda: None)
    monkeypatch.setattr(sparse_layers, "cupy", np)
    monkeypatch.setattr(small, "SETTLE_SECONDS", 0)
    for module in (small, timing):
        monkeypatch.setattr(module, "event_seconds", lambda run, repetitions=1: 2.0)


def test_the_goal_is_measured():
    args = sparse_layers.parse([])
    assert {"bfloat16"} <= {*args.dtype}
    assert 0.1 in args.share
    assert {64, 128} == {*args.size}
    assert sparse_layers.Case("bfloat16", 128, 0.1).pattern().count == 102
    assert sparse_layers.parse(["--quick"]).rounds == 2


def test_measured(on_numpy, capsys):
    records = [*sparse_layers.measured([CASE], rounds=1)]
    assert [record["pass"] for record in records] == ["forward", "dX", "dW"]
    for record in records:
        assert record["failed"] == {}
        assert record["seconds"] == {"numbattn": 2.0, "dense": 2.0}
        assert max(record["errors"].values()) < 1e-5
    sparse_layers.show_records(records)
    assert capsys.readouterr().out.splitlines()[-2].split()[-3:] == ["2", "2", "1"]


def test_who_is_wrong_is_not_timed(on_numpy, monkeypatch, capsys):
    monkeypatch.setattr(sparse_layers, "run", lambda name, one, other, pattern, shape: np.ones(shape, np.float32))
    records = [*sparse_layers.measured([CASE], rounds=1)]
    assert all(record["seconds"].keys() == {"dense"} for record in records)
    sparse_layers.show_records(records)
    assert "numbattn was not timed" in capsys.readouterr().out
