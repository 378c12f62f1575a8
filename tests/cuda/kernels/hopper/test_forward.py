"""One block that draws all work tiles, simulated; test_passes has the tiles of a plan, compiled."""

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.kernels.hopper.forward import forward
from tests.accuracy import assert_accurate
from tests.tools.launch import launch, poisoned, simulated_only, tensor_map

from ..calls import call

pytestmark = simulated_only
SIZES = {"head_dim": 64, "head_dim_v": 64, "tile_n": 64, "consumers": 2, "stages": 2, "q_stages": 3}


def check(rng, at_once=1, heads_per_tile=1, ascending=0, blocks=1, sizes=(), **problem):
    case = call(rng, np.float16, **{"d": 24, "e": 40} | problem)
    sizes = SIZES | dict(sizes)
    dtype, dropout = case.q.dtype.name, case.kept_scale != 1
    source = forward(dtype=dtype, out_dtypes=(dtype,), mask=case.mask, score=(), dropout=dropout, **sizes)
    o, lse, counters = poisoned(case.do.shape, case.q.dtype), poisoned(case.lse.shape), np.zeros(2, np.uint32)
    sight = case.sight_of("q", 64 * sizes["consumers"], sizes["tile_n"])
    maps = [tensor_map(x, found.box) for x, found in zip((case.q, case.k, case.v, o), source.tensor_maps)]
    launch(
        source.function, (blocks, 1, 1), source.threads, source.shared, *maps, (), (), (), lse, sight, (), case.drops,
        counters, case.group_size, case.scale_log2, case.kept_scale,
        *map(np.int32, (at_once, heads_per_tile, ascending)),
        cc=(9, 0, "a"),
    )  # fmt: skip
    assert not counters.any()
    for name, got in (("o", o), ("lse", lse)):
        assert_accurate(name, got, case.wanted[name], case.plain[name], got.dtype)


@pytest.mark.parametrize("ascending", [0, 1])
def test_causal(rng, ascending):
    """The two consumers see different keys."""
    check(rng, m=190, n=190, causal=True, ascending=ascending)


def test_heads_packed_into_a_work_tile(rng):
    check(rng, heads=4, heads_k=2, m=60, n=70, causal=True, heads_per_tile=2)


def test_a_work_tile_that_sees_nothing(rng):
    check(rng, m=130, n=20, mask=na.Causal(offset=-128))


def test_lengths(rng):
    mask = na.Lengths(np.array([[70, 17]]), np.array([[19, 100]]))
    check(rng, heads=2, m=100, n=150, poison=np.nan, mask=mask)


def test_blocks(rng):
    blocks = np.array([[[[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]]]], bool)
    check(rng, m=192, n=256, mask=na.BlockSparse(blocks, (64, 64)))


def test_wide_heads(rng):
    check(rng, m=70, n=140, e=210, sizes={"head_dim_v": 256})


def test_several_work_tiles(rng):
    """More of them than are scheduled ahead, and more tiles of Q, K and V than there are stages."""
    check(rng, heads=5, m=70, n=150)


def test_dropout(rng):
    check(rng, batch=2, heads=2, m=70, n=70, dropout=na.Dropout(0.3, seed=5), at_once=2, blocks=2)
