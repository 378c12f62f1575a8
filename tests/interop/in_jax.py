"""Attention of JAX's arrays, against the plain formula in JAX and against numbattn's own functions, bit for bit.

`test_jax.py` runs this file in a process of its own: a process that has JAX warns of every fork.
"""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import numbattn as na
from numbattn.interop.jax import attention

from ..directions import Directions
from ..problems import FUNCTIONS, LIMITS, MASKS, SCORES, Draw, Problem, present

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 2)

BATCH, HEADS, M, N, D, E = 2, 4, 5, 6, 3, 2
SHAPES = (BATCH, HEADS, M, D), (BATCH, 2, N, D), (BATCH, 2, N, E), (HEADS, M, N), (HEADS,), (HEADS, 5), (HEADS,)
VISIBLE = np.random.default_rng(0).random((M, N)) < 0.7
VISIBLE[1] = False  # a query that sees nothing


@pytest.fixture
def arrays(rng):
    """q, k, v and the arrays of a score."""
    return [jnp.asarray(rng.standard_normal(shape)) for shape in SHAPES]


def ours(q, k, v, bias, slopes, table, logits):
    score = [na.Bias(bias), na.Softcap(3.0), na.Alibi(slopes), na.RelativeBias(table), na.Sink(logits)]
    return attention(q, k, v, mask=VISIBLE, score=score, scale=0.7, return_lse=True)


def formula(q, k, v, bias, slopes, table, logits):
    k, v = (jnp.repeat(x, HEADS // 2, axis=-3) for x in (k, v))
    ahead = jnp.arange(N) - jnp.arange(M)[:, None] - (N - M)
    S = 3 * jnp.tanh((0.7 * q @ k.mT + bias) / 3) - slopes[:, None, None] * abs(ahead)
    S = S + table[:, jnp.clip(ahead, -2, 2) + 2]
    some = VISIBLE.any(-1)
    E = jnp.where(VISIBLE, jnp.exp(S), 0)
    total = jnp.where(some, E.sum(-1) + jnp.exp(logits)[:, None], 1)
    return (E / total[..., None]) @ v, jnp.where(some, jnp.log(total), -jnp.inf)


def total(attend, *arrays):
    """A number of all results, of which no second derivative is zero."""
    o, lse = attend(*arrays)
    return (jnp.sin(o) * jnp.arange(o.size).reshape(o.shape)).sum() + (jnp.where(lse > -jnp.inf, lse, 0) ** 2).sum()


def assert_close(got, expected, tolerance=1e-10):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * (1 + abs(np.nan_to_num(y)).max(initial=0)))


def assert_same(got, expected):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(x, y)


def squares(grads):
    return sum((x**2).sum() for x in grads)


# -------------------------------------------------------------------------------------------------------- derivatives
ALL, SOME, REST = tuple(range(7)), (0, 3, 5), (1, 2, 4, 6)


def of_o(f):
    return lambda *x: f(*x)[0]


def of_grads(f, by):
    """A number of the gradients by some arrays."""
    return lambda *x: squares(jax.grad(partial(total, f), by)(*x))


def in_a_scan(f, *x):
    """A number of q of which each step makes another one."""
    def step(q, _):
        return q + f(q, *x[1:])[0].sum(-1, keepdims=True), (q**2).sum()

    q, sums = jax.lax.scan(step, x[0], None, 3)
    return (q**2).sum() + sums.sum()


def in_a_branch(f, *x):
    return jax.lax.cond(x[0].sum() > jnp.inf, lambda *x: x[0].sum(), partial(total, f), *x)


DERIVATIVES = {  # of a function and its arrays
    "forward": lambda f, *x: f(*x),
    "grad": lambda f, *x: jax.value_and_grad(partial(total, f), ALL)(*x),
    "jvp": lambda f, *x: jax.jvp(of_o(f), x, x),
    "linearize": lambda f, *x: jax.linearize(partial(total, f), *x)[1](*x),
    "jacfwd": lambda f, *x: jax.jacfwd(of_o(f), SOME)(*x),
    "jacrev": lambda f, *x: jax.jacrev(of_o(f), REST)(*x),
    "hessian": lambda f, *x: jax.hessian(partial(total, f), SOME)(*x),
    "hessian by others": lambda f, *x: jax.hessian(partial(total, f), REST)(*x),
    "forward over reverse": lambda f, *x: jax.jvp(jax.grad(partial(total, f), ALL), x, x),
    "reverse over reverse": lambda f, *x: jax.grad(of_grads(f, ALL), ALL)(*x),
    "reverse over reverse by others": lambda f, *x: jax.grad(of_grads(f, SOME), REST)(*x),
    "reverse over forward": lambda f, *x: jax.grad(lambda *y: squares([jax.jvp(of_o(f), y, x)[1]]), ALL)(*x),
    "reverse over jacfwd": lambda f, *x: jax.grad(lambda *y: squares(jax.jacfwd(partial(total, f), SOME)(*y)), ALL)(*x),
    "checkpoint": lambda f, *x: jax.hessian(jax.checkpoint(partial(total, f)), (1, 4))(*x),
    "scan": lambda f, *x: jax.grad(partial(in_a_scan, f), ALL)(*x),
    "cond": lambda f, *x: jax.grad(partial(in_a_branch, f), ALL)(*x),
}


COMBINED = "grad", "jacfwd", "hessian"


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in COMBINED)) for name in DERIVATIVES
])  # fmt: skip
def test_derivatives(arrays, name):
    ours_, expected = (jax.jit(partial(DERIVATIVES[name], f)) for f in (ours, formula))
    assert_close(ours_(*arrays), expected(*arrays))


