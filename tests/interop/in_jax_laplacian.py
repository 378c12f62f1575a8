"""The forward Laplacian of attention in JAX, alone and by folx, and its transpose. `test_jax.py` runs this file in a
process of its own."""

from functools import partial

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import numbattn as na
from numbattn.graphs import EdgeScore, Graph
from numbattn.interop.jax import attention, attention_laplacian, graph_attention, points, register_folx
from numbattn.interop.jax.folx import first_layer
from numbattn.points import Gaussian

from .in_jax import assert_close, assert_same
from .in_jax_vmap import SAMPLES, assert_as_alone

HEADS, M, N, D, COORDINATES = 2, 5, 6, 4, 7
SHAPES = (HEADS, M, D), (HEADS, N, D), (HEADS, N, D)
OPTIONS = {"causal": True, "score": [na.Softcap(2.0), na.Alibi(np.array([0.5, 0.25]))]}


def drawn(rng, *lead):
    """q, k, v, their derivatives and their Laplacians."""
    return [rng.standard_normal((*lead, *t, *shape)) for t in ((), (COORDINATES,), ()) for shape in SHAPES]


@pytest.mark.parametrize("missing", [(), (4,), (3, 4, 5), (6, 7, 8)])
def test_it_is_numbattns_own(rng, missing):
    arrays = [None if i in missing else x for i, x in enumerate(drawn(rng))]
    expected = na.attention_laplacian(*arrays, **OPTIONS)
    for function in (partial(attention_laplacian, **OPTIONS), jax.jit(partial(attention_laplacian, **OPTIONS))):
        assert_same(function(*arrays), expected)


def test_of_particles(rng):
    arrays, particle = drawn(rng), (np.array([0, -1, 2, 2, 0]), [1, 1, 0, 3, -1, 3])
    expected = na.attention_laplacian(*arrays, particle=particle, causal=True)
    function = jax.jit(partial(attention_laplacian, particle=particle, causal=True))
    assert_same(function(*arrays), expected)
    walkers = drawn(rng, SAMPLES)
    assert_as_alone(function, (0,) * 9, *walkers)
    with pytest.raises(ValueError, match=r"particle: got the shape \(5,\), expected \(6,\), one for each row of k"):
        attention_laplacian(*arrays, particle=range(5))
    with pytest.raises(NotImplementedError, match="particle: got one with Softcap"):
        jax.make_jaxpr(partial(attention_laplacian, particle=particle, **OPTIONS))(*arrays)


@pytest.mark.parametrize("options", [OPTIONS, {"dropout": na.Dropout(0.3, 1)}], ids=["", "dropout"])
def test_walkers_are_as_alone(rng, options):
    function, arrays = partial(attention_laplacian, **options), drawn(rng, SAMPLES)
    assert_as_alone(function, (0,) * 9, *arrays)
    apart = [x if i in (0, 4) else x[0] for i, x in enumerate(arrays)]
    assert_as_alone(function, [0 if i in (0, 4) else None for i in range(9)], *apart, jit=lambda function: function)


