"""Parts of a larger attention on a GPU, and sequences split over several."""

import numpy as np
import pytest

import numbattn as na
from numbattn import api
from numbattn import distributed as nad
from numbattn.origin import Origin
from numbattn.problem import describe
from tests.test_origin import assert_parts_make_the_whole
from tests.tools.device import AMPERE, on
from tests.tools.launch import world_of


def test_parts_make_the_whole(rng):
    with world_of("compiled"), on(AMPERE):
        assert_parts_make_the_whole(rng, np.float32, 3e-5, "function", na.Dropout(0.3, 5, 2), size=64)


@pytest.mark.parametrize(("dtype", "origin", "message"), [
    (np.float16, None, "no results in float32 yet"), (np.float32, Origin(heads=3), "has all heads and the whole batch"),
])  # fmt: skip
def test_what_is_not_there_yet(dtype, origin, message):
    problem, inputs = describe(*np.zeros((3, 2, 5, 8), dtype), origin=origin, wide=True)
    with world_of("simulated"), on(AMPERE), pytest.raises(NotImplementedError, match=message):
        api._run(problem, "forward", problem, inputs)


def test_split_over_ranks(rng):
    """With the masks whose pieces are of other kinds on a GPU than on CPUs."""
    q, k, v, do = rng.standard_normal((4, 2, 70, 8), np.float32)
    mask = na.Segments([0, 40, 70]) & na.Causal() & (rng.random((70, 70)) < 0.8)
    options = {"mask": mask, "score": [na.Alibi(np.array([0.1, 0.2])), na.Sink(0.5)], "dropout": na.Dropout(0.3, 2)}
    o, backprop = na.attention_vjp(q, k, v, **options)
    grads, ring = backprop(do), nad.Simulated(2)
    with world_of("compiled"), on(AMPERE):
        o_parts, backprop = nad.attention_vjp(ring, *map(ring.split, (q, k, v)), plan="ring", **options)
        found = backprop(ring.split(do))
    for got, want in zip([*map(ring.join, (o_parts, *found)), *found.score], [o, *grads, *grads.score], strict=True):
        np.testing.assert_allclose(got, want, atol=3e-5 * max(1, abs(want).max()))
