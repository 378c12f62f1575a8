"""Scores of edges: derivatives are those of finite differences, and scores that can be written otherwise are equal."""

import pickle

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import numbattn as na
from numbattn import graphs
from numbattn.cpu import launch

from .scores import Call, assert_close, of_kind

STEP = 1e-5


@pytest.mark.parametrize("softmax", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_derivatives(rng, softmax):
    """First ones by tangents of results, second ones by those of gradients; gradients are transposed tangents."""
    call = Call(rng, softmax=softmax)
    found, ahead, behind = (each.results() for each in (call, call.moved(STEP), call.moved(-STEP)))
    for name, x in found.items():
        if name.startswith("t"):
            sees = np.isfinite(found[name[1:]])
            wanted = (ahead[name[1:]][sees] - behind[name[1:]][sees]) / (2 * STEP)
            assert_allclose(x[sees], wanted, rtol=0, atol=1e-7 * np.abs(wanted).max(), err_msg=name)
    along = (call.x["do"] * found["to"]).sum()
    if softmax:
        sees = np.isfinite(found["lse"])
        along += (call.x["dlse"] * found["tlse"])[sees].sum()
    names = ("q", "k", "v", "bias", "factor", "weight", "strength")
    assert_allclose(sum((found[f"d{name}"] * call.t[name]).sum() for name in names), along, rtol=1e-9)


def test_second_derivatives(rng):
    call = Call(rng)
    found, ahead, behind = (each.second() for each in (call, call.moved(STEP), call.moved(-STEP)))
    o2 = (ahead["to"] - behind["to"]) / (2 * STEP)
    assert_allclose(found["o2"], o2, rtol=0, atol=1e-7 * np.abs(o2).max())


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float16, 0.02), (ml_dtypes.bfloat16, 0.1)])
def test_dtypes(rng, dtype, tolerance):
    call = Call(rng).rounded(dtype)
    assert_close(call.results(np, dtype), call.results(), tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-3), (np.float16, 0.02)])
def test_on_a_gpu(rng, dtype, tolerance):
    """And the same bits from call to call."""
    import cupy

    call = Call(rng, 200, 6000).rounded(dtype)
    found = call.results(cupy, dtype)
    assert_close(found, call.results(), tolerance)
    assert_close(call.second(cupy, dtype), call.second(), tolerance)
    for name, x in call.results(cupy, dtype).items():
        assert_array_equal(x, found[name])


def test_scores_that_can_be_written_otherwise(rng):
    """A bias, an activation, a Softcap, and nothing at all."""
    i, j = rng.integers(5, size=(2, 12))
    g, _ = graphs.Graph.from_edges(i, j, (5, 5))
    (q, k, v, do), bias = rng.standard_normal((4, 2, 5, 4)), rng.standard_normal(12)
    added = graphs.EdgeScore(lambda s, batch, head, edge, i, j, bias: s + bias[edge], arrays=[bias], gradient=True)
    (o, backprop), (wanted, other) = (graphs.attention_vjp(q, k, v, g, **x) for x in ({"score": added}, {"bias": bias}))
    assert_allclose(o, wanted, atol=1e-12)
    grads, others = backprop(do), other(do)
    assert_allclose(grads.score[0], others.bias, atol=1e-12)
    assert_allclose(grads.dq, others.dq, atol=1e-12)
    capped = graphs.EdgeScore(lambda s, batch, head, edge, i, j: 2.0 * np.tanh(s / 2.0))
    for one, two in zip(*(graphs.attention_vjp(q, k, v, g, score=x)[1](do) for x in (capped, na.Softcap(2.0)))):
        assert_allclose(one, two, atol=1e-12)
    relu = graphs.EdgeScore(lambda s, batch, head, edge, i, j: max(s, 0.0))
    o = graphs.attention(q, k, v, g, score=[relu], softmax=False, scale=1.0)
    S = np.maximum(q @ k.swapaxes(-1, -2), 0) * np.asarray([[(g.indices[g.indptr[row] : g.indptr[row + 1]] == key).sum()
                                                            for key in range(5)] for row in range(5)])  # fmt: skip
    assert_allclose(o, S @ v, atol=1e-12)
    assert_array_equal(graphs.attention(q, k, v, g, score=[]), graphs.attention(q, k, v, g))


def test_sums_of_many_edges_do_not_depend_on_threads(rng, monkeypatch):
    n = 3000
    g, _ = graphs.Graph.from_edges(*rng.integers(n, size=(2, 40 * n)), (n, n))
    q, k, v = rng.standard_normal((3, 4, n, 16))
    score = graphs.EdgeScore(of_kind, arrays=[np.ones((2, 4)), np.zeros(g.edges, int)], gradient=[True, False])
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(launch, "_threads", lambda threads=threads: threads)
        o, backprop = graphs.attention_vjp(q, k, v, g, score=score)
        found.append(backprop(o).score[0])
    assert_array_equal(*found)


