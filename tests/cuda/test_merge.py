"""Attention over other keys, merged into o and lse on a GPU; as on NumPy arrays."""

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda import merge as module
from numbattn.cuda.merge import merge_into, sum_into
from numbattn.cuda.tile import bfloat16
from tests.tools.launch import launch


@pytest.fixture(autouse=True)
def in_world(world, monkeypatch):
    monkeypatch.setattr(module, "launch", launch)


def states(rng, shape, dtype):
    """Two of o and lse, as attention leaves them: some rows of each see nothing."""
    o = rng.standard_normal((2, *shape)).astype(dtype)
    lse = np.where(rng.random(o.shape[:-1]) < 0.3, -np.inf, 20 * rng.standard_normal(o.shape[:-1])).astype(dtype)
    o[lse == -np.inf] = 0
    return zip(o, lse)


@pytest.mark.parametrize(("dtype", "features"), [(np.float32, 64), (np.float64, 20), (np.float32, 7)])
def test_as_on_numpy_arrays(rng, dtype, features):
    """Some rows of what is larger; the others stay."""
    (o, lse), (part, part_lse) = states(rng, (2, 1, 21, features), dtype)
    want, want_lse = na.merge([(o, lse), (part, part_lse)])
    whole, whole_lse = np.full((2, 1, 40, features), 99, dtype), np.full((2, 1, 40), 99, dtype)
    some = slice(16, 37)
    whole[..., some, :], whole_lse[..., some] = o, lse
    o = whole[..., some, :]
    merge_into(o, o, whole_lse[..., some], part, part_lse)
    tolerance = 100 * np.finfo(dtype).eps
    np.testing.assert_allclose(whole[..., some, :], want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(whole_lse[..., some], want_lse, rtol=tolerance, atol=tolerance)
    assert (np.delete(whole, np.r_[some], axis=-2) == 99).all()
    assert (np.delete(whole_lse, np.r_[some], axis=-1) == 99).all()


def test_keys_without_values(rng):
    """A sink: one zero for all of o; and no batch axes."""
    ((o, lse), _), logits = states(rng, (20, 8), np.float32), np.zeros(20, np.float32)
    want, want_lse = na.merge([(o, lse), (np.zeros_like(o), logits)])
    merge_into(o, o, lse, np.broadcast_to(np.float32(0), o.shape), logits)
    np.testing.assert_allclose(o, want, rtol=1e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-6)


def test_what_is_not_finite_shows():
    o, lse = np.ones((2, 8), np.float32), np.array([np.inf, np.nan], np.float32)
    merge_into(o, o, lse, np.ones_like(o), np.zeros_like(lse))
    assert np.isnan(o).all()
    np.testing.assert_array_equal(lse, [np.inf, np.nan])


def test_without_elements_nothing_is_launched(monkeypatch):
    launched = []
    monkeypatch.setattr(module, "launch", lambda *arguments: launched.append(arguments))
    o, lse = np.zeros((2, 0, 8), np.float32), np.zeros((2, 0), np.float32)
    merge_into(o, o, lse, o, lse)
    sum_into(o, o, o)
    assert not launched


@pytest.mark.parametrize(("dtype", "features"), [(bfloat16, 64), (np.float16, 12), (np.float32, 7)])
def test_sums_of_another_dtype(rng, dtype, features):
    """Some rows of what is larger; one term, two, and o of two states."""
    x, y = rng.standard_normal((2, 3, 21, features)).astype(np.float32)
    lse, part_lse = rng.standard_normal((2, 3, 21)).astype(np.float32)
    out, some = np.full((3, 40, features), 99, dtype), slice(16, 37)

    def check(want):
        np.testing.assert_array_equal(out[:, some], want.astype(dtype))
        assert (np.delete(out, np.r_[some], axis=-2) == 99).all()

    sum_into(out[:, some], x)
    check(x)
    sum_into(out[:, some], x, y)
    check(x + y)
    want = x.copy(), lse.copy()
    merge_into(want[0], *want, y, part_lse)
    merge_into(out[:, some], x, lse, y, part_lse)
    check(want[0])
    np.testing.assert_array_equal(lse, want[1])


FAULTS = {
    "where(highest == -INFINITE, 0, highest)": "highest",
    "where(l == 0, 1, l)": "l",
    "where(highest == INFINITE, highest, m + log2(l) * LN2)": "m + log2(l) * LN2",
    "        sync_threads()": "        pass",
    "* len(out), 1, 1)": ", 1, 1)",
    "if TWO:": "if not TWO:",
}
