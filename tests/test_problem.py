"""What a Problem says, what is left for the backward pass, and what may be handed over. Errors: see test_errors."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from numbattn.problem import describe, sum_to


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


Q, K, V = zeros(2, 4, 5, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 3)


@pytest.mark.parametrize("make", [
    lambda: zeros(5, 2, 8)[:, 1],
    lambda: zeros(8, 5).T,
    lambda: zeros(10, 16)[::2, ::2],
    lambda: zeros(5, 8)[::-1, ::-1],
    lambda: np.lib.stride_tricks.as_strided(zeros(102), (5, 8), (4 * 3, 4 * 20)[::-1]),
    lambda: np.lib.stride_tricks.as_strided(zeros(125), (5, 8), (4 * 3, 4 * 2 * 8)),     # rows between columns
], ids=range(6))  # fmt: skip
def test_out_of_any_strides(rng, make):
    out, (q, k, v) = make(), rng.standard_normal((3, 5, 8)).astype(np.float32)
    assert na.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, na.attention(q, k, v))


def test_out_beside_an_input_is_no_overlap():
    qo = zeros(5, 2, 8)
    na.attention(qo[:, 0], zeros(7, 8), zeros(7, 8), out=qo[:, 1])


def test_saved_fields_can_be_replaced(rng):
    """Partial results, merged by their lse, go back in this way."""
    q, k, v = rng.standard_normal((3, 6, 4))
    o, saved = na.attention_forward(q, k, v)
    _, half = na.attention_forward(q, k[:3], v[:3])
    merged = dataclasses.replace(half, o=o, lse=saved.lse)
    _, dk, dv = na.attention_backward(o, merged)
    _, dk_whole, dv_whole = na.attention_backward(o, saved)
    np.testing.assert_allclose(dk, dk_whole[:3], rtol=1e-12)
    np.testing.assert_allclose(dv, dv_whole[:3], rtol=1e-12)


def test_gradients_are_a_named_tuple(rng):
    """For libraries that map functions over what a call returns."""
    q, k, v, do = rng.standard_normal((4, 6, 4))
    _, backprop = na.attention_vjp(q, k, v, score=na.Alibi(0.1))
    grads = backprop(do)
    assert [getattr(grads, name) is x for name, x in zip(grads._fields, grads)] == [True] * 3
    assert type(grads)(*grads).score == ()
    for same in (copy.deepcopy(grads), pickle.loads(pickle.dumps(grads))):
        assert isinstance(same, na.Gradients)
        for x, y in zip((*same, *same.score), (*grads, *grads.score), strict=True):
            np.testing.assert_array_equal(x, y)


def test_gradients_as_named_tuples_do_it(rng):
    q, k, v, do = rng.standard_normal((4, 2, 6, 4))
    _, backprop = na.attention_vjp(q, k, v, score=na.Alibi(np.ones(2)))
    dq, dk, dv = grads = backprop(do)
    assert list(grads._asdict()) == ["dq", "dk", "dv"]
    replaced = grads._replace(dk=do, score=())
    assert [*map(id, replaced)] == [id(dq), id(do), id(dv)]
    assert (replaced.score, grads._replace(dq=do).score) == ((), grads.score)
    assert repr(na.Gradients(1, 2, 3, (4, None))) == "Gradients(dq=1, dk=2, dv=3, score=(4, None))"
    with pytest.raises(TypeError):
        grads._replace(scores=())


@pytest.mark.parametrize("part", [na.Alibi(0.1), na.Sink(0.1), na.Bias(np.zeros(()))], ids=repr)
@pytest.mark.parametrize("axes", [0, 1])
def test_the_gradient_of_a_number_is_an_array(rng, part, axes):
    """Of no axes, as the number itself is here."""
    q, k, v, do = rng.standard_normal((4, *[2] * axes, 6, 4))
    _, backprop = na.attention_vjp(q, k, v, score=part)
    for grads in backprop(do), reference.attention_backward(do, q, k, v, score=part):
        (grad,) = grads.score
        assert isinstance(grad, np.ndarray)
        assert grad.shape == ()


def test_problem():
    problem, inputs = describe(Q, K, V, causal=True, mask=na.Lengths(3), dropout=na.Dropout(0.1, 1))
    assert (problem.batch, problem.heads, problem.heads_k, problem.matrices) == ((2, 4), 4, 2, (2, 4))
    assert problem.mask_kinds == (na.Causal, na.Lengths)
    assert inputs.scale == pytest.approx(8**-0.5)
    other, _ = describe(Q + 1, K, V, causal=True, mask=na.Lengths(5), scale=3, dropout=na.Dropout(0.2, 2))
    assert problem == other             # numbers are no part of it
    assert hash(problem) == hash(other)
    assert problem != describe(Q, K, V)[0]


def test_a_memmap_is_an_array(tmp_path):
    path = tmp_path / "q"
    Q.tofile(path)
    q = np.memmap(path, np.float32, "r", shape=Q.shape)
    assert na.attention(q, K, V).shape == (2, 4, 5, 3)


@pytest.mark.parametrize("shape", [(2, 6, 5, 3), (6, 5, 3), (1, 1, 5, 3), (2, 2, 5, 3), (5, 3), (2, 1, 5, 3)])
def test_sum_to(rng, shape):
    """The sum is the adjoint of broadcasting: <sum_to(x), y> = <x, y broadcast>."""
    x, y = rng.standard_normal((2, 6, 5, 3)), rng.standard_normal(shape)
    y4 = y.reshape((1,) * (4 - y.ndim) + shape)
    broadcast = np.broadcast_to(np.repeat(y4, 6 // y4.shape[1], axis=1), x.shape)
    assert sum_to(x, shape).shape == shape
    np.testing.assert_allclose(np.vdot(sum_to(x, shape), y), np.vdot(x, broadcast))