@pytest.mark.parametrize("name", [
    "forward", "grad",
    *(pytest.param(x, marks=pytest.mark.slow) for x in ("jvp", "jacfwd", "hessian by others", "reverse over forward")),
])  # fmt: skip
def test_derivatives_outside_of_jit(arrays, name):
    """They are passes on the very same numbers, which JAX's own functions may round in another way."""
    derivative = partial(DERIVATIVES[name], ours)
    assert_close(derivative(*arrays), jax.jit(derivative)(*arrays), 1e-13)


# ---------------------------------------------------------------------------------------------------- random problems
def placed(x):
    """Arrays, in masks and scores, too, as JAX has them."""
    return jax.tree.map(lambda a: jnp.asarray(np.ascontiguousarray(a)), x)


@pytest.mark.parametrize("number", [*range(3), *(pytest.param(x, marks=pytest.mark.slow) for x in range(3, 16))])
def test_random_problems_bit_for_bit(number):
    """All results and their derivatives are numbattn's own, inside and outside of jit."""
    problem = Problem(58, number, LIMITS["cpu"]._replace(longest=100, elements=20_000))
    options = dict(problem.options)
    tangents = Directions(problem, problem.jets, problem.along, ["jvp"], [None]).tangents
    (q, k, v), do, dlse, *tqkv = (jax.tree.map(np.ascontiguousarray, x) for x in (
        problem.arrays, problem.do, problem.dlse, *list(tangents.values())[:3]))  # fmt: skip
    o, saved = na.attention_forward(q, k, v, **options)
    saved = replace(saved, lse_low=None)  # between passes JAX keeps lse alone
    grads = na.attention_backward(do, saved, dlse=dlse, deterministic=problem.deterministic)
    mask, score = placed((options.pop("mask"), options.pop("score")))
    is_differentiable = not any(isinstance(part, na.Score) for part in score)

    def attend(q, k, v, mask, score):
        return attention(q, k, v, mask=mask, score=score, **options, deterministic=problem.deterministic,
                         return_lse=True)  # fmt: skip

    def derivatives(q, k, v, do, dlse, mask, score, *tqkv):
        def of_floats(q, k, v, own):
            return attend(q, k, v, mask, own if is_differentiable else score)

        results, pullback = jax.vjp(of_floats, q, k, v, score if is_differentiable else 0.0)
        dlse = jnp.zeros_like(results[1]) if dlse is None else dlse
        *grads, of_score = pullback((do, dlse))
        tqkv = [jnp.zeros_like(x) if t is None else t for x, t in zip((q, k, v), tqkv)]
        along = jax.jvp(lambda *x: attend(*x, mask, score), (q, k, v), tuple(tqkv))[1]
        return results, grads, of_score, along

    given = placed((q, k, v, do, dlse)), mask, score, *placed(tqkv)
    eager = derivatives(*given[0], *given[1:])
    assert_same(jax.jit(derivatives)(*given[0], *given[1:]), eager)
    results, qkv, of_score, (to, tlse) = eager
    assert_same(results, (o, saved.lse))
    assert_same(qkv, [*grads])
    if is_differentiable:
        found = [x for part in of_score if part._wants_gradient for x in part._weights]
        assert_same(found, present(grads.score))
    tqkv = [np.zeros_like(x) if t is None else t for x, t in zip((q, k, v), tqkv)]
    _, own, _, tsaved = na.attention_forward_jvp(q, k, v, *tqkv, **problem.options)
    assert_same((to, tlse), (own, tsaved.tlse))


