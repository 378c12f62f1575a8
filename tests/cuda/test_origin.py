"""Parts of a larger attention on a GPU, and sequences split over several."""

from contextlib import nullcontext
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn import distributed as nad
from numbattn.base.origin import Crop, Origin
from numbattn.call import passes
from numbattn.call.problem import describe, mask_of
from numbattn.masks import cropped
from numbattn.scores import as_parts
from tests.accuracy import assert_accurate, assert_equal, exact, plain, random, to_numpy
from tests.base.test_origin import assert_part_of_heads, assert_parts_make_the_whole
from tests.tools.device import AMPERE, HOPPER, TURING, on
from tests.tools.launch import world_of

HALF, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


@pytest.mark.slow
def test_parts_make_the_whole(rng):
    with world_of("compiled"), on(AMPERE):
        assert_parts_make_the_whole(rng, np.float32, 3e-5, "function", na.Dropout(0.3, 5, 2), size=64)


def test_part_of_the_heads_and_of_the_batch():
    with world_of("simulated"), on(AMPERE):
        assert_part_of_heads(HALF, 2e-3, Origin(16, 32, 2, 1, heads=3), size=50, heads=1, backward=True)


# ------------------------------------------------------------------------- results in float32 of half precision
def check_wide(rng, device, dtype, m, n, d, e, deterministic=False, **options):
    """Rounded, o is what the usual call returns."""
    shapes = (1, 2, m, d), (1, 1, n, d), (1, 1, n, e), (1, 2, m, e)
    q, k, v, do = (random(rng, shape, dtype) for shape in shapes)
    problem, inputs = describe(q, k, v, wide=True, **options)
    with on(device):
        o, saved = passes.forward(problem, inputs)
        grads = passes.backward(saved, do, None, deterministic)
        usual = na.attention(q, k, v, **options)
    assert_equal(o.astype(dtype), usual)
    wanted, others = exact(do, q, k, v, **options), plain(do, q, k, v, **options)
    for name, *results in zip(("o", "lse", "dq", "dk", "dv"), (o, saved.lse, *grads), wanted, others, strict=True):
        assert results[0].dtype == np.float32
        assert (results[0] != results[0].astype(dtype)).any(), name     # not rounded on the way
        assert_accurate(name, *results, dtype)


@pytest.mark.parametrize(("device", "dtype"), [
    pytest.param(HOPPER, BFLOAT16, id="hopper"), pytest.param(AMPERE, HALF, id="ampere", marks=pytest.mark.slow),
    pytest.param(TURING, HALF, id="turing", marks=pytest.mark.slow),
])  # fmt: skip
def test_wide(rng, device, dtype):
    with world_of("simulated"):
        check_wide(rng, device, dtype, 30, 40, 16, 16, causal=True, dropout=na.Dropout(0.2, 3))


