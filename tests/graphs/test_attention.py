"""Attention over the edges of a graph is that of the formula, edge by edge; and its gradients, and theirs."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from numbattn import graphs, reference
from numbattn.call.problem import DTYPES

from .problems import check

SEEDS = st.integers(0, 2**32)


@settings(max_examples=25)
@given(SEEDS)
def test_random_calls_in_float64(seed):
    check(seed, np.float64)


@settings(max_examples=15)
@given(SEEDS, st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]))
def test_random_calls(seed, dtype):
    check(seed, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_calls_on_a_gpu(dtype, seed):
    import cupy

    check(seed, dtype, cupy)


@pytest.mark.gpu
def test_in_a_cuda_graph(rng):
    """The same bits; its lists are made before."""
    import cupy

    from ..tools.graphs import capture, own_stream

    i, j = rng.integers(50, size=(2, 3000))
    q, k, v, do, bias = map(cupy.asarray, (*rng.standard_normal((4, 2, 50, 16)), rng.standard_normal(3000)))

    def call(g):
        o, backprop = graphs.attention_vjp(q, k, v, g, bias=bias)
        grads, backprop2 = backprop.vjp(do)
        return o, *grads, grads.bias, *backprop2(q, k, v)

    g, _ = graphs.Graph.from_edges(cupy.asarray(i), cupy.asarray(j), (50, 50))
    wanted, other = call(g), graphs.Graph(g.indptr, g.indices)
    with own_stream() as stream:
        found, graph = capture(lambda: call(g))
        graph.launch()
        stream.synchronize()
        stream.begin_capture()
        with pytest.raises(ValueError, match="graph: its lists are made"):
            call(other)
        stream.end_capture()
    for one, other in zip(found, wanted, strict=True):
        assert_array_equal(one.get(), other.get())


def test_many_edges(rng):
    """Several threads."""
    n = 3000
    g, _ = graphs.Graph.from_edges(*rng.integers(n, size=(2, 40 * n)), (n, n))
    q, k, v = rng.standard_normal((3, 4, n, 16))
    o, backprop = graphs.attention_vjp(q, k, v, g)
    for number in (0, n - 1):
        keys = g.indices[g.indptr[number] : g.indptr[number + 1]]
        wanted, _ = reference.attention_forward(q[:, number, None], k[:, keys], v[:, keys])
        assert_allclose(o[:, number], wanted[:, 0], atol=1e-12)
    dq, dk, dv = backprop(o)
    assert_allclose((q * dq).sum(), (k * dk).sum(), rtol=1e-9)          # the energy depends on q . k alone
    assert_allclose((v * dv).sum(), (o * o).sum(), rtol=1e-9)


def test_a_graph_of_all_pairs_is_dense(rng):
    q, k, v, do = rng.standard_normal((4, 2, 5, 8))
    g = graphs.Graph(np.arange(0, 26, 5), np.tile(np.arange(5), 5))
    o, backprop = graphs.attention_vjp(q, k, v, g)
    assert_allclose(o, reference.attention_forward(q, k, v)[0], atol=1e-12)
    for one, other in zip(backprop(do), reference.attention_backward(do, q, k, v)):
        assert_allclose(one, other, atol=1e-12)


def test_hidden_edges_and_lonely_queries(rng):
    """A bias of -inf hides an edge, and a query whose edges are all hidden has none; nothing is NaN."""
    g = graphs.Graph(np.array([0, 2, 4, 4]), np.array([0, 1, 1, 2]))
    q, k, v, do = rng.standard_normal((4, 3, 8))
    bias = np.array([-np.inf, -np.inf, 0.3, -np.inf])
    o, backprop = graphs.attention_vjp(q, k, v, g, bias=bias, factor=np.full(4, 2.0))
    assert_array_equal(backprop.saved.lse[[0, 2]], -np.inf)
    assert_array_equal(o, [np.zeros(8), 2 * v[1], np.zeros(8)])
    (dq, dk, dv), backprop2 = backprop.vjp(do, np.ones(3))
    assert not dq[[0, 2]].any()
    assert_array_equal(dv, [np.zeros(8), 2 * do[1], np.zeros(8)])
    assert_allclose(dq[1], k[1] / 8**0.5)                               # by lse
    for x in (dk, *backprop2(q, k, v, ddfactor=np.ones(4))):
        assert np.isfinite(x).all()


@pytest.mark.parametrize("at", [0, 1])
def test_scores_that_are_nan_show(at):
    """Wherever among a query's edges, as in diverged training."""
    k = np.ones((2, 2))
    k[at] = np.nan
    o, saved = graphs.attention_forward(np.ones((1, 2)), k, np.eye(2), graphs.Graph(np.array([0, 2]), np.arange(2), 2))
    dq, _, dv = graphs.attention_backward(o, saved)
    assert all(np.isnan(x).all() for x in (o, saved.lse, dq, dv))