# ---------------------------------------------------------------------------------------------------------- semantics
@pytest.fixture
def qkv(rng):
    return tuple(map(jnp.asarray, rng.standard_normal((3, 2, 4, 6, 3))))


def operands_of(primitive, function, *x):
    """How many arrays it is given, in all calls of it."""
    return [len(call.invars) for call in jax.make_jaxpr(function)(*x).eqns if call.primitive.name == primitive]


def test_what_is_not_asked_for_costs_nothing(qkv):
    bias, constant = jnp.zeros((2, 6, 6))
    assert [x.aval.shape for x in jax.make_jaxpr(attention)(*qkv).eqns[0].outvars] == [(2, 4, 6, 3)]  # no lse

    def by_k(k):
        return attention(qkv[0], k, qkv[2])

    def by_bias(bias):
        return attention(*qkv, score=[na.Bias(bias), na.Bias(constant)]).sum()

    assert operands_of("numbattn_tangent", lambda k: jax.jvp(by_k, (k,), (k,)), qkv[1]) == [3 + 2 + 1]
    assert operands_of("numbattn_backward", jax.grad(lambda k: by_k(k).sum()), qkv[1]) == [3 + 2 + 1]  # no dlse
    calls = jax.make_jaxpr(jax.grad(by_bias))(bias).eqns
    (call,) = (call for call in calls if call.primitive.name == "numbattn_backward")
    assert [x.aval.shape for x in call.outvars] == [x.shape for x in (*qkv, bias)]  # none by the constant


def test_gradients_that_are_not_wanted_are_zero(qkv):
    bias = jnp.ones((6, 6))
    for wanted in (True, False):
        def f(bias, wanted=wanted):
            return attention(*qkv, score=na.Bias(bias, gradient=wanted))

        assert jax.grad(lambda bias, f=f: (f(bias) ** 2).sum())(bias).any() == wanted
        assert jax.jvp(f, (bias,), (bias.at[0].set(3),))[1].any() == wanted


def test_squares_of_both_results(qkv):
    """Gradients of the two change with q, k and v, too."""
    def of_attention(*x):
        return squares(attention(*x, return_lse=True))

    def of_formula(q, k, v):
        S = q @ k.mT * 3**-0.5
        return squares([jax.nn.softmax(S) @ v, jax.nn.logsumexp(S, axis=-1)])

    for derivative in (jax.grad, jax.hessian):
        assert_close(*(jax.jit(derivative(f, (0, 1, 2)))(*qkv) for f in (of_attention, of_formula)))


