"""Derivatives of every order and mode that autograd has, against finite differences and the plain formula's."""

import ml_dtypes
import numpy
import pytest

import numbattn as na

pytest.importorskip("autograd", reason="autograd is not installed")

import autograd.numpy as np
from autograd import grad, hessian, jacobian, make_ggnvp, make_hvp, make_jvp, make_vjp
from autograd.test_util import check_grads

from numbattn.interop.autograd import attention


def formula(q, k, v, bias=0.0, cap=None, visible=True, sink=None):
    """o, lse"""
    S = np.einsum("...ik,...jk->...ij", q, k) / numpy.sqrt(q.shape[-1])
    S = S + bias if cap is None else cap * np.tanh((S + bias) / cap)
    S = np.where(visible, S, -numpy.inf)
    top = np.max(S, axis=-1, keepdims=True)
    total = np.sum(np.exp(S - top), axis=-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(np.reshape(sink, (-1, 1, 1)) - top)
    lse = top + np.log(total)
    return np.exp(S - lse) @ v, lse[..., 0]


@pytest.fixture
def arrays(rng):
    """q, k, v, a bias, a sink."""
    return *rng.standard_normal((3, 2, 5, 4)), rng.standard_normal((2, 5, 5)), rng.standard_normal(2)


def ours(q, k, v, bias, sink):
    score = [na.Bias(bias), na.Softcap(3.0), na.Sink(sink)]
    return attention(q, k, v, causal=True, score=score, return_lse=True)


def theirs(q, k, v, bias, sink):
    return formula(q, k, v, bias, 3.0, numpy.tri(5, dtype=bool), sink)


def loss_of(f):
    """A number that depends on o and lse."""

    def loss(*arrays):
        o, lse = f(*arrays)
        return np.sum(np.sin(o)) + np.sum(lse**2)

    return loss


def assert_close(got, want):
    numpy.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("number", [4, *(pytest.param(x, marks=pytest.mark.slow) for x in range(4))])
def test_first_and_second_derivatives_are_those_of_the_formula(arrays, number):
    """By each array: also of the score's."""
    for derivative in (grad, hessian):
        assert_close(*(derivative(loss_of(f), number)(*arrays) for f in (ours, theirs)))


def test_derivatives_by_all_arrays_agree_with_finite_differences(arrays):
    check_grads(ours, modes=["fwd", "rev"], order=1)(*arrays)
    check_grads(loss_of(ours), modes=["rev"], order=2)(*arrays)


def test_modes_compose(arrays, rng):
    """Forward over reverse, reverse over forward, and autograd's own products."""
    q, *others = arrays
    t, s = rng.standard_normal((2, *q.shape))
    o, o_ = ((lambda q, f=f: f(q, *others)[0]) for f in (ours, theirs))
    loss, loss_ = ((lambda q, f=f: loss_of(f)(q, *others)) for f in (ours, theirs))
    want = numpy.tensordot(hessian(loss_)(q), t, 3)
    assert_close(make_jvp(grad(loss))(q)(t)[1], want)
    assert_close(grad(lambda q: np.sum(grad(loss)(q) * t))(q), want)
    assert_close(make_hvp(loss)(q)[0](t), want)
    assert_close(grad(lambda q: make_jvp(loss)(q)(t)[1])(q), want)
    assert_close(make_jvp(lambda t: make_jvp(o)(q)(t)[1])(t)(s)[1], make_jvp(o_)(q)(s)[1])
    assert_close(*(make_ggnvp(f, lambda o: np.sum(o**4))(q)(t) for f in (o, o_)))
    assert_close(*(jacobian(f)(q) for f in (o, o_)))


def test_what_is_missing_says_so(arrays):
    q, *others = arrays
    t = numpy.ones_like(q)

    def loss(q):
        return loss_of(ours)(q, *others)

    with pytest.raises(NotImplementedError, match="numbattn has no third derivatives"):
        grad(lambda q: np.sum(hessian(loss)(q)))(q)
    with pytest.raises(NotImplementedError, match="numbattn has no forward mode over forward mode"):
        make_jvp(lambda q: make_jvp(loss)(q)(t)[1])(q)(t)
    with pytest.raises(NotImplementedError, match=r"got .*ArrayBox of float64 in a Score, expected an array"):
        grad(lambda x: np.sum(attention(q, q, q, score=na.Score(scaled, arrays=[x]))))(t[:, 0, 0])
    with pytest.raises(TypeError, match="k: got a KVCache"):
        attention(q, na.KVCache.zeros(1, 2, 4, 4, like=q), None)


def scaled(s, batch, head, i, j, scales):
    return s * scales[head]


def test_arrays_in_a_function_are_constants(rng):
    q, scales = rng.standard_normal((2, 5, 4)), numpy.array([0.5, 2.0])
    score = na.Score(scaled, arrays=[scales])
    assert_close(grad(lambda q: np.sum(attention(q, q, q, score=score) ** 2))(q),
                 grad(lambda q: np.sum(formula(q * scales[:, None, None], q, q)[0] ** 2))(q))  # fmt: skip


def test_arrays_in_a_function_have_gradients_where_they_are_asked_for(rng):
    q, scales = rng.standard_normal((2, 5, 4)), numpy.array([0.5, 2.0])

    def loss(scales):
        return np.sum(attention(q, q, q, score=na.Score(scaled, arrays=[scales], gradient=True)) ** 2)

    assert_close(grad(loss)(scales),
                 grad(lambda scales: np.sum(formula(q * scales[:, None, None], q, q)[0] ** 2))(scales))  # fmt: skip


def test_a_score_whose_gradient_is_not_wanted_is_a_constant(arrays):
    q, k, v, bias, _ = arrays

    def loss(bias, gradient):
        return np.sum(attention(q, k, v, score=na.Bias(bias, gradient)) ** 2)

    assert_close(grad(loss)(bias, True), grad(lambda bias: np.sum(formula(q, k, v, bias)[0] ** 2))(bias))
    with pytest.warns(UserWarning, match="Output seems independent of input"):
        assert not grad(loss)(bias, False).any()


def test_masks_may_come_from_traced_arrays(arrays):
    q, k, v, _, _ = arrays

    def loss(k, attend):
        return np.sum(attend(q, k, v, k[..., 0] > 0) ** 2)

    def with_mask(q, k, v, visible):
        return attention(q, k, v, mask=visible[:, None, :])

    def plain(q, k, v, visible):
        return formula(q, k, v, visible=visible[:, None, :])[0]

    assert_close(*(grad(loss)(k, attend) for attend in (with_mask, plain)))


def test_dropout_drops_the_same_in_all_passes(arrays):
    q, k, v, _, _ = arrays
    dropout = na.Dropout(0.5, seed=3)
    check_grads(lambda *qkv: attention(*qkv, dropout=dropout), modes=["fwd", "rev"], order=1)(q, k, v)
    dq = grad(lambda q: np.sum(attention(q, k, v, dropout=dropout, deterministic=True)))
    assert_close(dq(q), na.attention_vjp(q, k, v, dropout=dropout)[1](numpy.ones_like(q)).dq)


@pytest.mark.parametrize("shapes", [((3, 4), (5, 4), (5, 2)), ((4, 3, 4), (2, 5, 4), (2, 5, 4)), ((2, 1, 4),) * 3,
                                    ((2, 0, 4), (2, 5, 4), (2, 5, 4)), ((2, 3, 4), (2, 0, 4), (2, 0, 4))])  # fmt: skip
def test_shapes(rng, shapes):
    qkv = [rng.standard_normal(shape) for shape in shapes]
    for x, dx in zip(qkv, make_vjp(lambda *qkv: attention(*qkv), (0, 1, 2))(*qkv)[0](attention(*qkv))):
        assert dx.shape == x.shape


@pytest.mark.parametrize("dtype", [numpy.float16, ml_dtypes.bfloat16, numpy.float32])
def test_results_are_those_of_numbattn_bit_for_bit(rng, dtype):
    q, k, v = rng.standard_normal((3, 2, 5, 4)).astype(dtype)
    vjp, o = make_vjp(attention, (0, 1, 2))(q, k, v)
    want, backprop = na.attention_vjp(q, k, v)
    for got, expected in zip([o, *vjp(o)], [want, *backprop(want)]):
        numpy.testing.assert_array_equal(got, expected)


@pytest.mark.gpu
def test_arrays_of_cupy(arrays):
    import cupy

    q, *others = map(cupy.asarray, arrays)
    derivatives = grad(loss_of(ours)), hessian(loss_of(ours)), make_hvp(loss_of(ours))
    hvp = derivatives[2](q, *others)[0](q)
    assert isinstance(hvp, cupy.ndarray)
    assert_close(hvp.get(), make_hvp(loss_of(ours))(*arrays)[0](arrays[0]))
    assert_close(derivatives[1](q, *others).get(), derivatives[1](*arrays))


FAULTS = {
    "lambda dx, call, x, r, c: lambda t: curvature(call, x, r, c, t)": "lambda dx, call, x, r, c: lambda t: t",
    "lambda c: curvature(call, x, r, c, t),": "lambda c: backward(call, x, r, c),",
    "dlse=c[1], deterministic": "deterministic",
    "found.get(at) for at in": "found.get(at + 1) for at in",
    "for at, wanted in zip(options.weights, options.wanted) if wanted": "for at in options.weights",
}