def test_out(rng):
    g = graphs.Graph(np.array([0, 1, 2]), np.array([1, 0]))
    for dtype in (np.float32, np.float16):
        q, k, v = rng.standard_normal((3, 2, 8)).astype(dtype)
        out = np.empty((2, 16), dtype)[:, ::2]
        assert graphs.attention(q, k, v, g, out=out) is out
        assert_array_equal(out, v[::-1])
    none = graphs.Graph(np.zeros(3, int), np.zeros(0, int))
    assert not graphs.attention(q, k, v, none, out=out).any()
    with pytest.raises(ValueError, match="out: overlaps bias"):
        graphs.attention(q, k, v, g, bias=out[:, 0], out=out)
    score = graphs.EdgeScore(lambda s, batch, head, edge, i, j, x: s + x[i], arrays=[w := np.zeros((2, 8))[:, 0]])
    with pytest.raises(ValueError, match=r"out: overlaps EdgeScore arrays\[0\]"):
        graphs.attention(*np.zeros((3, 2, 8)), g, score=score, out=w.base)
    out = np.zeros((2, 8))
    g = graphs.Graph(np.array([0, 1, 2]), out.view(np.int32)[0, :2])    # kernels would read what they write for a key
    with pytest.raises(ValueError, match="out: overlaps Graph indices"):
        graphs.attention(*np.zeros((3, 2, 8)), g, out=out)


def test_wrong_arguments(rng):
    g = graphs.Graph(np.array([0, 1, 3]), np.array([1, 0, 2]), 3)
    q, k, v = (rng.standard_normal((4, n, 8)) for n in (2, 3, 3))
    for error, words, arguments, options in (
        (TypeError, "graph: got numpy.ndarray of float64, expected a graphs.Graph", (q, k, v, q), {}),
        (ValueError, "q: got 3 rows, expected 2, as many as the graph has queries", (k, k, v, g), {}),
        (ValueError, "k: got 2 rows, expected 3, as many as the graph has keys", (q, q, q, g), {}),
        (TypeError, "v: got float32, expected float64, the dtype of q", (q, k, v.astype(np.float32), g), {}),
        (TypeError, "softmax: got 1", (q, k, v, g), {"softmax": 1}),
        (TypeError, "bias: got float32, expected float64", (q, k, v, g), {"bias": np.zeros(3, np.float32)}),
        (ValueError, r"bias: got the shape \(2,\), expected .*\(4, 3\)", (q, k, v, g), {"bias": np.zeros(2)}),
        (ValueError, r"k_edge: got the shape \(3, 7\)", (q, k, v, g), {"k_edge": np.zeros((3, 7))}),
        (ValueError, r"v_edge: got the shape \(3, 3, 8\)", (q, k, v, g), {"v_edge": np.zeros((3, 3, 8))}),
        (ValueError, "scale: got -1", (q, k, v, g), {"scale": -1.0}),
    ):
        with pytest.raises(error, match=words):
            graphs.attention(*arguments, **options)
    _, backprop = graphs.attention_vjp(q, k, v, g, softmax=False)
    with pytest.raises(ValueError, match=r"dlse: got .* without a softmax"):
        backprop(q, np.zeros((4, 2)))
    with pytest.raises(ValueError, match="do: got the shape"):
        backprop(k)
    with pytest.raises(TypeError, match="saved: got 3"):
        graphs.attention_backward(q, 3)


FAULTS = {
    "graphs/edge.py": {
        "slope * (factor * dP - D), P * dP": "slope * (dP - D), P * dP",
        "P * dP\n\n": "slope * dP\n\n",
    },
    "graphs/problem.py": {
        "x.dtype != q.dtype": "False",
        "test_out": {"    if out is not None:": "    if False:", "(graph, *parts)": "parts"},
    },
    "graphs/passes.py": {"o[...] = 0": "pass"},
    "cpu/edges.py": {
        "if lse != -np.inf else zero": "if True else zero",
        "right if number // 8 % 2 else left": "left if number // 8 % 2 else right",
        "buffer[c] = x[0, c] + y[0, c]": "buffer[c] = x[0, c]",
    },
    "cpu/graphs.py": {
        "if -np.inf != S else real(0)": "if m > -np.inf else real(0)",
        "l *= alpha": "pass",
        "at, Z * dfactor, zeros)": "at, dfactor, zeros)",
        "np.int64(numbers[entry])": "np.int64(entry)",
        "Record(first, factors)": "Record(0, factors)",
        "found[0], k, zeros)": "found[0], q, zeros)",
    },
}
