"""Gradients as a tuple, and as sums over what inputs were broadcast to."""

import copy
import pickle

import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from numbattn.base.gradients import sum_to


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


@pytest.mark.parametrize("shape", [(2, 6, 5, 3), (6, 5, 3), (1, 1, 5, 3), (2, 2, 5, 3), (5, 3), (2, 1, 5, 3)])
def test_sum_to(rng, shape):
    """The sum is the adjoint of broadcasting: <sum_to(x), y> = <x, y broadcast>."""
    x, y = rng.standard_normal((2, 6, 5, 3)), rng.standard_normal(shape)
    y4 = y.reshape((1,) * (4 - y.ndim) + shape)
    broadcast = np.broadcast_to(np.repeat(y4, 6 // y4.shape[1], axis=1), x.shape)
    assert sum_to(x, shape).shape == shape
    np.testing.assert_allclose(np.vdot(sum_to(x, shape), y), np.vdot(x, broadcast))
