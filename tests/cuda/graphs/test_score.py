"""Scores of edges by the CUDA kernels, without a GPU: as on the CPU."""

import numpy as np
import pytest

from numbattn.cuda.graphs.passes import GraphBackend
from numbattn.graphs import graph, passes
from tests.graphs.scores import Call, assert_close
from tests.tools.device import GPU, HOPPER
from tests.tools.launch import compiled_only


@pytest.mark.parametrize(("dtype", "tolerance"), [
    (np.float32, 1e-5), pytest.param(np.float64, 1e-12, marks=pytest.mark.slow),
])  # fmt: skip
@compiled_only
def test_scores(rng, world, monkeypatch, dtype, tolerance):
    """Also of rows of more than 3 edges, which are long, and of more than 6, which are in parts."""
    gpu, call = GPU(HOPPER), Call(rng, 4, 14)
    call = call.rounded(dtype)
    wanted = call.results()
    monkeypatch.setattr(passes, "imported", lambda name: GraphBackend(lambda: gpu))
    monkeypatch.setattr(graph, "LONG", 3)
    monkeypatch.setattr(graph, "PART", 6)
    assert_close(call.results(np, dtype), wanted, tolerance)


@pytest.mark.slow
def test_second_derivatives(rng, world, monkeypatch):
    gpu, call = GPU(HOPPER), Call(rng, 3, 8)
    wanted = call.second()
    monkeypatch.setattr(passes, "imported", lambda name: GraphBackend(lambda: gpu))
    monkeypatch.setattr(graph, "LONG", 3)
    assert_close(call.second(), wanted, 1e-12)


FAULTS = {
    "cuda/graphs/steps.py": {
        "read = thread_index() % LANES": "read = 0",
        "at = batch, head, number, i, j": "at = batch, head, i, number, j",
    },
    "cuda/kernels/shared/exact_sums.py": {"total += float(": "total = float("},
    "cuda/graphs/backward.py": {
        "dS * F if HAS_SCORE else dS": "dS",
        "tdS * F + dS * tF": "tdS * F",
        "add_reads(score_sums, S,": "add_reads(score_sums, value,",
    },
}
