import re
import subprocess
import sys
from importlib import import_module
from unittest.mock import patch

import numpy as np
import pytest

from numbattn.__main__ import SHORT, main
from numbattn.base import cache
from numbattn.command import ahead
from numbattn.cpu.bfloat16 import has_pairs
from numbattn.cpu.compile import Call, Kernel


@pytest.mark.slow  # test_what_is_compiled_is_kept shows one
def test_a_plan_is_shown(capsys):
    pytest.importorskip("numba_cuda")
    options = "--cc 9.0 --dtype bfloat16 --seqlen 300 --head-dim 60 --heads 4 --heads-k 2 --mask causal --dropout"
    assert main(["plan", *options.split(), "--pass", "forward"]) == 0
    shown = capsys.readouterr().out
    assert "q (1, 4, 300, 60), k (1, 2, 300, 60), v (1, 2, 300, 60), bfloat16, mask causal, dropout" in shown
    assert "o does not lie in vectors of 16 bytes, or has negative strides" in shown
    assert re.findall(r"^  (\w+) +([\w/]+)\.py .* \d+\.\d KB ", shown, re.M) == [("hopper_forward", "hopper/forward")]


def test_a_plan_of_devices_is_shown(capsys):
    """Without a GPU, and without memory for what is split."""
    options = "--devices 4 --order contiguous --heads 8 --heads-k 4 --seqlen 65536 --mask window"
    assert main(["plan", *options.split()]) == 0
    shown = capsys.readouterr().out
    assert "4 devices, contiguous\nq (1, 8, 65536, 128), k (1, 4, 65536, 128)" in shown
    ring, heads = shown.partition("\nheads: ")[::2]
    assert re.findall(r"^ +(\d)\s+(\d+:\d+)\s", ring, re.M)[1] == ("1", "16384:32768")
    assert len(re.findall(r"^ +\d\s+\d+:\d+\s.*\s25.0%\s", heads, re.M)) == 4
    assert "\ntaken: ring, since a rank sends at most 134.2 MB in both passes, by heads 151.4 MB\n" in shown


@pytest.fixture
def unbuilt(monkeypatch):
    """Kernels of a plan are named, without building them."""
    pytest.importorskip("numba_cuda")
    monkeypatch.setattr(ahead, "_row", lambda step, device: {"kernel": step.key.name})


@pytest.mark.parametrize("option", [[], ["--deterministic"]])
def test_a_plan_says_how_gradients_become_deterministic(option, unbuilt, capsys):
    assert main(["plan", "--cc", "9.0", "--head-dim", "64", "--seqlen", "300", "--heads", "4", *option]) == 0
    forward, backward = capsys.readouterr().out.split("backward\n")
    assert re.findall(r"^  (\w+)$", backward, re.M) == ["kernel", "delta", "hopper_backward_kv", "round_dq"]
    assert ("temporary: turns, (1, 4, 6) of uint32" in backward) == bool(option)
    assert "temporary: delta, (1, 4, 384) of float32, 6,144 bytes" in backward


@pytest.mark.parametrize(("option", "tokens"), [((), 11264), (("--dropout",), 9984), (("--score", "alibi"), 9984)])
def test_a_grid_is_planned_in_the_order_of_boxes(option, tokens, unbuilt, capsys):
    """Unless something depends on where tokens are. Boxes of 4 x 16 tokens stand out of an image of 99 x 100."""
    about = "--cc 9.0 --head-dim 64 --seqlen 9900 --heads 1 --mask grid --pass backward"
    assert main(["plan", *about.split(), *option]) == 0
    assert f"temporary: delta, (1, 1, {tokens})" in capsys.readouterr().out


def test_what_is_compiled_is_kept(tmp_path, monkeypatch, capsys):
    pytest.importorskip("numba_cuda")
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path))
    options = "--cc 8.0 --dtype float16 --head-dim 32 --seqlen 100 --pass forward"
    assert main(["compile", *options.split(), "--mask", "none", "causal", "-j", "2"]) == 0
    assert len(cache.sizes()["cuda"]) == 1      # masks of numbers are the same kernel
    assert "1 kernels for compute capability 8.0" in capsys.readouterr().out
    assert main(["plan", *options.split(), "--mask", "causal"]) == 0
    found = re.findall(r"^  (\w+) +([\w/]+)\.py .* \d+\.\d KB ", capsys.readouterr().out, re.M)
    assert found == [("small_forward", "small/forward")]