PACKED = na.Segments([0, 40, 100], [0, 90, 150]) & na.Causal()
ROUTES = {
    "hopper": (HOPPER, BFLOAT16, 100, 150, 128, 128, {"causal": True, "dropout": na.Dropout(0.2, 3)}),
    "hopper, deterministic": (HOPPER, HALF, 100, 150, 64, 64, {"deterministic": True}),
    "hopper, wide heads": (HOPPER, HALF, 70, 150, 256, 200, {"causal": True}),
    "hopper, packed": (HOPPER, BFLOAT16, 100, 150, 64, 64, {"mask": PACKED}),
    "hopper, few queries": (HOPPER, BFLOAT16, 3, 150, 64, 64, {"causal": True}),
    "hopper, stand-ins": (HOPPER, HALF, 70, 90, 13, 7, {"score": na.Alibi(0.1, gradient=False)}),
    "ampere": (AMPERE, BFLOAT16, 100, 150, 128, 128, {"causal": True, "dropout": na.Dropout(0.2, 3)}),
    "ampere, deterministic": (AMPERE, HALF, 100, 150, 64, 64, {"deterministic": True}),
    "ampere, packed": (AMPERE, BFLOAT16, 100, 150, 64, 64, {"mask": PACKED}),
    "ampere, few queries": (AMPERE, HALF, 3, 150, 64, 64, {"causal": True}),
    "turing": (TURING, BFLOAT16, 30, 40, 13, 7, {"causal": True}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_wide_by_all_routes(rng, route):
    *sizes, options = ROUTES[route]
    with world_of("compiled"):
        check_wide(rng, *sizes, **options)


# ---------------------------------------------------------------------------------------------- o and lse of other keys
def check_goes_on(rng, device, dtype, m, n, d, e, deterministic=False, score=None, dropout=None, **options):
    """Keys in three parts: what goes on from o and lse of those before is the whole. Some rows see nothing of the
    first, the second, or any; o is in place, in the dtype of sums, but for the last. On the GPU if there is no device.
    """
    shapes = (1, 2, m, d), (1, 1, n, d), (1, 1, n, e)
    q, k, v = (random(rng, shape, dtype) for shape in shapes)
    k[..., 32:48, :] *= 4                                       # larger scores than those before and after
    bounds, visible = [0, 32, max(n // 32 * 16, 48), n], rng.random((m, n)) < 0.8
    for row, first, end in (0, 0, 32), (1, 32, n), (2, 0, n):
        visible[row, first:end] = False
    mask, given, onto, out = mask_of(**options) & visible, as_parts(score), None, None
    there = np if device else pytest.importorskip("cupy")
    with on(device) if device else nullcontext():
        for first, end in pairwise(bounds):
            crop, origin = Crop(0, m, first, end - first, m, n), Origin(0, first, heads=2)
            problem, inputs = describe(
                *map(there.asarray, (q, k[..., first:end, :], v[..., first:end, :])), mask=cropped(mask, crop),
                dropout=dropout, score=[part._cropped(crop, None) for part in given], origin=origin, wide=end < n,
            )  # fmt: skip
            if onto is not None:
                out = onto[0] if end < n else there.empty(problem.out_shape, dtype)
            o, saved = passes.forward(problem, inputs, out, onto=onto)
            assert onto is None or (o is out and saved.lse is onto[1])
            onto = o, saved.lse
    options, do = {"mask": mask, "score": score, "dropout": dropout}, np.ones(o.shape, dtype)
    wanted, others = (f(do, q, k, v, **options) for f in (exact, plain))
    for name, *results in zip(("o", "lse"), map(to_numpy, onto), wanted, others):
        assert_accurate(name, *results, dtype)


@pytest.mark.parametrize(("device", "dtype", "m"), [
    pytest.param(HOPPER, BFLOAT16, 20, id="hopper"), pytest.param(AMPERE, HALF, 20, id="ampere"),
    pytest.param(TURING, np.dtype(np.float32), 20, id="turing"), pytest.param(AMPERE, HALF, 6, id="few queries"),
])  # fmt: skip
def test_goes_on(rng, device, dtype, m):
    with world_of("simulated"):
        check_goes_on(rng, device, dtype, m, 64, 16, 16, causal=False, mask=None, dropout=na.Dropout(0.2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_goes_on_by_all_routes(rng, route):
    *sizes, options = ROUTES[route]
    with world_of("compiled"):
        check_goes_on(rng, *sizes, **{"causal": False, "mask": None} | options)


@pytest.mark.parametrize("where", [lambda: on(AMPERE), nullcontext], ids=["device", "cpu"])
def test_keys_that_nobody_sees_add_nothing(rng, where):
    q, k, v = random(rng, (3, 2, 20, 16), HALF)
    before, lse = random(rng, (2, 20, 16), np.float32), random(rng, (2, 20), np.float32)
    problem, inputs = describe(q, k, v, mask=na.Lengths(keys=0))
    with where():
        o, saved = passes.forward(problem, inputs, onto=(before, lse_found := lse.copy()))
    assert saved.lse is lse_found
    assert_equal(o, before.astype(HALF))
    np.testing.assert_allclose(lse_found, lse, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES)
def test_goes_on_on_a_gpu(rng, route):
    _, dtype, *sizes, options = ROUTES[route]
    check_goes_on(rng, None, dtype, *sizes, **{"causal": False, "mask": None} | options)


# ----------------------------------------------------------------------------------------------------- split over ranks
def test_split_over_ranks(rng):
    """With the masks whose pieces are of other kinds on a GPU than on CPUs."""
    q, k, v, do = random(rng, (4, 2, 34, 8), HALF)
    mask = na.Segments([0, 20, 34]) & na.Causal() & (rng.random((34, 34)) < 0.8)
    options = {"mask": mask, "score": [na.Alibi(np.array([0.1, 0.2])), na.Sink(0.5)], "dropout": na.Dropout(0.3, 2)}
    o, backprop = na.attention_vjp(*(x.astype(np.float64) for x in (q, k, v)), **options)
    grads, ring = backprop(do), nad.Simulated(2, "contiguous")
    with world_of("simulated"), on(AMPERE):
        o_parts, backprop = nad.attention_vjp(ring, *map(ring.split, (q, k, v)), plan="ring", **options)
        found = backprop(ring.split(do))
    for got, want in zip([*map(ring.join, (o_parts, *found)), *found.score], [o, *grads, *grads.score], strict=True):
        np.testing.assert_allclose(got, want, atol=4e-3 * max(1, abs(want).max()))
