import subprocess
import sys

import numpy as np

from numbattn import __main__ as main
from numbattn import cpu


def test_it_checks_this_machine():
    done = subprocess.run([sys.executable, "-m", "numbattn"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "all results agree" in done.stdout
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        for name in ("forward", "backward"):
            assert any(line.split()[:3] == ["cpu", dtype, name] for line in done.stdout.splitlines())
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_wrong_result_is_reported(monkeypatch, capsys):
    right = cpu.forward

    def wrong(problem, inputs, out):
        o, saved = right(problem, inputs, out)
        o[..., 0] = np.nan
        return o, saved

    monkeypatch.setattr(cpu, "forward", wrong)
    assert main.main() == 1
    assert "WRONG" in capsys.readouterr().out
