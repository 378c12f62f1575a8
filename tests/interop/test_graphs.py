"""Attention over graphs in torch, autograd and thinc: first and second derivatives are those of finite differences. JAX
has a process of its own, in_jax_graphs.py."""

import numpy as np
import pytest

import numbattn as na
from numbattn import graphs
from numbattn.graphs import EdgeScore

from .over_graphs import Call, bending

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")  # by torch itself


@pytest.mark.parametrize("softmax", [True, False])
def test_torch(rng, softmax):
    torch = pytest.importorskip("torch")
    from numbattn.interop.torch import graph_attention

    call = Call(rng)
    arrays = [torch.tensor(x, requires_grad=True) for x in call.arrays.values()]
    f = call.of(graph_attention, softmax)
    np.testing.assert_array_equal(f(*arrays).detach(), call.of(graphs.attention, softmax)(*call.arrays.values()))
    assert torch.autograd.gradcheck(f, arrays, check_forward_ad=True, check_batched_grad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, arrays, fast_mode=True)


@pytest.mark.gpu
def test_torch_on_a_gpu(rng):
    cupy, torch = pytest.importorskip("cupy"), pytest.importorskip("torch")
    from numbattn.interop.torch import graph_attention

    call = Call(rng)
    graph = graphs.Graph(cupy.asarray(call.graph.indptr), cupy.asarray(call.graph.indices))
    arrays = [torch.tensor(x, requires_grad=True, device="cuda") for x in call.arrays.values()]
    f = call.of(graph_attention, graph=graph)
    assert torch.autograd.gradcheck(f, arrays, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, arrays, fast_mode=True)
    q, k, v = arrays[:3]
    found = (graph_attention(q, k, v, graph, score=EdgeScore(bending, arrays=[x]))
             for x in (np.ones(4), torch.ones(4, dtype=q.dtype, device="cuda")))
    torch.testing.assert_close(*found)


def test_torch_maps_and_compiles(rng):
    """vmap adds a batch axis; a compiled function breaks its graph."""
    torch = pytest.importorskip("torch")
    from numbattn.interop.torch import graph_attention

    call, own = Call(rng), torch.tensor(rng.standard_normal((3, 9)))
    q, k, v = (torch.tensor(call.arrays[name]) for name in "qkv")

    def loss(bias):
        return graph_attention(q, k, v, call.graph, bias=bias).square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss))(own)
    for one, bias in zip(mapped, own):
        torch.testing.assert_close(one, torch.func.grad(loss)(bias))
    torch.testing.assert_close(torch.compile(loss, backend="eager")(own[0]), loss(own[0]))
    with pytest.raises(TypeError, match=r"bias: got numpy.ndarray of float64, expected a torch.Tensor"):
        graph_attention(q, k, v, call.graph, bias=np.zeros(9))


def test_autograd(rng):
    pytest.importorskip("autograd", reason="autograd is not installed")
    from autograd.test_util import check_grads

    from numbattn.interop.autograd import graph_attention

    call = Call(rng)
    check_grads(call.of(graph_attention), modes=["rev", "fwd"], order=1)(*call.arrays.values())
    check_grads(call.of(graph_attention, softmax=False), modes=["rev"], order=2)(*call.arrays.values())


@pytest.mark.parametrize("library", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_thinc(rng, library):
    """A layer does what `graphs.attention_vjp` does, and learns its score."""
    thinc = pytest.importorskip("thinc.api", reason="thinc is not installed")
    from numbattn.interop.thinc import graph_attention

    with thinc.use_ops(library):
        ops = thinc.get_ops(library)
        g = graphs.Graph(ops.asarray(np.array([0, 2, 2, 3])), ops.asarray(np.array([0, 2, 1])))
        x, dy, bias = (ops.asarray(rng.standard_normal(shape), dtype="f") for shape in ((3, 24), (3, 8), (3,)))
        score = [EdgeScore(bending, arrays=[ops.asarray([0.5, 0.25], dtype="f")], gradient=True), na.Softcap(2.0)]
        model = graph_attention(2, score=score, scale=0.7)
        y, backprop = model.begin_update((x, g, {"bias": bias}))
        dx, none, edges = backprop(dy)
    qkv = x.reshape(3, 3, 2, 4).transpose(1, 2, 0, 3)
    o, wanted = graphs.attention_vjp(*qkv, g, bias=bias, score=score, scale=0.7)
    grads = wanted(dy.reshape(3, 2, 4).swapaxes(0, 1))
    assert none is None
    assert (y == o.swapaxes(0, 1).reshape(3, 8)).all()
    assert (edges["bias"] == grads.bias).all()
    assert (model.get_grad("array0") == grads.score[0]).all()
    assert (dx == ops.xp.stack(grads).transpose(2, 0, 1, 3).reshape(3, 24)).all()


FAULTS = {
    'own["wanted"] += (True,)': 'own["wanted"] += (False,)',
    'of_score, "t"))': '[None] * len(of_score), "t"))',
    "list(tscore[:first])": "[None] * first",
}
