"""The layer does what `numbattn.attention_vjp` does of each sequence alone, and learns its score."""

import numpy as np
import pytest

import numbattn as na

thinc = pytest.importorskip("thinc.api", reason="thinc is not installed")

from numbattn.interop.thinc import attention

LENGTHS = 5, 1, 0, 3


def scaled(s, batch, head, i, j, scales):
    return s * scales[head]


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def ops(request):
    with thinc.use_ops(request.param):
        yield thinc.get_ops(request.param)


def score_of(ops):
    return [na.Alibi(ops.asarray1f([0.5, 0.25])), na.Softcap(2.0), na.Score(scaled, arrays=[ops.asarray1f([1.0, 0.5])]),
            na.RelativeBias(ops.asarray2f([[0.1, 0.2, 0.3]] * 2), gradient=False), na.Alibi(ops.asarray1f([0.1, 0.2])),
            na.Sink(ops.asarray1f([0.3, -0.3]))]  # fmt: skip


def assert_close(got, want):
    na_got, na_want = (x if isinstance(x, np.ndarray) else x.get() for x in (got, want))
    np.testing.assert_allclose(na_got, na_want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"mask": na.Window(1, 1), "scale": 1.0}, {"causal": True}])
def test_a_layer_is_attention_of_each_sequence(ops, rng, options):
    xs = [ops.asarray2f(rng.standard_normal((n, 24))) for n in LENGTHS]
    model = attention(2, score=score_of(ops), **options)
    ys, backprop = model(xs, is_train=True)
    dxs = backprop(ys)
    sums = dict.fromkeys(("slopes", "slopes2", "logits"), 0)
    for x, y, dx in zip(xs, ys, dxs, strict=True):
        q, k, v = x.reshape(len(x), 3, 2, 4).transpose(1, 2, 0, 3)
        o, back = na.attention_vjp(q, k, v, score=score_of(ops), **options)
        assert_close(y, o.swapaxes(0, 1).reshape(len(x), 8))
        grads = back(o)
        assert_close(dx, ops.xp.stack(list(grads)).transpose(2, 0, 1, 3).reshape(len(x), 24))
        for name, gradient in zip(sums, (grads.score[0], grads.score[3], grads.score[4])):
            sums[name] = sums[name] + gradient
    assert set(model.param_names) == set(sums)
    for name, total in sums.items():
        assert_close(model.get_grad(name), total)


def test_an_array_is_a_sequence(ops, rng):
    x = ops.asarray2f(rng.standard_normal((5, 12)))
    model = attention(1)
    (y,), backprop = model([x], is_train=True)
    y_alone, backprop_alone = model(x, is_train=True)
    assert_close(y_alone, y)
    assert_close(backprop_alone(y), backprop([y])[0])
    assert_close(model.predict([x])[0], y)


@pytest.mark.parametrize("count", [0, 2])
def test_sequences_with_nothing_in_them(ops, count):
    ys, backprop = attention(2)([ops.alloc2f(0, 12)] * count, is_train=True)
    assert [y.shape for y in ys] == [(0, 4)] * count
    assert [dx.shape for dx in backprop(ys)] == [(0, 12)] * count


def test_parameters_are_taken_as_they_are_now(rng):
    x = rng.standard_normal((5, 12)).astype("f")
    model = attention(2, score=na.Alibi(np.zeros(2, "f")))
    before = model.predict(x)
    model.set_param("slopes", np.ones(2, "f"))
    np.testing.assert_array_equal(model.predict(x), attention(2, score=na.Alibi(np.ones(2, "f"))).predict(x))
    assert (model.predict(x) != before).any()
    optimizer = thinc.Adam(0.1)
    y, backprop = model.begin_update(x)
    backprop(y)
    model.finish_update(optimizer)
    assert (model.get_param("slopes") != 1).all()


@pytest.mark.parametrize("slopes", [0.5, [0.5, 0.25], np.array([0.5, 0.25]), np.array([0.5, 0.25], np.float16)])
def test_optimisers_take_all_parameters(ops, rng, slopes):
    x = ops.asarray2f(rng.standard_normal((5, 12)))
    model = attention(2, score=na.Alibi(slopes))
    y, backprop = model.begin_update(x)
    backprop(y)
    model.finish_update(thinc.Adam(0.1))
    found = model.get_param("slopes")
    assert (found.dtype, found.shape) == (np.float32, np.shape(slopes) or (1,))
    assert (abs(found - ops.asarray(slopes)) > 0.05).all()


def test_a_copy_and_what_was_saved_give_the_same(rng):
    x = rng.standard_normal((5, 12)).astype("f")
    model = attention(2, score=na.Alibi(np.array([0.5, 0.25], "f")))
    other = attention(2, score=na.Alibi(np.zeros(2, "f")))
    other.from_dict(model.to_dict())
    for same in (other, model.copy()):
        np.testing.assert_array_equal(same.predict(x), model.predict(x))


def test_dropout_is_for_training_and_new_in_each_call(rng):
    x = rng.standard_normal((5, 12)).astype("f")
    model = attention(2, dropout=na.Dropout(0.5, seed=1))
    plain = attention(2).predict(x)
    (first, backprop), (second, _) = (model(x, is_train=True) for _ in range(2))
    assert (first != second).any()
    np.testing.assert_array_equal(model.predict(x), plain)
    q, k, v = x.reshape(5, 3, 2, 2).transpose(1, 2, 0, 3)
    o, back = na.attention_vjp(q, k, v, dropout=na.Dropout(0.5, seed=1), mask=na.Segments([0, 5]))
    np.testing.assert_array_equal(first, o.swapaxes(0, 1).reshape(5, 4))
    assert_close(backprop(first), np.stack(back(o)).transpose(2, 0, 1, 3).reshape(5, 12))
    thinc.set_dropout_rate(model, 0.0)
    np.testing.assert_array_equal(model(x, is_train=True)[0], plain)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: attention(0), "heads: got 0, allowed 1 or more"),
        (lambda: attention(2, mask=na.Segments([0, 5])), "mask: got Segments, expected a mask within each sequence"),
        (lambda: attention(2, dropout=0.5), r"dropout: got 0\.5, expected a numbattn.Dropout"),
        (lambda: attention(2).predict(np.ones((5, 8), "f")), "got the width 8, expected a multiple of 6"),
    ],
)
def test_what_does_not_fit_says_so(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


FAULTS = {
    "test_sequences_with_nothing_in_them": {
        "reshape(tokens, heads * head_dim)": "reshape(tokens, -1)",
        "packed.reshape(len(packed), 3,": "packed.reshape(-1, 3,",
    },
    "if seen[part._name] > 1": "if seen[part._name] > 2",
    "dropout.offset + 1": "dropout.offset",
    ".reshape(x.shape or (1,))": "",
    ', dtype="float32").reshape': ").reshape",
    "{part._name: model.get_param(name)}": "{}",
}