REFUSED = {
    "shape": (lambda x: (*x[:3], x[4]), ValueError, r"jq: got the shape \(7, 2, 6, 4\), expected \(7, 2, 5, 4\)"),
    "laplacian": (lambda x: (*x[:6], x[7]), ValueError, "lq: got the shape"),
    "dtype": (lambda x: (*x[:3], x[3].astype("f")), TypeError, "jq: got float32, expected float64, the dtype of q"),
    "a list": (lambda x: (*x[:3], [1.0]), TypeError, "jq: got list, expected a jax.Array"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit(rng, name):
    change, error, message = REFUSED[name]
    given = change(drawn(rng))
    given = *given, *[None] * (6 - len(given))
    with pytest.raises(error, match=message):
        jax.make_jaxpr(lambda q: attention_laplacian(q, *given[1:]))(given[0])


def test_it_has_no_derivatives(rng):
    q, *others = drawn(rng)
    with pytest.raises(NotImplementedError, match="third derivatives"):
        jax.grad(lambda q: attention_laplacian(q, *others)[2].sum())(q)


# --------------------------------------------------------------------------------------------------------------- folx
@pytest.fixture
def folx():
    return pytest.importorskip("folx")


WEIGHTS = np.random.default_rng(0).standard_normal((3, HEADS * D))
CONSTANT = np.random.default_rng(1).standard_normal((HEADS, N, D))


def network(electrons, **options):
    """A number: one attention of all electrons, and one of two of them with keys that depend on none."""
    q = jnp.tanh(electrons.reshape(M, 3) @ WEIGHTS).reshape(M, HEADS, D).swapaxes(0, 1)
    few = attention(q[:, :2], CONSTANT, CONSTANT, **options)
    return attention(q, q * 1.1, jnp.sin(q), **options).sum() + (few**2).sum()


def of_samples(electrons):
    """A number, of attention in a vmap, each sample with a dropout of its own."""
    x = jnp.tanh(electrons.reshape(SAMPLES, M, 1) * jnp.arange(1.0, D + 1))
    return (jax.vmap(lambda x: attention(x, x, x, dropout=na.Dropout(0.4, 3)))(x) ** 2).sum()


def biased(electrons):
    """A number, of attention whose bias depends on distances."""
    x = electrons.reshape(M, 3)
    bias = jnp.exp(-((x[:, None] - x) ** 2).sum(-1)) * jnp.arange(1.0, HEADS + 1)[:, None, None]
    q = jnp.tanh(x @ WEIGHTS).reshape(M, HEADS, D).swapaxes(0, 1)
    return attention(q, q, q, score=na.Bias(bias, gradient=True), causal=True).sum()


def of_others(electrons, **options):
    """A number, of attention of electrons in another order to fewer of them, some of which have no q."""
    x = jnp.tanh(electrons.reshape(M, 3)[::-1] @ WEIGHTS).reshape(M, HEADS, D).swapaxes(0, 1)
    o = attention(x[:, :3], x[:, 2:4], jnp.sin(x[:, 2:4]), **options)
    return (o**2).sum() + (attention(x[:, :N], CONSTANT, CONSTANT) ** 2 + attention(x, x, CONSTANT[:, :M])).sum()


def of_sums(electrons):
    """A number, of attention whose rows depend on two electrons each, or whose k and v do on different ones."""
    x = jnp.tanh(electrons.reshape(M, 3) @ WEIGHTS).reshape(M, HEADS, D).swapaxes(0, 1)
    y = x + x[:, ::-1]
    return (attention(y, x, x) ** 2 + attention(x, x, x[:, ::-1]) + attention(y, CONSTANT, CONSTANT)).sum()


ENDS = np.array([[0, 0, 1, 2, 2, 4], [1, 3, 0, 4, 2, 1]])


def scaled(s, batch, head, edge, i, j, weight):
    return s + weight[edge] * s


def over_edges(electrons, softmax):
    """A number, of attention over a graph whose edges have arrays of distances."""
    x, (i, j) = electrons.reshape(M, 3), ENDS
    graph, order = Graph.from_edges(*ENDS, (M, M))
    difference = (x[i] - x[j])[order]
    q, switch = jnp.tanh(x @ WEIGHTS).reshape(M, HEADS, D).swapaxes(0, 1), jnp.exp(-(difference**2).sum(-1))
    score = [na.Softcap(3.0), EdgeScore(scaled, arrays=[switch], gradient=True)]
    o = graph_attention(q, q, q, graph, bias=switch, k_edge=difference @ WEIGHTS[:, :D], factor=switch**2,
                        v_edge=difference @ WEIGHTS[:, D:], softmax=softmax, score=score)  # fmt: skip
    return (o**2).sum()


NETWORKS = {
    "plain": (network, 0),
    "bias": (biased, 0),
    "graph": (partial(over_edges, softmax=True), 0),
    "sparse graph": (partial(over_edges, softmax=True), 3 * M),
    "graph without softmax": (partial(over_edges, softmax=False), 0),
    "sparse": (network, 3 * M),
    "sparse, of others": (of_others, 3 * M),
    "sparse, of sums": (of_sums, 3 * M),
    "sparse, with options": (partial(of_others, **OPTIONS), 3 * M),
    "options": (partial(network, **OPTIONS), 0),
    "samples": (of_samples, 0),
}


@pytest.mark.parametrize("name", [pytest.param("plain", marks=pytest.mark.slow), *[*NETWORKS][1:]])
def test_folx_takes_attention(rng, folx, name):
    (function, sparsity), electrons = NETWORKS[name], rng.standard_normal(3 * M)
    found = folx.forward_laplacian(function, sparsity)(electrons)
    expected = jax.jit(lambda x: (function(x), jax.grad(function)(x), jnp.trace(jax.hessian(function)(x))))(electrons)
    assert_close((found.x, found.dense_jacobian, found.laplacian), expected)


EVERY = tuple(range(M))


@pytest.mark.parametrize(("name", "particles"), [
    ("sparse", [((0, 1), (-1,) * N), (EVERY, EVERY)]),
    ("sparse, of others", [((3, 2, 1), (1, 0)), (EVERY[::-1], (-1,) * N), (EVERY[::-1], EVERY[::-1])]),
    ("plain", [None] * 2), ("sparse, of sums", [None] * 3), ("samples", [None]), ("bias", [None]),
])  # fmt: skip
def test_first_layers_are_of_particles(rng, folx, monkeypatch, name, particles):
    """Where rows of q, k and v depend on the coordinates of one electron each."""
    found = []

    def noted(*args):
        found.append(first_layer(*args))
        return found[-1]

    monkeypatch.setattr("numbattn.interop.jax.folx.first_layer", noted)
    function, sparsity = NETWORKS[name]
    folx.forward_laplacian(function, sparsity)(rng.standard_normal(3 * M))
    assert [layer and layer.particle for layer in found] == particles


def test_folx_takes_walkers(rng, folx):
    walkers, function = rng.standard_normal((SAMPLES, 3 * M)), folx.forward_laplacian(network)
    together = jax.vmap(function)(walkers)
    for i, walker in enumerate(walkers):
        assert_close(together.laplacian[i], function(walker).laplacian)


def test_what_depends_on_no_coordinate_has_no_laplacian(rng, folx):
    def function(x, gradient):
        return attention(CONSTANT, CONSTANT, CONSTANT, score=na.Bias(jnp.outer(x, x), gradient=gradient)).sum()

    x = rng.standard_normal(N)
    assert not isinstance(folx.forward_laplacian(partial(function, gradient=False))(x), tuple)
    with pytest.raises(NotImplementedError, match="the Laplacian of attention's lse"):
        folx.forward_laplacian(lambda x: attention(CONSTANT * x[0], *[CONSTANT] * 2, return_lse=True)[1].sum())(x)


def test_sums_over_pairs_have_none(rng, folx):
    def function(x):
        return points.product(x, x, x, Gaussian()).sum() + attention(x, x, x).sum()

    with pytest.raises(NotImplementedError, match="the forward Laplacian of a sum over pairs of points"):
        folx.forward_laplacian(function)(rng.standard_normal((4, 3)))


def test_folx_is_told_when_asked_to(rng, folx):
    """Of a function that was traced before folx was imported nobody else would tell it."""
    function = jax.make_jaxpr(lambda x: attention(x, x, x).sum())(CONSTANT)

    def traced(x):
        return jax.core.eval_jaxpr(function.jaxpr, function.consts, x)

    folx.deregister_function(function.eqns[0].primitive)
    with pytest.raises(NotImplementedError, match=r"for folx, .*register_folx\(\)"):
        folx.forward_laplacian(traced)(CONSTANT)
    register_folx()
    assert folx.forward_laplacian(traced)(CONSTANT)[0].laplacian.shape == ()


# --------------------------------------------------------------------------------------------------- what else is new
def test_the_transpose_by_values(rng):
    q, k, v = (rng.standard_normal(shape) for shape in SHAPES)
    do, attend = rng.standard_normal((HEADS, M, D)), partial(attention, q, k, **OPTIONS)
    (expected,) = jax.vjp(attend, v)[1](do)
    for jit in (jax.jit, lambda function: function):
        (found,) = jit(lambda do: jax.linear_transpose(attend, v)(do))(do)
        assert_close(found, expected)
    with pytest.raises(NotImplementedError, match="it is linear in v alone"):
        jax.linear_transpose(lambda k: attention(q, k, k), k)(do)


def test_what_is_not_there_says_so(rng):
    from jax import export
    from jax.experimental import jet

    def attend(q):
        return attention(q, q, q)

    with pytest.raises(NotImplementedError, match=r"attention in jax\.experimental\.jet"):
        jet.jet(attend, (CONSTANT,), ((CONSTANT, CONSTANT),))
    symbolic = jax.ShapeDtypeStruct((*export.symbolic_shape("batch"), M, D), float)
    with pytest.raises(NotImplementedError, match="attention of symbolic shapes"):
        export.export(jax.jit(attend))(symbolic)