def test_sums_of_what_a_batch_shares_are_compiled_too(monkeypatch):
    pytest.importorskip("numba_cuda")
    names, options = set(), "--cc 9.0 --head-dim 64 --seqlen 200 --score bias --pass backward"
    monkeypatch.setattr(ahead, "_in_processes", lambda most, build, keys, **_: names.update(key.name for key, in keys))
    assert main(["compile", *options.split()]) == 0
    assert {"hopper_bias_gradient", "sum_parts"} <= names


MASKS_OF_INTERVALS = ["segments", "causal-segments", "window-segments", "prefix", "intervals"]


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("cc", [(8, 0), (9, 0)])
def test_every_mask_and_score_is_planned(cc, gradient):
    """Each mask beside a score, each score beside a mask; with gradients their kernels are there."""
    device, shape = pytest.importorskip("numbattn.cuda.plan.planner", exc_type=ImportError).DEVICES[cc], (1, 2, 256, 64)
    assert set(MASKS_OF_INTERVALS) <= set(ahead.MASKS)
    assert {"softcap", "alibi", "bias", "relative", "sink", "function"} <= set(ahead.SCORES)
    for number in range(max(len(ahead.MASKS), len(ahead.SCORES))):
        mask, score = (list(x)[number % len(x)] for x in (ahead.MASKS, ahead.SCORES))
        planned = ahead.plans(device, np.dtype("float16"), shape, shape, shape, mask, False, False, [score], gradient)
        arrays = {getattr(x, "array", "") for step in planned["backward"].steps for x in step.arguments}
        found = any("of score" in array for array in arrays)    # its gradient, or sums of that
        assert found <= gradient, (mask, score)
        assert found or not gradient or score not in ("bias", "bias-of-keys", "relative"), (mask, score)


def test_a_plan_with_scores_and_segments(unbuilt, capsys):
    options = "--cc 8.0 --seqlen 200 --head-dim 32 --heads 2 --mask causal-segments --score softcap relative"
    for more, count in ([], 1), (["--no-gradient"], 0):
        assert main(["plan", *options.split(), *more]) == 0
        shown = capsys.readouterr().out
        assert "float16, mask causal-segments, score softcap relative\n" in shown
        assert len(re.findall("^  diagonal_sums", shown, re.M)) == count


def test_other_processes_know_the_functions_of_samples():
    pytest.importorskip("numba_cuda")
    known = import_module("numbattn.cuda.kernels.shared.visibility.function").KNOWN
    with patch.dict(known, clear=True):
        ahead.know_functions()
        assert [*known] == [ahead.MASKS["where"](8, 8)._identity.digest]


@pytest.mark.parametrize("command", ["plan", "compile"])
def test_errors_are_said_without_a_traceback(command, capsys):
    pytest.importorskip("numba_cuda")
    with pytest.raises(SystemExit) as end:
        main([command, "--cc", "9.0", "--head-dim", "300", "--pass", "tangent"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "python -m numbattn: error: head_dim: got 300, at most 256 on a GPU\n"


@pytest.mark.parametrize("command", [
    "plan --devices 0", "plan --devices 2 --batch 0", "plan --devices 2 --heads -1", "plan --devices 2 --heads-k 0",
    f"plan --devices 2 --seqlen {2**64}", "plan --devices 2 --seqlen-k 0", "plan --devices 2 --head-dim-v 0",
    "plan --devices 513", "compile --cpu --head-dim 8 -3", "compile --cpu -j 0", "bench --seconds 0",
    "bench --seconds nan",
])  # fmt: skip
def test_numbers_out_of_range_are_named(command, capsys):
    with pytest.raises(SystemExit):
        main(command.split())
    *_, option, got = command.replace(" 8 ", " ").split()
    assert f"error: argument {option}: got {got}, allowed " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "compile"])
def test_of_an_unknown_gpu(command, capsys):
    pytest.importorskip("numba_cuda")
    with pytest.raises(SystemExit):
        main([command, "--cc", "4.2"])
    assert "known are 7.5, 8.0" in capsys.readouterr().err