def test_derivatives_at_hidden_edges(rng):
    """They are 0, where those of the function are infinite."""
    g, (q, k, v) = graphs.Graph(np.array([0, 2, 3, 3]), np.array([0, 2, 1])), rng.standard_normal((3, 3, 4))
    steep = graphs.EdgeScore(lambda s, batch, head, edge, i, j: s - np.exp(-s))
    _, backprop = graphs.attention_vjp(q, k, v, g, bias=np.array([0.0, -np.inf, -np.inf]), score=steep)
    grads, backprop2 = backprop.vjp(v)
    for x in (*grads, grads.bias, *backprop2(q, k, v)):
        assert np.isfinite(x).all()


def test_without_edges(rng):
    """Gradients are zeros."""
    none, (q, k, v) = graphs.Graph(np.zeros(4, int), np.zeros(0, int)), rng.standard_normal((3, 3, 4))
    score = graphs.EdgeScore(of_kind, arrays=[np.ones((2, 1)), np.zeros(0, int)], gradient=[True, False])
    o, backprop = graphs.attention_vjp(q, k, v, none, score=score)
    dweight, nothing = backprop(o).score
    assert_array_equal(dweight, np.zeros((2, 1)))
    assert nothing is None


def unchanged(s, batch, head, edge, i, j):
    return s


def test_wrong_scores(rng):
    g, (q, k, v) = graphs.Graph(np.array([0, 2, 2, 3]), np.array([0, 2, 1])), rng.standard_normal((3, 3, 4))
    plain = na.Score(lambda s, batch, head, i, j: s)
    for error, words, score in (
        (TypeError, r"score: got Score\(.*, expected .*graphs.EdgeScore.*its function has no edge", plain),
        (TypeError, r"score: got Bias\(.*, .*: pass bias=", na.Bias(np.zeros((3, 3)))),
        (TypeError, r"score: got Alibi\(.*, expected numbattn.Softcap, graphs.EdgeScore", [na.Alibi([1.0])]),
        (TypeError, "score: got the class Softcap, expected numbattn.Softcap, graphs.EdgeScore", na.Softcap),
        (TypeError, r"score: got function, .*: pass graphs.EdgeScore\(...\) of it", [plain.function]),
        (TypeError, "score: got numpy.ndarray .*: pass bias=", q),
        (TypeError, "Numba cannot compile", graphs.EdgeScore(lambda s, batch, head, edge, i, j: s + "a")),
    ):
        with pytest.raises(error, match=words):
            graphs.attention(q, k, v, g, score=score)
    with pytest.raises(TypeError, match=r"cannot be called as \(s, batch, head, edge, i, j, \*arrays\)"):
        graphs.EdgeScore(plain.function)
    own = graphs.EdgeScore(unchanged)
    assert pickle.loads(pickle.dumps(own)) == own
    with pytest.raises(TypeError, match=r"got a graphs.EdgeScore, whose function is one of edges"):
        na.attention(q, k, v, score=own)
    with pytest.raises(TypeError, match=r"score: got EdgeScore\(.*, expected a numbattn.Score"):
        na.check_score(own)
    weight = graphs.EdgeScore(of_kind, arrays=[np.ones((2, 1)), np.zeros(3, int)])
    with pytest.raises(NotImplementedError, match=r"tscore\[0\]: got .* whose gradient is not wanted"):
        graphs.attention_jvp(q, k, v, g, q, None, None, score=weight, tscore=[np.ones((2, 1)), None])


FAULTS = {
    "functions/compiled/chain.py": {
        "tF * slope + F * tslope": "tF * slope",
        "slope * ts + shift, F": "slope * ts, F",
        "element + given[number][2], count\n\n    return term\n\n\n@lru": "element, count\n\n    return term\n\n\n@lru",
        "slope * (tds * F + ds * tF)": "slope * (tds * F)",
        "if s != HIDDEN and value != HIDDEN:                 # else": "if True:  # else",
        "two * ts * real(slope_shift_of": "ts * real(slope_shift_of",
    },
    "cpu/edge_score.py": {"sums = score.sums + line // score.rows": "sums = score.sums + 0 * line"},
    "cpu/graphs.py": {"F * tdS + tF * dS": "F * tdS", "scale * (F * dS), weight": "scale * dS, weight"},
    "functions/compiled/reads.py": {"builder.select(every, along, slope)": "slope"},
    "graphs/score.py": {"first += elements_of(part)": "first += 0"},
}