def test_derivatives_by_gradients_of_results(qkv):
    """A pullback is linear: its Jacobian is that of o, transposed."""
    f = partial(attention, causal=True)
    jacobian = jax.jacrev(f)(*qkv)
    for forward_or_reverse in (jax.jacfwd, jax.jacrev):
        assert_close(forward_or_reverse(lambda do: jax.vjp(f, *qkv)[1](do)[0])(qkv[0]), jnp.moveaxis(
            jacobian, (4, 5, 6, 7), (0, 1, 2, 3)))  # fmt: skip


THIRD = {
    "tangent of a tangent": lambda f, q: jax.jvp(lambda q: jax.jvp(f, (q,), (q,))[1], (q,), (q,)),
    "jacfwd of hessian": lambda f, q: jax.jacfwd(jax.hessian(lambda q: f(q).sum()))(q),
    "jacrev of hessian": lambda f, q: jax.jacrev(jax.hessian(lambda q: f(q).sum()))(q),
    "grad of the hessian": lambda f, q: jax.grad(lambda q: squares([jax.hessian(lambda q: f(q).sum())(q)]))(q),
}


@pytest.mark.parametrize("name", THIRD)
def test_derivatives_that_are_not_there(qkv, name):
    for jit in (jax.jit, lambda f: f):
        with pytest.raises(NotImplementedError, match=r"(third derivatives|tangent of a tangent) of attention"):
            jit(partial(THIRD[name], lambda q: attention(q, *qkv[1:])))(qkv[0])


def test_arrays_of_a_function_have_no_derivatives(qkv):
    def by_head(s, batch, head, i, j, factor):
        return s * factor[head]

    def f(x):
        return attention(*qkv, score=na.Score(by_head, arrays=[x])).sum()

    for derivative in (jax.grad(f), lambda x: jax.jvp(f, (x,), (x,))):
        with pytest.raises(NotImplementedError, match="derivatives by the arrays of a Score"):
            derivative(jnp.ones(4))
    assert jax.grad(lambda x: f(jax.lax.stop_gradient(x)))(jnp.ones(4)).sum() == 0


def test_arrays_of_a_function_have_gradients_where_they_are_asked_for(qkv):
    def f(x, gradient=True):
        score = na.Score(lambda s, batch, head, i, j, factor: s * factor[head], arrays=[x], gradient=gradient)
        return attention(*qkv, score=score).sum()

    for derivative in jax.grad(f), jax.jit(jax.grad(f)):
        got = derivative(jnp.ones(4))
        wanted = [(f(1 + 1e-3 * h, False) - f(1 - 1e-3 * h, False)) / 2e-3 for h in jnp.eye(4)]
        np.testing.assert_allclose(got, wanted, rtol=0.02, atol=1e-3)


def test_no_number_compiles_anything_again(qkv):
    traced = []

    @jax.jit
    def step(q, mask, score, offset, slope):
        traced.append(score)
        options = {"mask": mask, "score": [*score, na.Alibi(slope)], "dropout": na.Dropout(0.5, 9)}
        return attention(q, *qkv[1:], **options, dropout_offset=offset)

    for number in range(3):
        bias, lengths = np.full((6, 6), float(number)), np.full((2, 1), 3 + number)
        score, mask = [na.Bias(bias)], na.Causal() & na.Lengths(lengths)
        got = step(qkv[0], mask, score, number, 0.5 * number)
        dropout = na.Dropout(0.5, 9, number)
        slopes = na.Alibi(np.float64(0.5 * number))
        assert_same(got, na.attention(*map(np.asarray, qkv), mask=mask, score=[*score, slopes], dropout=dropout))
    assert len(traced) == 1
    assert isinstance(traced[0][0], na.Bias)


