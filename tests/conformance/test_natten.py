"""NATTEN's own tests of neighbourhoods: windows, strides, dilation, causal axes, GQA; gradients."""

from .suites import check_sample


def test_fna(count):
    check_sample(count, "NATTEN", "natten", "SHI-Labs/NATTEN", "tests/test_fna.py")
