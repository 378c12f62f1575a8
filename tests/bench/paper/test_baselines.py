import numpy as np
import pytest
from paper import baselines
from paper.baselines import Extras

SHAPE = 2, 2, 7, 3
EXTRAS = [{}, {"causal": True}, {"lengths": [7, 4]}, {"dropout": 0.3}, {"causal": True, "lengths": [3, 6]}]


def problem(**options):
    """q, k, v, do and their Extras."""
    arrays = np.random.default_rng(0).standard_normal((4, *SHAPE))
    return *arrays, Extras(np, (*SHAPE[:3], SHAPE[2]), np.dtype(np.float64), **options)


def check_gradients(f, arrays, do, grads, step=1e-6):
    """Check gradients along one random direction for each array, by central differences."""
    rng = np.random.default_rng(1)
    for n, (x, grad) in enumerate(zip(arrays, grads, strict=True)):
        direction = rng.standard_normal(x.shape)
        up, down = (
            (f(*arrays[:n], x + sign * step * direction, *arrays[n + 1:]) * do).sum() for sign in (1, -1)
        )  # fmt: skip
        np.testing.assert_allclose((grad * direction).sum(), (up - down) / (2 * step), rtol=1e-6, atol=1e-8)


class Drawn(Extras):
    """Extras whose dropout masks of chunks are parts of one that is drawn once."""

    def Z(self, rows=baselines.ALL, columns=baselines.ALL):
        whole = super().Z()
        return None if whole is None else whole[..., rows, columns]


@pytest.mark.parametrize("options", EXTRAS)
@pytest.mark.parametrize("sizes", [(2, 3), (7, 1), (100, 100)])
def test_chunks_are_the_standard_formula(options, sizes):
    q, k, v, do, _ = problem()
    extras = Drawn(np, (*SHAPE[:3], SHAPE[2]), q.dtype, **options)
    o, backprop = baselines.rabe_staats(np, q, k, v, extras, *sizes)
    expected, expected_backprop = baselines.standard(np, q, k, v, extras)
    for got, want in zip((o, *backprop(do)), (expected, *expected_backprop(do)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


def test_the_dropout_mask_of_a_chunk_is_drawn_again():
    extras = problem(dropout=0.25)[-1]
    first, other = (extras.Z(slice(start, start + 3), slice(0, 5)) for start in (0, 3))
    np.testing.assert_array_equal(first, extras.Z(slice(0, 3), slice(0, 5)))
    assert (first != other).any()
    assert set(np.unique(first)) == {0, 1 / 0.75}


@pytest.mark.parametrize("options", [{}, {"lengths": [7, 4]}, {"dropout": 0.3}])
def test_gradients_of_linformer(options):
    q, k, v, do, extras = problem(**options)
    E, F = np.random.default_rng(2).standard_normal((2, 4, SHAPE[2]))

    def forward(q, k, v, E, F):
        return baselines.linformer(np, q, k, v, extras, (E, F))[0]

    _, backprop = baselines.linformer(np, q, k, v, extras, (E, F))
    check_gradients(forward, (q, k, v, E, F), do, backprop(do))


@pytest.mark.parametrize("options", [{}, {"lengths": [7, 4]}])
def test_gradients_of_linear_attention(options):
    q, k, v, do, extras = problem(**options)
    _, backprop = baselines.linear(np, q, k, v, extras)
    check_gradients(lambda *arrays: baselines.linear(np, *arrays, extras)[0], (q, k, v), do, backprop(do))


@pytest.mark.parametrize("approximation", [baselines.linformer, baselines.linear])
def test_approximations_do_not_see_padding(approximation):
    q, k, v, do, extras = problem(lengths=[7, 4])
    more = [np.random.default_rng(2).standard_normal((2, 4, SHAPE[2]))] if approximation is baselines.linformer else []
    o, backprop = approximation(np, q, k, v, extras, *more)
    k[1, :, 4:], v[1, :, 4:] = 3, 5
    again, _ = approximation(np, q, k, v, extras, *more)
    np.testing.assert_array_equal(o, again)
    assert all((x[1, :, 4:] == 0).all() for x in backprop(do)[1:3])


@pytest.mark.parametrize(("approximation", "options", "message"), [
    (baselines.linformer, {"causal": True}, "not causal"),
    (baselines.linear, {"causal": True}, "recurrence"),
    (baselines.linear, {"dropout": 0.1}, "no matrix P"),
])  # fmt: skip
def test_what_approximations_cannot(approximation, options, message):
    q, k, v, _, extras = problem(**options)
    more = [None] if approximation is baselines.linformer else []
    with pytest.raises(ValueError, match=message):
        approximation(np, q, k, v, extras, *more)


@pytest.mark.parametrize("peer", ["standard", "rabe_staats", "linear"])
def test_results_have_the_dtype_of_inputs(peer):
    q, k, v, do = np.random.default_rng(0).standard_normal((4, *SHAPE)).astype(np.float16)
    extras = Extras(np, (*SHAPE[:3], SHAPE[2]), q.dtype, causal=peer != "linear", lengths=[7, 4])
    o, backprop = getattr(baselines, peer)(np, q, k, v, extras)
    for x in (o, *backprop(do)):
        assert x.dtype == np.float16
        assert np.isfinite(x).all()
