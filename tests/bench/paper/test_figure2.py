import json
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
from paper import figure2, io_model
from paper.figure2 import BLOCK_SIZES, SPECS, Case

import numbattn as na
from numbattn.cuda.build import assemble, compile_ptx
from numbattn.cuda.kernels.tables import Tiles
from tests.cuda.works import work
from tests.tools.device import AMPERE, HOPPER, execute, on
from tests.tools.launch import world_of

LENGTH = 4096
CSV = '''==PROF== Connected to process 1
"ID","Kernel Name","dram__bytes.sum","l1tex__m_xbar2l1tex_read_bytes.sum","lts__t_bytes.sum"
"","","byte","byte","byte"
"0","delta","1,000","10","100"
"1","forward","2000","20.5","200"
'''


def test_script(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figure2, "SAMPLE_SECONDS", 0)
    monkeypatch.setattr(figure2, "cupy", None)
    monkeypatch.setattr(figure2, "SHARES", [0.5, 1.0])
    path = tmp_path / "figure2.json"
    figure2.main(["--rounds", "1", "--json", str(path)])
    assert "ideal ms" in capsys.readouterr().out
    parts = {part: [x for x in json.loads(path.read_text())["records"] if x["part"] == part] for part in figure2.PARTS}
    assert [x["peer"] for x in parts["left"]] == ["standard", "flash"]
    assert all(x["seconds"] > 0 and x["measured"] == {"not measured": "not asked for"} for x in parts["left"])
    assert [x["tile_m"] for x in parts["block-size"]] == [row.tile_m for row in BLOCK_SIZES]
    dense, half, full = parts["sparsity"]
    assert full["ideal"] == dense["seconds"]
    assert half["ideal"] == pytest.approx(half["visible"] * dense["seconds"])


@pytest.mark.parametrize("row", [
    pytest.param(row, marks=[pytest.mark.slow] * (number % 3 > 0)) for number, row in enumerate(BLOCK_SIZES)
], ids=str)  # fmt: skip
def test_block_sizes_spill_nothing(row):
    spec, problem = SPECS[type(row)], work("float16", 64, 64, device=HOPPER, keys=LENGTH, seqlen_k=LENGTH)
    source, cc = spec.factory(**spec.parameters(problem, row)), spec.cc(HOPPER)
    _, report = assemble(compile_ptx(source, cc), cc)
    assert source.shared <= HOPPER.shared
    assert (report.spills, report.stack, report.losses) == (0, 0, ())


@pytest.mark.parametrize(("device", "row"), [(AMPERE, Tiles("mma", 32, 64, 64)), (HOPPER, BLOCK_SIZES[-3])], ids=str)
def test_always_takes_the_row_and_results_are_right(device, row):
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 192, 64)).astype(np.float16)
    taken = []

    def noted(key, source, grid, *arguments):
        taken.append(dict(key.parameters)["tile_n"])
        execute(key, source, grid, *arguments)

    with world_of("simulated"), on(device, noted) as gpu, figure2.always(row, "numpy", lambda: gpu):
        o = na.attention(q, k, v)
    assert taken == [row.tile_n]
    np.testing.assert_allclose(o, na.attention(*(x.astype(np.float64) for x in (q, k, v))), atol=2e-3)


def test_counters_are_summed_over_kernels():
    assert figure2.read_counters(CSV) == {"dram": 3000, "l2": 300, "l2 to SM": 30.5, "kernels": 2}


@pytest.mark.parametrize(("answer", "expected"), [
    ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\nmore", "==ERROR== ERR_NVGPUCTRPERM"),
    ("", "ncu says nothing"),
    ("Traceback\nImportError: no", "ImportError: no"),
])  # fmt: skip
def test_what_ncu_cannot_measure_is_told(answer, expected, monkeypatch):
    monkeypatch.setattr(figure2.shutil, "which", lambda name: name)
    monkeypatch.setattr(figure2.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=answer, stderr=""))
    case = Case("flash", "both", (1, 1, 64, 64), "float16")
    assert figure2.measured_bytes(case)["not measured"].startswith(expected)

    def run(*_, **__):
        raise subprocess.TimeoutExpired("ncu", 1)

    monkeypatch.setattr(figure2.subprocess, "run", run)
    assert "longer than" in figure2.measured_bytes(case)["not measured"]
    monkeypatch.setattr(figure2.shutil, "which", lambda name: None)
    assert figure2.measured_bytes(case) == {"not measured": "ncu is not installed"}


def test_measured_bytes_of_a_case_that_travels(monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command)
        return SimpleNamespace(stdout=CSV, stderr="")

    monkeypatch.setattr(figure2.shutil, "which", lambda name: name)
    monkeypatch.setattr(figure2.subprocess, "run", run)
    case = Case("flash", "forward", (1, 1, 64, 64), "float16", 2)
    assert figure2.measured_bytes(case)["dram"] == 3000
    assert Case(*json.loads(commands[0][-1]))._replace(shape=case.shape) == case


@pytest.mark.parametrize("cc", [(9, 0), (8, 0)])
def test_predictions_have_the_bytes_of_the_visible_share(cc):
    shape = 2, 2, 1024, 64
    dense, half = (figure2.predicted_bytes(Case("flash", "forward", shape, "float16", share=share), cc)
                   for share in (1.0, 0.5))  # fmt: skip
    visible = float(Case("flash", "forward", shape, "float16", share=0.5).mask.blocks.mean())
    nd = io_model.Shape(*shape).nd * 4
    assert half["l2 to SM"] - nd == pytest.approx(visible * (dense["l2 to SM"] - nd))
    assert half["flops"] == visible * dense["flops"]
