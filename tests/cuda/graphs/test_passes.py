"""Attention over the edges of graphs by the CUDA kernels, without a GPU: against the formula."""

import ml_dtypes
import numpy as np
import pytest

from numbattn import graphs
from numbattn.cuda.build import assemble, compile_ptx
from numbattn.cuda.graphs.passes import GraphBackend
from numbattn.graphs import graph, passes
from tests.graphs.problems import check, check_laplacian
from tests.tools.device import GPU, HOPPER, Program
from tests.tools.launch import compiled_only, mostly_simulated


@pytest.fixture(autouse=True)
def kernels(world, monkeypatch):
    """They run, and rows of more than 3 edges are long, of more than 6 in parts."""
    gpu = GPU(HOPPER)
    monkeypatch.setattr(passes, "imported", lambda name: GraphBackend(lambda: gpu))
    monkeypatch.setattr(graph, "LONG", 3)
    monkeypatch.setattr(graph, "PART", 6)


@pytest.mark.parametrize(("dtype", "seed"), [
    (np.float32, 35),
    *(pytest.param(dtype, seed, marks=pytest.mark.slow) for dtype, seed in (
        (np.float64, 0), (ml_dtypes.bfloat16, 1), (np.float16, 2), (np.float32, 11), (np.float64, 12),
    )),
])  # fmt: skip
def test_random_calls(dtype, seed):
    check(seed, dtype, again=False, most=12)


@pytest.mark.parametrize(("dtype", "seed"), [
    (np.float32, 51),
    *(pytest.param(dtype, seed, marks=pytest.mark.slow) for dtype, seed in (
        (np.float64, 9), (ml_dtypes.bfloat16, 58), (np.float16, 25), (np.float64, 44),
    )),
])  # fmt: skip
def test_random_laplacians(dtype, seed):
    check_laplacian(seed, dtype, most=8)


@mostly_simulated
@pytest.mark.parametrize("softmax", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_hubs(monkeypatch, rng, softmax):
    """A query and a key of many edges, whose parts are merged, and a bias that does not move: as on the CPU."""
    i, j = rng.integers(3, size=(2, 24))
    g, _ = graphs.Graph.from_edges(np.where(i > 1, i, 1), np.where(j > 1, j, 0), (4, 3))
    q, tq, do = rng.standard_normal((3, 4, 2))
    (k, v, tk), bias = rng.standard_normal((3, 3, 2)), rng.standard_normal(24)

    def results():
        o, to, saved, tsaved = graphs.attention_forward_jvp(q, k, v, g, tq, tk, None, bias=bias, softmax=softmax)
        grads, tgrads = graphs.attention_backward_jvp(do, saved, tsaved)
        return [x for x in (o, to, saved.lse, tsaved.tlse, *grads, *tgrads) if x is not None]

    found = results()
    monkeypatch.undo()
    for one, wanted in zip(found, results(), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-12, atol=1e-12)


def test_edges_without_a_key():
    """They count as absent, and their own gradients are 0."""
    g = graphs.Graph(np.array([0, 2, 3, 5]), np.array([0, 1, 1, 2, 0]), 3)
    few = graphs.Graph(np.array([0, 1, 1, 2]), np.array([0, 2]), 3)
    g._set(indices=np.array([0, 3, -1, 2, 70], np.int32))
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 3, 2))
    (o, backprop), (wanted, of_few) = (graphs.attention_vjp(q, k, v, x, bias=np.zeros(x.edges)) for x in (g, few))
    np.testing.assert_allclose(o, wanted, atol=1e-15)
    grads, others = backprop(do), of_few(do)
    for one, other in zip(grads, others):
        np.testing.assert_allclose(one, other, atol=1e-15)
    assert not grads.bias[[1, 2, 4]].any()


def test_without_features():
    """Only lse is computed."""
    g, rng = graphs.Graph(np.array([0, 2, 3]), np.array([0, 1, 1])), np.random.default_rng(0)
    q, k, bias = rng.standard_normal((2, 3)), rng.standard_normal((2, 3)), rng.standard_normal(3)
    o, saved = graphs.attention_forward(q, k, k[:, :0], g, bias=bias)
    S = (q[[0, 0, 1]] * k[[0, 1, 1]]).sum(-1) / 3**0.5 + bias
    np.testing.assert_allclose(saved.lse, [np.logaddexp(S[0], S[1]), S[2]])
    dq, dk, dv = graphs.attention_backward(o, saved, dlse=np.ones(2))
    assert (o.shape, dv.shape) == ((2, 0), (2, 0))
    np.testing.assert_allclose(dq[1], k[1] / 3**0.5)


class Assembling(GPU):
    """A device that assembles kernels and runs none."""

    def __init__(self, device):
        super().__init__(device)
        self.reports = []

    def load(self, plan, names, sum_dtype):
        for source, cc in ((step.key.source(), step.key.cc) for step in plan.steps):
            _, report = assemble(compile_ptx(source, cc), cc)
            self.reports.append((source.function.__name__, report))
        return Program(plan._replace(steps=()), names, None)


@compiled_only
@pytest.mark.parametrize(("dtype", "edges"), [
    (np.float32, ()), *(pytest.param(dtype, edges, marks=pytest.mark.slow) for dtype, edges in (
        (ml_dtypes.bfloat16, ()), (np.float32, ("bias", "factor")), (np.float32, ("bias", "k_edge", "v_edge")),
    )),
])  # fmt: skip
def test_nothing_spills(monkeypatch, dtype, edges):
    """With as many blocks at once as kernels ask for."""
    gpu = Assembling(HOPPER)
    monkeypatch.setattr(passes, "imported", lambda name: GraphBackend(lambda: gpu))
    g = graphs.Graph(np.arange(0, 9, 2), np.zeros(8, int))
    q, k, v, do = (np.ones((2, 4, 64), dtype) for _ in range(4))
    shapes = {"bias": (2, 8), "factor": (2, 8), "k_edge": (2, 8, 64), "v_edge": (2, 8, 64)}
    with np.errstate(all="ignore"):
        _, backprop = graphs.attention_vjp(q, k, v, g, **{name: np.ones(shapes[name], dtype) for name in edges})
        backprop(do)
    names, reports = zip(*gpu.reports, strict=True)
    found = [name for name in names if name != "graph_merge"]
    assert found == ["graph_forward", "graph_delta", "graph_backward", "graph_backward"]
    assert {(report.spill_stores, report.stack) for report in reports} == {(0, 0)}


FAULTS = {
    "(gpu.zeros if adds else gpu.empty)": "(gpu.empty if adds else gpu.empty)",
    "cuda/graphs/plan.py": {"[: len(layout.shape)]          #": "[-len(layout.shape) :]  #"},
    "graphs/graph.py": {
        'ends, numbers, side="right"': 'ends, numbers, side="left"',
        "own[at] * (place == 0)": "own[at]", "np.where(short, numbers, -1)": "numbers",
    },
    "cuda/graphs/steps.py": {
        "other < count": "other < count + 1",
        "(number & 8) != 0, right, left": "(number & 8) != 0, left, right",
        "row_index(LINES, index(lists.parts[1, work]))": "full(LINES, index(lists.parts[1, work]))",
    },
    "cuda/graphs/forward.py": {
        "sum_of_block(l * factor)": "sum_of_block(l)",
        "-np.inf if form.softmax else steps.ACC(0)": "steps.ACC(0)",
        "total2 * O": "total * O",
    },
    "cuda/graphs/backward.py": {"if ADDS else x\n        scatter(array": "if False else x\n        scatter(array"},
}