# what __main__ does where the packages of an extra are not installed
WITHOUT_EXTRAS = """
import importlib.util as imports
import sys
find_spec = imports.find_spec
imports.find_spec = lambda name, *args: None if name in ("numba_cuda", "cupy") else find_spec(name, *args)
from numbattn.__main__ import main
from numbattn.cpu.compile import Kernel
for command in sys.argv[1:]:
    try:
        main(command.split())
    except SystemExit as end:
        print(end.code, file=sys.stderr)
"""


def test_an_extra_that_is_missing_is_named():
    commands = ["plan", "plan --cc 9.0", "compile --cc 8.0 --dtype float32", "plan --devices 2 --seqlen 4096"]
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS, *commands], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == 3 * [
        "python -m numbattn: error: numba-cuda not found. CUDA kernels need pip install 'numbattn[cu13]', or "
        "'numbattn[cu12]' for a driver of CUDA 12", "2"]  # fmt: skip
    assert "taken: " in done.stdout  # a plan of devices needs none


def test_without_a_gpu_or_its_name(monkeypatch, capsys):
    pytest.importorskip("numba_cuda")
    monkeypatch.setattr(ahead, "why_no_gpu", lambda: "there is no driver")
    for command, advice in {"plan": "which one", "compile": "which one; --cpu compiles for CPUs"}.items():
        with pytest.raises(SystemExit) as end:
            main([command])
        said = capsys.readouterr()
        assert (end.value.code, said.out) == (2, "")
        assert said.err.endswith(f"--cc says for {advice}\n")


def test_names_may_be_short():
    pytest.importorskip("numba_cuda")
    assert [ahead.capability(text) for text in ("9", "9.0", "8.6")] == [(9, 0), (9, 0), (8, 6)]
    for short, name in {"bf16": "bfloat16", "fp16": "float16", "f64": "float64", "bfloat16": "bfloat16"}.items():
        assert re.sub(*SHORT, short) == name


# calls of all dtypes, passes and numbers of queries
CALLS = """
import ml_dtypes
import numpy as np
import numbattn as na
from numbattn.command.ahead import SCORES
for dtype in ("float16", ml_dtypes.bfloat16, "float32", "float64"):
    q, k, v = np.ones((3, 2, 70, 24), dtype)
    parts = [make((2, 70, 70), dtype, True) for name, make in SCORES.items() if name != "function"]
    for mask, score, dropout in (None, None, None), (na.Causal() & na.Lengths(60), parts, na.Dropout(0.1, 0)):
        o, backprop = na.attention_vjp(q, k, v, mask=mask, score=score, dropout=dropout)
        backprop(o)
    cache = na.KVCache.zeros(1, 2, 80, 24, like=q, page_size=8)
    cache.append(k[None], v[None])
    na.attention(q[None, :, :2], cache, causal=True)
"""
LOGGED = "import logging; logging.basicConfig(level=logging.INFO)"  # a line for each kernel that is compiled
FOR_CPUS = "compile --cpu --dtype bfloat16 float64 --score alibi bias"


@pytest.fixture
def kinds(monkeypatch):
    """The kernels that would run on CPUs, and the types of their arguments: what Numba compiles one for."""
    found = set()

    def given(kernel, *records):
        found.add((kernel.__name__, *[record.form for record in records]))
        return Call(None, records, None, None)

    def launch(call, blocks, work, nbytes, arrays):
        for x in arrays[-3:]:
            x[...] = 0  # what the kernel would write

    monkeypatch.setattr(Kernel, "given", given)
    for name in ("forward", "decode", "tangent", "backward"):
        module = import_module(f"numbattn.cpu.{name}")
        monkeypatch.setattr(module, "launch", launch)
        for kept in ("calls_of", "call_of"):  # of earlier calls
            if hasattr(getattr(module, kept, None), "__wrapped__"):
                monkeypatch.setattr(module, kept, getattr(module, kept).__wrapped__)
    return found