def test_masks_scores_and_gradients_are_pytrees(rng):
    draw = Draw(58, 0, LIMITS["cpu"], np)
    draw.m, draw.n, draw.batch, draw.dtype = 5, 5, (2, 3), np.dtype(float)
    draw.visible = np.ones((2, 3, 5, 5), bool)
    values = [table[name](draw) for table in (MASKS, SCORES, FUNCTIONS) for name in table if name != "array"]
    lengths = np.ones((2, 3), int)
    joined = na.Causal() & na.Lengths(keys=lengths) | na.First(1)
    assert [x is lengths for x in jax.tree.leaves(joined)] == [True]
    for value in [*values, joined]:
        leaves, tree = jax.tree.flatten(value)
        assert all(isinstance(x, np.ndarray) for x in leaves)
        assert tree.unflatten(leaves) == value
        copies = jax.tree.map(np.copy, value)
        assert (copies == value) == (not leaves)
        assert jax.tree.structure(copies) == tree
        assert hash(jax.tree.structure(copies)) == hash(tree)
    assert jax.tree.structure(na.Window(3, 0)) != jax.tree.structure(na.Window(4, 0))


def test_gradients_are_pytrees(rng):
    x, y, z, u = rng.standard_normal((4, 2))
    grads, second = na.Gradients(x, y, z, (u, None)), na.SecondGradients(x, y, z, u, x, (y, None))
    doubled = jax.jit(lambda x: jax.tree.map(lambda a: 2 * a, x))
    for found, given in ((doubled(grads), grads), (doubled(second), second)):
        assert type(found) is type(given)
        assert_same([*found, found.score], [*(2 * x for x in given), (2 * given.score[0], None)])
    assert_same(doubled(second).dlse, 2 * x)


def test_without_x64_numbers_are_float32(rng):
    q, bias = rng.standard_normal((4, 6, 3)), rng.standard_normal((6, 6))
    with jax.enable_x64(False):
        o, lse = attention(q, q, q, score=na.Bias(bias), mask=na.Lengths(np.full(4, 3)), return_lse=True)
        x, narrow = q.astype(np.float32), na.Bias(bias.astype(np.float32))
        assert_same(o, na.attention(x, x, x, score=narrow, mask=na.Lengths(np.full(4, 3))))
        assert lse.dtype == np.float32
        grads = jax.jit(jax.grad(lambda bias: attention(q, q, q, score=na.Bias(bias)).sum()))(bias)
        assert grads.dtype == np.float32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_narrow_numbers(rng, dtype):
    """Second derivatives, too: all that numbattn computes comes as it is."""
    q, k, v, do, t = (jnp.asarray(x, dtype) for x in rng.standard_normal((5, 2, 70, 16)))
    grads = jax.jit(jax.grad(lambda q: (attention(q, k, v, causal=True) * do).astype("float32").sum()))
    got = jax.jvp(grads, (q,), (t,))
    x, kn, vn, don, tn = map(np.asarray, (q, k, v, do, t))
    _, _, saved, tsaved = na.attention_forward_jvp(x, kn, vn, tn, None, None, causal=True)
    expected = [g.dq for g in na.attention_backward_jvp(don, saved, tsaved)]
    if dtype == "bfloat16":  # o as the forward pass rounds it, by products of pairs where the CPU has them
        for one, other in zip(got, (x.astype(float) for x in expected), strict=True):
            assert one.dtype == dtype
            np.testing.assert_allclose(one, other, rtol=0, atol=abs(other).max() / 100)
    else:
        assert_same(got, expected)


