import re
import subprocess
import sys
import time

import numpy as np
import pytest

import numbattn as na
from numbattn import __main__ as main
from numbattn import cpu
from numbattn.base import cache
from numbattn.command import machine
from numbattn.command.ahead import PASSES

from .conftest import no_gpu

TIERS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def lines():
    """What python -m numbattn prints."""
    done = subprocess.run([sys.executable, "-m", "numbattn"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("tier", TIERS)
def test_every_dtype_and_pass_is_checked(lines, tier):
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        for name in PASSES:
            assert any(line.split()[:3] == [tier, dtype, name] for line in lines)
    assert any("all results agree" in line for line in lines)


def test_lines_are_short(lines):
    assert max(map(len, lines)) <= 80


@pytest.mark.gpu
def test_a_gpu_is_described(lines):
    text = "\n".join(lines)
    assert "compute capability" in text
    assert re.search(r"[1-9]\d* for\s+the\s+GPU", text)


@pytest.mark.skipif(not no_gpu(), reason="there is a GPU")
def test_why_there_is_no_gpu(lines):
    assert any(line.startswith("GPU: none: ") and len(line) > 20 for line in lines)
    assert any(line.startswith("cuda   not checked") for line in lines)


def test_the_cache_is_shown_and_cleared(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path))
    cache.write("cpu", "0" * 64, {}, bytes(1_200_000))
    cache.write("cuda", "0" * 64, {}, b"")
    shown = " ".join(machine.kept().split())
    assert shown == f"{tmp_path / 'numbattn'}, kernels: 1 for the CPU, 1.2 MB; 1 for the GPU, 0.0 MB"
    assert main.main(["--clear-cache"]) == 0
    assert "removed: " in capsys.readouterr().out
    assert cache.sizes() == {"cpu": [], "cuda": []}


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def no_home(name):
        raise RuntimeError("no home")

    monkeypatch.delenv("NUMBATTN_CACHE_DIR", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_dir", no_home)
    assert machine.kept() == "none, no home"
    assert main.main(["--clear-cache"]) == 0


def test_missing_packages_are_named(monkeypatch, capsys):
    monkeypatch.setattr(machine, "find_spec", lambda module: None)
    assert main.main([]) == 0
    assert "GPU: none: CuPy and numba-cuda not installed" in capsys.readouterr().out


def test_a_wrong_result_is_reported(monkeypatch, capsys):
    right = cpu.forward

    def wrong(*args):
        o, saved = right(*args)
        o[..., 0] = np.nan
        return o, saved

    monkeypatch.setattr(cpu, "forward", wrong)
    assert main.main([]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(("cc", "cores"), [((7, 5), "CUDA cores"), ((8, 6), "tensor cores")])
def test_which_cores_compute(cc, cores):
    plan = pytest.importorskip("numbattn.cuda.plan.planner", exc_type=ImportError)
    for name in PASSES:
        assert main._unit(plan.DEVICES[cc], name, np.dtype(np.float32)) == cores


def test_the_version(capsys):
    with pytest.raises(SystemExit) as end:
        main.main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"numbattn {na.__version__}\n")


# -------------------------------------------------------------------------------------------------------------- bench
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tier", TIERS)
def test_what_is_timed_computes_the_same(tier, causal, backward, monkeypatch):
    monkeypatch.setattr(main, "_waited", lambda run, wait: (run(), wait())[0])
    xp = np if tier == "cpu" else pytest.importorskip("cupy")
    arrays = map(xp.asarray, np.random.default_rng(0).standard_normal((4, 1, 2, 40, 16), np.float32))
    results = {name: run() for name, run in main._runs(xp, *arrays, causal, backward).items()}
    assert {"numbattn", "formula"} <= set(results)
    expected = results.pop("formula")
    for name, found in results.items():
        assert isinstance(found, tuple) == isinstance(expected, tuple) == backward
        pairs = zip(found, expected) if backward else [(found, expected)]
        for got, want in pairs:
            assert main._error(_on_host(got), _on_host(want)) < 1e-5, name


def _on_host(x):
    """A tensor, or an array of CuPy or NumPy."""
    return x.detach().cpu().numpy() if hasattr(x, "detach") else x.get() if hasattr(x, "get") else x


def _numbers(lines):
    return [line.split() for line in lines if line.startswith(("cpu ", "cpu\t"))]


def test_speeds_are_shown(monkeypatch, capsys):
    monkeypatch.setattr(main, "why_no_gpu", lambda: "none")
    monkeypatch.setattr(main, "BENCHED", {"cpu": (("float32", 20), ("float64", 16))})
    monkeypatch.setattr(main, "_load", lambda: 1.5)
    monkeypatch.setattr(main, "_shortest", lambda runs, seconds: dict(zip(runs, (1e-3, 4e-3, 2e-3))))
    assert main.main(["bench"]) == 0
    shown = capsys.readouterr().out
    rows = _numbers(shown.splitlines())
    assert [row[1:5] for row in rows] == [[dtype, n, causal, of] for dtype, n in (("float32", "20"), ("float64", "16"))
                                          for causal in ("False", "True") for of in ("forward", "both")]
    assert all(row[5:7] == ["1.00", "4.00"] for row in rows)
    assert "cpu: 4.00 times as fast as formula, the geometric mean" in shown
    assert "others use 1.5 cores" in shown


def test_speeds_where_only_numpy_is_installed(monkeypatch, capsys):
    for module in main, machine:
        monkeypatch.setattr(module, "find_spec", lambda module: None)
    monkeypatch.setattr(main, "BENCHED", {"cpu": (("float32", 20),)})
    assert main.main(["bench", "--seconds", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert "torch" not in shown
    rows = _numbers(shown.splitlines())
    assert [len(row) for row in rows] == [8] * 4
    assert all(float(row[6]) > 0 for row in rows)


def test_the_first_round_is_not_counted():
    calls = []

    def run():
        if not calls:
            time.sleep(0.5)
        calls.append(1)

    assert main._shortest({"numbattn": run}, 0)["numbattn"] < 0.1
    assert len(calls) == 2


FAULTS = {
    "command/test_ahead.py::test_an_extra_that_is_missing_is_named": {
        "NotImplementedError, ImportError)": "NotImplementedError)",
    },
}
