"""Random configurations of cuDNN's frontend: layouts with gaps, lengths, packed sequences, pages, masks, scores."""

from .suites import check_sample


def test_random_configurations(count):
    check_sample(count, "cuDNN frontend", "cudnn", "NVIDIA/cudnn-frontend", "test/python/test_mhas_v2.py")