@pytest.mark.parametrize(("m", "n"), [
    (0, 2),
    *(pytest.param(*size, marks=pytest.mark.slow) for size in (
        (2, 0), (1, 2), (0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (2, 2),
    )),
])  # fmt: skip
def test_few_rows(m, n):
    q, k = jnp.ones((2, m, 3)), jnp.ones((2, n, 3))

    def f(q, k):
        return (attention(q, k, k, causal=True) ** 2).sum()

    value, (dq, dk) = jax.jit(jax.value_and_grad(f, (0, 1)))(q, k)
    assert (value, dq.shape, dk.shape) == (6 * min(m, n), q.shape, k.shape)
    assert jax.jit(jax.vmap(f, (None, 0)))(q, k[None][:0]).shape == (0,)
    assert jax.hessian(f)(q, k).shape == q.shape * 2


def test_rows_that_see_nothing(qkv):
    q, k, v = qkv
    o, lse = jax.jit(partial(attention, mask=np.zeros((6, 6), bool), return_lse=True))(q, k, v)
    assert not o.any()
    assert (lse == -jnp.inf).all()
    assert not jax.grad(lambda q: attention(q, k, v, mask=np.zeros((6, 6), bool)).sum())(q).any()


HALF, CACHE = na.Dropout(0.5, seed=1), na.KVCache(*np.ones((2, 1, 4, 6, 3)), np.ones(1, np.int32))
REFUSED = {
    "a list": (lambda q: attention([1.0], q, q), TypeError, "q: got list, expected a jax.Array or a numpy.nd"),
    "a cache": (lambda q: attention(q, CACHE, None), TypeError, "k: got a KVCache"),
    "integers": (lambda q: attention(*[q.astype(int)] * 3), TypeError, "q: got int64"),
    "shapes": (lambda q: attention(q, q, q[:-1]), ValueError, "v: got"),
    "lengths": (lambda q: attention(q, q, q, mask=na.Lengths(np.ones((7, 7), int))), ValueError, "Lengths keys"),
    "score": (lambda q: attention(q, q, q, score=na.Bias(q[:, :5])), ValueError, "score: Bias bias: got the"),
    "dropout": (lambda q: attention(q, q, q, dropout=0.5), TypeError, "dropout: got 0.5"),
    "offset": (lambda q: attention(q, q, q, dropout=HALF, dropout_offset=-1), ValueError, "Dropout offset"),
    "offsets": (lambda q: attention(q, q, q, dropout=HALF, dropout_offset=q), TypeError, "offset: got an array of fl"),
    "no dropout": (lambda q: attention(q, q, q, dropout_offset=1), ValueError, "dropout_offset: got 1 without dropout"),
    "scale": (lambda q: attention(q, q, q, scale=q[0, 0]), TypeError, "scale: got"),
    "mask": (lambda q: attention(q, q, q, mask=q), TypeError, "mask: got (traced )?jax.Array of float.*boolean array,"),
    "cap": (lambda q: na.Softcap(q[0]), TypeError, "Softcap cap: got .*jax.Array of float64, .* numbattn.Score"),
    "flag": (lambda q: attention(q, q, q, return_lse=1), TypeError, "return_lse: got 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit(rng, name):
    function, error, message = REFUSED[name]
    q = jnp.asarray(rng.standard_normal((4, 6, 3)))
    for call in (function, jax.jit(function)):
        with pytest.raises(error, match=message):
            call(q)


def test_numbers_are_taken_unless_they_are_traced(qkv):
    def attend(scale, cap, left):
        return attention(*qkv, scale=scale, score=na.Softcap(cap), mask=na.Window(left, 0))

    assert_same(attend(*map(jnp.asarray, (0.5, 2.0, 3))), attend(0.5, 2.0, 3))
    remedies = r"pass q \* scale with scale=1.0", "numbattn.Score of your own", "Causal.offset . right."
    for traced, remedy in enumerate(remedies):
        with pytest.raises(TypeError, match=f"got traced jax.Array of .*{remedy}"):
            jax.jit(lambda x, at=traced: attend(*(x if i == at else 1 for i in range(3))))(2)
    windowed = jax.jit(lambda left: attention(*qkv, mask=na.Window(0, None, -left) & na.Causal(0)))
    assert_same(windowed(2), attention(*qkv, mask=na.Window(2, 0, 0)))


def test_numbers_in_traced_arrays_are_looked_at_later(qkv):
    f = jax.jit(lambda lengths: attention(*qkv, mask=na.Lengths(lengths)))
    f(np.full((2, 1), 6))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="Lengths keys: got values from 7 to 7, allowed"):
        f(np.full((2, 1), 7)).block_until_ready()


def test_many_callbacks_at_once():
    """None waits for JAX, though arrays are large and nothing waits for them: see the docstring."""
    @jax.jit
    def step(x):
        return sum(attention(q, q * 1.01, q) for q in (jnp.sin(x + i) for i in range(6))) / 6

    gradient = jax.jit(jax.grad(lambda x: (step(x) ** 2).sum()))
    x = jax.random.normal(jax.random.key(0), (2, 8, 256, 64), np.float32)
    for _ in range(2):
        x = step(x) + 0.01 * gradient(x)
    assert jnp.isfinite(x).all()


def test_several_devices(rng):
    """Inside of jit; in a shard_map each computes its own."""
    if len(jax.devices()) < 2:
        pytest.skip("one device")
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "b")
    axes = jax.sharding.PartitionSpec("b")
    q = jnp.asarray(rng.standard_normal((2, 4, 6, 3)))
    expected = attention(q, q, q)
    apart = jax.device_put(q, jax.sharding.NamedSharding(mesh, axes))
    assert_same(jax.jit(attention)(apart, apart, apart), expected)
    assert_same(jax.jit(jax.shard_map(attention, mesh=mesh, in_specs=axes, out_specs=axes))(*[apart] * 3), expected)
    with pytest.raises(NotImplementedError, match="arrays on 2 devices outside of jit"):
        attention(apart, apart, apart)
    for size in (4, 100):  # small results and large ones get there in two ways
        x = jax.device_put(jnp.ones((4, size, 64)), jax.devices()[1])
        assert attention(x, x, x).devices() == {jax.devices()[1]}


def test_gradients_in_and_of_a_shard_map(rng):
    """Keys that all devices share have one gradient, the sum of all."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "b")
    own, shared = jax.sharding.PartitionSpec("b"), jax.sharding.PartitionSpec()
    q, k = (jnp.asarray(rng.standard_normal(shape)) for shape in ((2, 4, 6, 3), (4, 5, 3)))

    def gradient(q, k):
        return jax.grad(lambda q: (attention(q, k, k) ** 2).sum())(q)

    def total(function):
        return lambda q, k: (function(q, k) ** 2).sum()

    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=(own, shared), out_specs=own)
    found, expected = (jax.jit(jax.grad(total(f), (0, 1)))(q, k) for f in (mapped, gradient))
    assert_close(found, expected)


@pytest.mark.gpu
def test_arrays_on_a_gpu(arrays):
    """They share memory with CuPy's."""
    try:
        gpu = jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(str(error))
    there = jax.device_put(arrays, gpu)
    for derivative in (total, jax.grad(total, tuple(range(1, 8))), jax.jacfwd(jax.grad(total, 1), 2)):
        expected = derivative(ours, *arrays)
        for found in (derivative(ours, *there), jax.jit(derivative, static_argnums=0)(ours, *there)):
            assert {x.device for x in jax.tree.leaves(found)} == {gpu}
            assert_close(jax.device_get(found), jax.device_get(expected))


@pytest.mark.gpu
def test_passes_keep_their_place_on_the_stream(rng):
    """Inside of jit, among XLA's kernels."""
    q, k, v = jax.device_put(rng.standard_normal((3, 2, 4, 512, 64), np.float32), jax.devices("gpu")[0])

    def steps(q):
        for _ in range(8):
            q = jnp.tanh(attention(q + 1, k, v, causal=True)) * 2
        return q

    for function in (steps, jax.grad(lambda q: steps(q).sum())):
        assert_close(jax.jit(function)(q), function(q), 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32, np.float64])
def test_the_same_bits_on_a_gpu(rng, dtype):
    x = jax.device_put(rng.standard_normal((3, 2, 4, 70, 64)).astype(dtype), jax.devices("gpu")[0])
    function = partial(attention, mask=na.Lengths(np.full((2, 1), 50)), dropout=na.Dropout(0.2, seed=3))
    assert_same(jax.jit(function)(*x), function(*x))
