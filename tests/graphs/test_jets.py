"""Tangents, also several at once, and what cannot be one. That they are right is in test_attention.py."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from numbattn import graphs
from numbattn.call.problem import DTYPES

from .problems import check_laplacian

GRAPH = graphs.Graph(np.array([0, 2, 2, 3]), np.array([0, 2, 1]))


def test_several_tangents_are_as_one_by_one(rng):
    q, k, v, do = rng.standard_normal((4, 2, 3, 8))
    tq, tv, bias, tbias = (rng.standard_normal(shape) for shape in ((4, 2, 3, 8), (4, 2, 3, 8), 3, (4, 3)))
    options = {"bias": bias, "softmax": True}
    _, to, saved, tsaved = graphs.attention_forward_jvp(q, k, v, GRAPH, tq, None, tv, tbias=tbias, **options)
    _, tgrads = graphs.attention_backward_jvp(do, saved, tsaved, tdo=to)
    assert repr(tsaved) == "<GraphSavedTangents: 4 tangents of float64, numpy>"
    for number in range(4):
        own = graphs.attention_forward_jvp(
            q, k, v, GRAPH, tq[number], None, tv[number], tbias=tbias[number], **options
        )
        assert_array_equal(to[number], own[1])
        _, wanted = graphs.attention_backward_jvp(do, *own[2:], tdo=own[1])
        for one, other in zip((*tgrads, tgrads.bias), (*wanted, wanted.bias)):
            assert_array_equal(one[number], other)
    for none in graphs.attention_jvp(q, k, v, GRAPH, tq[:0], None, None)[1:]:
        assert none.shape == (0, 2, 3, 8)


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.sampled_from(DTYPES))
def test_random_laplacians(seed, dtype):
    check_laplacian(seed, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_laplacians_on_a_gpu(dtype, seed):
    import cupy

    check_laplacian(seed, dtype, cupy)


@pytest.mark.parametrize("softmax", [True, False])
def test_the_laplacian_by_differences(rng, softmax):
    shapes = {"q": (2, 3, 8), "k": (2, 3, 8), "v": (2, 3, 4), "bias": (3,), "factor": (2, 3), "k_edge": (3, 8),
              "v_edge": (3, 4)}  # fmt: skip
    x, t, step = *({name: rng.standard_normal(shape) for name, shape in shapes.items()} for _ in range(2)), 1e-4

    def call(function, x, *along, **options):
        nodes = [each[name] for each in (x, *along) for name in "qkv"]
        options |= {name: x[name] for name in (*x,)[3:]}
        return function(*nodes[:3], GRAPH, *nodes[3:], softmax=softmax, **options)

    _, jo, lo = call(graphs.attention_laplacian, x, {name: a[None] for name, a in t.items()},
                     **{f"j{name}": t[name][None] for name in (*t,)[3:]})  # fmt: skip
    ahead, behind = (call(graphs.attention_jvp, {name: a + h * t[name] for name, a in x.items()}, t,
                          **{f"t{name}": t[name] for name in (*t,)[3:]})[1] for h in (step, -step))  # fmt: skip
    assert_allclose(lo, (ahead - behind) / (2 * step), atol=1e-6)
    o, none, zero = call(graphs.attention_laplacian, x, dict.fromkeys("qkv"))
    assert_array_equal(o, call(graphs.attention, x))
    assert none.shape == (0, *o.shape)
    assert not zero.any()
    with pytest.raises(ValueError, match=r"jq: got the shape \(2, 3, 8\), expected .* after an axis of tangents"):
        call(graphs.attention_laplacian, x, x)
    with pytest.raises(ValueError, match=r"lbias: got .* without bias"):
        graphs.attention_laplacian(x["q"], x["k"], x["v"], GRAPH, None, None, None, lbias=x["bias"])


def test_wrong_tangents(rng):
    q, k, v = rng.standard_normal((3, 3, 8))
    for error, words, arguments, options in (
        (ValueError, "tbias: got .* without bias, whose tangent it is", (q, k, v), {"tbias": np.zeros(3)}),
        (ValueError, r"tk: got the shape \(2, 3, 8\).*tq has no axis", (q, np.stack([k, k]), v), {}),
        (TypeError, "tv: got float32, expected float64, the dtype of v", (q, k, v.astype(np.float32)), {}),
    ):
        with pytest.raises(error, match=words):
            graphs.attention_jvp(q, k, v, GRAPH, *arguments, **options)
    _, _, saved, tsaved = graphs.attention_forward_jvp(q, k, v, GRAPH, q, k, v)
    _, other = graphs.attention_forward(q[:, :4], k[:, :4], v, GRAPH)
    with pytest.raises(ValueError, match=r"tsaved: got .* of another call"):
        graphs.attention_backward_jvp(v, other, tsaved)
    with pytest.raises(TypeError, match="tsaved: got 3"):
        graphs.attention_backward_jvp(v, saved, 3)
    with pytest.raises(ValueError, match=r"tdlse: got .* without dlse"):
        graphs.attention_backward_jvp(v, saved, tsaved, tdlse=np.zeros(3))


FAULTS = {
    "x[number] if several and x is not None": "x[0] if several and x is not None",
    "tdlse is not None and dlse is None": "False",
    "tsaved.problem != saved.problem": "False",
    "rounded(lo, dtype)": "lo",
    "graphs/edge.py": {"half + half": "half", "bend * (tS * tS)": "tS * tS"},
    "graphs/passes.py": {"2 * tlse[..., None]": "tlse[..., None]"},
    "cpu/graphs.py": {"address_of(O2), -total2": "address_of(O2), -total"},
    "graphs/test_attention.py::test_random_calls_in_float64": {"tsaved.to, dlse=tsaved.tlse": "tsaved.to, dlse=None"},
}
