"""Random configurations of cuDNN's frontend: layouts with gaps, lengths, packed sequences, pages, masks, scores."""

import pytest

from .suites import checkout, run_sample, version

torch = pytest.importorskip("torch")


def test_random_configurations(count):
    tests = checkout("NVIDIA/cudnn-frontend", "test/python/test_mhas_v2.py")
    found = run_sample("cudnn", tests)
    count("cuDNN frontend", version("NVIDIA/cudnn-frontend"), found, "GPU" if torch.cuda.is_available() else "CPU")
    assert not found.failed
    assert found.passed
