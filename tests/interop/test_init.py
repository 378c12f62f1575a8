"""Modules that load when they are asked for, and what errors say to those who call from another library."""

import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

import numbattn as na

MISSING = """
import sys
sys.modules["torch"] = None  # as if it were not there
import numbattn as na
na.interop.torch
"""


def test_a_module_is_imported_when_asked_for():
    pytest.importorskip("autograd")
    assert callable(na.interop.autograd.attention)
    with pytest.raises(AttributeError, match=r"module 'numbattn\.interop' has no attribute 'tensorflow'"):
        na.interop.tensorflow  # noqa: B018


def test_a_framework_that_is_missing_is_named():
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == ("ModuleNotFoundError: torch not found. numbattn.interop.torch needs pip "
                                            "install 'numbattn[torch]'")  # fmt: skip


TENSORS = {
    "floats as a mask": (lambda x: {"mask": x}, r"mask: got torch.Tensor of torch.float32, .* boolean array, True = "),
    "offsets": (lambda x: {"mask": na.Segments(x[0])}, "queries: got torch.Tensor of torch.float32, .* integer array$"),
    "a function": (lambda x: {"mask": lambda batch, head, i, j: True}, "mask: got function, .* into numbattn.Where"),
    "a score": (lambda x: {"score": x}, r"score: got torch.Tensor of torch.float32, .* numbattn.Bias\(...\) of it"),
    "scale": (lambda x: {"scale": x[0, 0]}, "scale: got torch.Tensor of torch.float32, .* pass q . scale with"),
}


@pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
def test_tensors_are_told_in_words_of_torch():
    import torch

    q = torch.ones(2, 5, 4)
    for options, message in TENSORS.values():
        with pytest.raises(TypeError, match=message):
            na.interop.torch.attention(q, q, q, **options(torch.zeros(5, 5)))
    with pytest.raises(TypeError, match=r"q: got int64, .*; pass q.to\(torch.float32\)$"):
        na.interop.torch.attention(*[q.long()] * 3)
    with pytest.raises(TypeError, match=r"k: got bfloat16, expected float32, .*; pass k.to\(torch.float32\)$"):
        na.interop.torch.attention(q, q.bfloat16(), q)
    with pytest.raises(TypeError, match=r"pass q.astype\(np.float32\)$"):
        na.attention(*[np.ones((5, 4), int)] * 3)


FAULTS = {
    "if name not in MODULES": "if False",
    "base/checks.py": {
        "test_tensors_are_told_in_words_of_torch": {
            "if _is_called_by_torch():": "if False:",
            'return "" if is_foreign(x) else': "return",
        },
    },
}
