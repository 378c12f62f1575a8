"""FlashAttention's own tests: packed sequences, windows, Alibi, dropout, caches in pages; gradients."""

import pytest

from .suites import checkout, run_sample, version

torch = pytest.importorskip("torch")
pytest.importorskip("einops")  # which its tests import


def test_flash_attn(count):
    tests = checkout("Dao-AILab/flash-attention", "tests/test_flash_attn.py")
    found = run_sample("flash", tests)
    count("FlashAttention", version("Dao-AILab/flash-attention"), found, "GPU" if torch.cuda.is_available() else "CPU")
    assert not found.failed
    assert found.passed
