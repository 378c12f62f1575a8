"""FlashAttention's own tests: packed sequences, windows, Alibi, dropout, caches in pages; gradients."""

import pytest

from .suites import check_sample


def test_flash_attn(count):
    pytest.importorskip("einops")  # which its tests import
    check_sample(count, "FlashAttention", "flash", "Dao-AILab/flash-attention", "tests/test_flash_attn.py")
