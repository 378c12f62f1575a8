import re
import subprocess
import sys
import time

import numpy as np
import pytest

import numbattn as na
from numbattn import __main__ as main
from numbattn import cache, cpu

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
        for name in ("forward", "backward"):
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
    shown = " ".join(main._kept().split())
    assert shown == f"{tmp_path / 'numbattn'}, kernels: 1 for the CPU, 1.2 MB; 1 for the GPU, 0.0 MB"
    assert main.main(["--clear-cache"]) == 0
    assert "removed: " in capsys.readouterr().out
    assert cache.sizes() == {"cpu": [], "cuda": []}


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def no_home(name):
        raise RuntimeError("no home")

    monkeypatch.delenv("NUMBATTN_CACHE_DIR", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_dir", no_home)
    assert main._kept() == "none, no home"
    assert main.main(["--clear-cache"]) == 0


def test_missing_packages_are_named(monkeypatch, capsys):
    monkeypatch.setattr(main, "find_spec", lambda module: None)
    assert main.main([]) == 0
    assert "GPU: none: CuPy and numba-cuda not installed" in capsys.readouterr().out


def test_a_wrong_result_is_reported(monkeypatch, capsys):
    right = cpu.forward

    def wrong(problem, inputs, out, save):
        o, saved = right(problem, inputs, out, save)
        o[..., 0] = np.nan
        return o, saved

    monkeypatch.setattr(cpu, "forward", wrong)
    assert main.main([]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(("cc", "cores"), [((7, 5), "CUDA cores"), ((8, 6), "tensor cores")])
def test_which_cores_compute(cc, cores):
    plan = pytest.importorskip("numbattn.cuda.plan.planner", exc_type=ImportError)
    for name in ("forward", "backward"):
        assert main._unit(plan.DEVICES[cc], name, np.dtype(np.float32)) == cores


# ------------------------------------------------------------------------------------------------------ plan, compile
def test_a_plan_is_shown(capsys):
    pytest.importorskip("numba.cuda")
    options = "--cc 9.0 --dtype bfloat16 --seqlen 300 --head-dim 60 --heads 4 --heads-k 2 --mask causal --dropout"
    assert main.main(["plan", *options.split()]) == 0
    shown = capsys.readouterr().out
    assert "q (1, 4, 300, 60), k (1, 2, 300, 60), v (1, 2, 300, 60), bfloat16, mask causal, dropout" in shown
    assert "o does not lie in vectors of 16 bytes, or has negative strides" in shown
    forward, backward = shown.split("backward\n")
    kernels = [re.findall(r"^  \w+\.(\w+) .* \d+\.\d KB ", text, re.M) for text in (forward, backward)]
    assert kernels == [["forward"], ["delta", "backward_kv", "round_dq"]]
    assert "temporary: delta, (1, 4, 384) of float32, 6,144 bytes" in backward


def test_a_plan_of_devices_is_shown(capsys):
    """Without a GPU, and without memory for what is split."""
    options = "--devices 4 --order contiguous --heads 8 --heads-k 4 --seqlen 65536 --mask window"
    assert main.main(["plan", *options.split()]) == 0
    shown = capsys.readouterr().out
    assert "4 devices, contiguous\nq (1, 8, 65536, 128), k (1, 4, 65536, 128)" in shown
    ring, heads = shown.partition("\nheads: ")[::2]
    assert re.findall(r"^ +(\d) +(\d+:\d+) ", ring, re.M)[1] == ("1", "16384:32768")
    assert len(re.findall(r"^ +\d +\d+:\d+ .* 25.0% ", heads, re.M)) == 4
    assert "\ntaken: ring, since a rank sends at most 134.2 MB in both passes, by heads 151.4 MB\n" in shown


@pytest.fixture
def unbuilt(monkeypatch):
    """Kernels of a plan are named, without building them."""
    pytest.importorskip("numba.cuda")
    monkeypatch.setattr(main, "_row", lambda step, device: {"kernel": step.key.name})


@pytest.mark.parametrize(("option", "last"), [([], "round_dq"), (["--deterministic"], "backward_q")])
def test_a_plan_says_how_gradients_become_deterministic(option, last, unbuilt, capsys):
    assert main.main(["plan", "--cc", "9.0", "--head-dim", "64", "--seqlen", "300", *option]) == 0
    _, *kernels = re.findall(r"^  (\w+)$", capsys.readouterr().out.partition("backward\n")[2], re.M)
    assert kernels == ["delta", "backward_kv", last]


def test_what_is_compiled_is_kept(tmp_path, monkeypatch, capsys):
    pytest.importorskip("numba.cuda")
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path))
    options = "--cc 8.0 --dtype float16 float32 --head-dim 32 --seqlen 100 --mask none causal --pass forward -j 2"
    assert main.main(["compile", *options.split()]) == 0
    assert len(cache.sizes()["cuda"]) == 2      # masks of numbers are the same kernel
    assert "2 kernels for compute capability 8.0" in capsys.readouterr().out


MASKS_OF_INTERVALS = ["segments", "causal-segments", "window-segments", "prefix", "intervals"]


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("cc", [(8, 0), (9, 0)])
def test_every_mask_and_score_is_planned(cc, gradient):
    """Each mask beside a score, each score beside a mask; with gradients their kernels are there."""
    device, shape = pytest.importorskip("numbattn.cuda.plan.planner", exc_type=ImportError).DEVICES[cc], (1, 2, 256, 64)
    assert set(MASKS_OF_INTERVALS) <= set(main.MASKS)
    assert {"softcap", "alibi", "bias", "relative", "sink", "function"} <= set(main.SCORES)
    for number in range(max(len(main.MASKS), len(main.SCORES))):
        mask, score = (list(x)[number % len(x)] for x in (main.MASKS, main.SCORES))
        planned = main._plans(device, np.dtype("float16"), shape, shape, shape, mask, False, False, [score], gradient)
        kernels = [step.key.factory for step in planned["backward"].steps]
        found = any("score_gradient" in kernel for kernel in kernels)
        assert found <= gradient, (mask, score)
        assert found or not gradient or score not in ("bias", "bias-of-keys", "relative"), (mask, score)


def test_a_plan_with_scores_and_segments(unbuilt, capsys):
    options = "--cc 8.0 --seqlen 200 --head-dim 32 --heads 2 --mask causal-segments --score softcap relative"
    for more, count in ([], 1), (["--no-gradient"], 0):
        assert main.main(["plan", *options.split(), *more]) == 0
        shown = capsys.readouterr().out
        assert "float16, mask causal-segments, score softcap relative\n" in shown
        assert len(re.findall("^  diagonal_sums", shown, re.M)) == count


def test_the_version(capsys):
    with pytest.raises(SystemExit) as end:
        main.main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"numbattn {na.__version__}\n")


@pytest.mark.parametrize("command", ["plan", "compile"])
def test_errors_are_said_without_a_traceback(command, capsys):
    pytest.importorskip("numba.cuda")
    with pytest.raises(SystemExit) as end:
        main.main([command, "--cc", "9.0", "--head-dim", "300"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "python -m numbattn: error: head_dim: got 300, at most 256 on a GPU\n"


@pytest.mark.parametrize("command", ["plan", "compile"])
def test_of_an_unknown_gpu(command, capsys):
    pytest.importorskip("numba.cuda")
    with pytest.raises(SystemExit):
        main.main([command, "--cc", "4.2"])
    assert "known are 7.5, 8.0" in capsys.readouterr().err


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
    monkeypatch.setattr(main, "_why_no_gpu", lambda: "none")
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
    monkeypatch.setattr(main, "find_spec", lambda module: None)
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
