"""Attention of JAX's arrays over graphs: derivatives are those of finite differences. Run by test_jax.py."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.test_util import check_grads

from numbattn import graphs
from numbattn.interop.jax import graph_attention

from .over_graphs import Call

jax.config.update("jax_enable_x64", True)


@pytest.mark.parametrize("softmax", [True, False])
def test_derivatives(rng, softmax):
    call = Call(rng)
    f, arrays = call.of(graph_attention, softmax), [jnp.asarray(x) for x in call.arrays.values()]
    np.testing.assert_array_equal(f(*arrays), call.of(graphs.attention, softmax)(*call.arrays.values()))
    check_grads(f, arrays, order=1, modes=["rev", "fwd"])
    check_grads(f, arrays, order=2, modes=["rev"])


def test_compiled_and_mapped(rng):
    call = Call(rng)
    q, k, v = (jnp.asarray(call.arrays[name]) for name in "qkv")
    own = jnp.asarray(rng.standard_normal((3, 9)))

    def loss(bias):
        return (graph_attention(q, k, v, call.graph, bias=bias) ** 2).sum()

    mapped = jax.jit(jax.vmap(jax.grad(loss)))(own)
    for one, bias in zip(mapped, own):
        np.testing.assert_allclose(one, jax.grad(loss)(bias), rtol=1e-12)
    with pytest.raises(ValueError, match=r"bias: got the shape \(8,\)"):
        jax.jit(loss)(own[0, :8])


@pytest.mark.gpu
def test_on_a_gpu(rng):
    import cupy

    call = Call(rng)
    g = graphs.Graph(cupy.asarray(call.graph.indptr), cupy.asarray(call.graph.indices))
    arrays = [jnp.asarray(x) for x in call.arrays.values()]
    found = jax.jit(call.of(graph_attention, graph=g))(*arrays)
    np.testing.assert_allclose(found, call.of(graphs.attention)(*call.arrays.values()), rtol=1e-12)
    check_grads(call.of(graph_attention, graph=g), arrays, order=2, modes=["rev"])