def test_what_is_compiled_for_cpus_is_all_that_calls_need(kinds, monkeypatch, capsys):
    monkeypatch.setattr(ahead, "_in_processes", lambda most, function, jobs, unit: [function(*job) for job in jobs])
    assert main(FOR_CPUS.split()) == 0
    assert capsys.readouterr().out.startswith("forward and backward with sums in float32 and float64, for the CPU: ")
    compiled = set(kinds)
    kinds.clear()
    exec(CALLS, {})
    assert kinds == compiled
    assert len(kinds) == 6 + 2 * has_pairs()  # three kernels, by the dtype of sums, and two for pairs


# tangents and Laplacians of all dtypes
CALLS_ALONG = """
import ml_dtypes
import numpy as np
import numbattn as na
from numbattn.command.ahead import SCORES
for dtype in ("float16", ml_dtypes.bfloat16, "float32", "float64"):
    q, k, v = x = np.ones((3, 2, 70, 24), dtype)
    parts = [make((2, 70, 70), dtype, True) for name, make in SCORES.items() if name != "function"]
    for mask, score, dropout in (None, None, None), (na.Causal() & na.Lengths(60), parts, na.Dropout(0.1, 0)):
        options = {"mask": mask, "score": score, "dropout": dropout}
        o, to, saved, tsaved = na.attention_forward_jvp(q, k, v, None, k, None, **options)
        na.attention_backward_jvp(o, saved, tsaved, tdo=to, dlse=saved.lse, tdlse=saved.lse)
        na.attention_laplacian(q, k, v, q[None], None, v[None], **options)
"""
ALONG = ["--pass", "tangent", "backward_tangent"]


def test_what_is_compiled_of_tangents_is_all_that_calls_need(kinds, monkeypatch, capsys):
    monkeypatch.setattr(ahead, "_in_processes", lambda most, function, jobs, unit: [function(*job) for job in jobs])
    assert main([*FOR_CPUS.split(), *ALONG]) == 0
    assert capsys.readouterr().out.startswith("tangent and backward_tangent with sums in float32 and float64, ")
    compiled = set(kinds)
    kinds.clear()
    with np.errstate(all="ignore"):  # results are whatever there was in memory
        exec(CALLS_ALONG, {})
    assert kinds == compiled
    assert {name for name, *_ in kinds} == {"forward_kernel", "backward_kernel"}
    assert len(kinds) == 6 + has_pairs()  # the latter without directions, too


def test_tangents_are_planned(unbuilt, capsys):
    """The passes that are asked for, and no others."""
    for options, expected in ([], ["forward", "backward"]), (ALONG, ALONG[1:]):
        assert main(["plan", "--cc", "8.0", "--seqlen", "300", *options]) == 0
        shown = capsys.readouterr().out
        assert re.findall(r"^(forward|backward|tangent|backward_tangent)$", shown, re.M) == expected
        assert ("tangent" in shown) == bool(options)


@pytest.mark.slow
def test_after_it_no_process_compiles(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path))
    assert main(FOR_CPUS.split()) == 0
    kept = cache.sizes()
    assert len(kept["cpu"]) == 6
    done = subprocess.run([sys.executable, "-c", LOGGED + CALLS], capture_output=True, text=True, check=True)
    assert (done.stderr, cache.sizes()) == ("", kept)


def test_for_a_cpu_or_a_gpu(capsys):
    pytest.importorskip("numba_cuda")
    with pytest.raises(SystemExit):
        main(["compile", "--cpu", "--cc", "9.0"])
    assert "not allowed with" in capsys.readouterr().err


FAULTS = {
    'f"{text}.0"': "text",
    (
        "test_what_is_compiled_for_cpus_is_all_that_calls_need",
        "test_without_a_gpu_or_its_name",
        "test_an_extra_that_is_missing_is_named",
    ): {
        "dtype_of_sums(np.dtype(name)).name: None": "name: None",
        "na.attention(x[..., :1, :], x, x,": "na.attention(x[..., :20, :], x, x,",
        '        raise ValueError(f"no GPU': '        raise SystemExit(f"no GPU',
    },
    "test_what_is_compiled_of_tangents_is_all_that_calls_need": {
        "    if pass_ is BACKWARD_TANGENT:": "    if False:",
        'if "tq" in given else None': 'if "tv" not in given else None',
    },
    "test_sums_of_what_a_batch_shares_are_compiled_too": {
        "args.mask, (1, 2)):": "args.mask, (1,)):",
    },
}
