import json

import numpy as np
import pytest
import ring

from numbattn import distributed as nad

TINY = "--engine simulated --devices 3 --seqlen 128 200 --dtype float32 --heads 2 --heads-k 1 --head-dim 16 --rounds 1"


def test_script(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ring, "SAMPLE_SECONDS", 0.001)
    path = tmp_path / "ring.json"
    ring.main([*TINY.split(), "--json", str(path)])
    assert "of n devices" in capsys.readouterr().out
    found = json.loads(path.read_text())
    cases = [(causal, n) for causal in (False, True) for n in (128, 200)]
    assert [(x["causal"], x["seqlen"]) for x in found["checks"]] == cases
    for check in found["checks"]:
        assert check["equal"]
        assert all(0 < apart < 1e-6 for apart in check["apart"].values())
    for record in found["speed"]:
        assert (record["engine"], record["ranks"], record["at once"]) == ("simulated", 3, 1)
        assert record["of devices"] == record["seconds"]["one"] / record["seconds"]["ring"]
    assert [x["seqlen"] for x in found["errors"]] == [200, 200]
    assert all(ring.worst_ratio(x["rms"]) < 1.5 for x in found["errors"])


def test_work_is_that_of_the_visible_half():
    case = ring.Case(False, 1000, "bfloat16", 64, 8, 2)
    assert case.tflop("forward + backward") == pytest.approx(3.5 * 4e-12 * 8 * 1000**2 * 64)
    assert case._replace(causal=True).tflop("forward") == pytest.approx(case.tflop("forward") / 2)


def test_devices_are_measured_against_as_many():
    assert ring.share_of({"one": 4.0, "ring": 1.25}, 4) == 0.8


def test_bits_and_errors():
    x = np.array([[[0.0, 1.0]]], np.float32)
    assert ring.same_bits(x, x.copy())
    assert not ring.same_bits(x[..., :1], -x[..., :1])  # whose values are equal
    assert ring.rms(1.1 * x, x) == pytest.approx(0.1)


class Process(nad.Ring):
    """One of two processes, and the numbers that the others have."""

    rank, ranks = 1, 2

    def __init__(self, *others):
        super().__init__("zigzag")
        self.others = others

    def join(self, part):
        assert part.shape == (64, 1)  # what `split` gives each of them
        return np.concatenate([part, *(np.full_like(part, x) for x in self.others)])


def test_the_slowest_process_counts():
    assert ring.World(Process(3.0)).most(2.0) == 3.0
    assert ring.World(Process(1.0)).most(2.0) == 2.0
    assert ring.World(nad.Simulated(2)).most(2.0) == 2.0


def test_mpi_is_run_by_mpiexec(capsys):
    with pytest.raises(SystemExit):
        ring.parse(["--engine", "simulated", "mpi"])
    assert "--engine mpi is run by mpiexec" in capsys.readouterr().err
