"""One block that takes all work tiles in turn, simulated; and compiled, with the norms."""

import numpy as np
import pytest

from numbattn.call.problem import describe
from numbattn.cuda import points
from numbattn.cuda.kernels.hopper import nearest, parts
from numbattn.cuda.kernels.hopper.pairs import PairTiles
from numbattn.cuda.kernels.points import norms
from numbattn.cuda.kernels.points.norms import PADDED
from tests.accuracy import random
from tests.cuda.works import NAMED, kernels
from tests.tools.device import GPU, HOPPER
from tests.tools.launch import launch, poisoned, simulated_only, tensor_map


def found(x, y, blocks=1):
    """What the kernel finds, squared distances and indices."""
    source = nearest.hopper_nearest(dtype=x.dtype.name, head_dim=64, tiles=TILES)
    batches, heads, n, _ = y.shape
    norms = np.full((batches, heads, -(-n // PADDED) * PADDED), np.inf, np.float32)
    norms[..., :n] = (y.astype(np.float32) ** 2).sum(-1) / 2
    shape = *x.shape[:-1], 1
    r2, j = poisoned(shape), np.full(shape, 77, np.int32)
    maps = [tensor_map(given, of.box) for given, of in zip((x, y), source.tensor_maps)]
    launch(
        source.function, (blocks, 1, 1), source.threads, source.shared, *maps, (), norms, r2, j, np.int32(n),
        np.int32(1), cc=(9, 0, "a"),
    )  # fmt: skip
    return r2, j


def check(x, y, blocks=1):
    r2, j = found(x, y, blocks)
    exact = ((x.astype(float)[..., :, None, :] - y.astype(float)[..., None, :, :]) ** 2).sum(-1)
    scale = (x.astype(float) ** 2).sum(-1).max() + (y.astype(float) ** 2).sum(-1).max()
    np.testing.assert_allclose(r2[..., 0], exact.min(-1), atol=1e-6 * scale)
    np.testing.assert_allclose(np.take_along_axis(exact, j, -1)[..., 0], exact.min(-1), atol=1e-6 * scale)


TILES = PairTiles(64, 2, 2)


@simulated_only
def test_several_work_tiles(rng):
    """More of them than there are stages of x, more tiles of y than of these."""
    x, y = (random(rng, (1, 3, n, 40), np.float16) for n in (150, 192))
    check(x, y)


@pytest.mark.parametrize("blocks", [2])
def test_one_tile(rng, blocks):
    x, y = (random(rng, (2, 1, n, 64), np.float16) for n in (70, 50))
    check(x, y, blocks)


@simulated_only
def test_of_equal_ones_the_first(rng):
    """Whole tiles of y, too."""
    y = random(rng, (1, 1, 8, 8), np.float16).repeat(16, axis=2)
    x = y[:, :, ::16] + np.float16(0.125)
    _, j = found(x, y)
    np.testing.assert_array_equal(j[0, 0, :, 0] % 16, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@simulated_only
def test_many_dimensions(rng, monkeypatch, dtype):
    """More than other kernels hold: chunk by chunk, as parts of float32."""
    monkeypatch.setattr(points, "HEAD_DIMS", (64,))
    monkeypatch.setattr(parts, "MOST_ROOM", np.inf)
    monkeypatch.setattr(norms, "PADDED", 128)
    monkeypatch.setattr(nearest, "OF_PARTS", PairTiles(64, 2, 5, 2))
    x, y = (rng.standard_normal((2, n, 70)).astype(NAMED[dtype]) for n in (30, 100))
    gpu = GPU(HOPPER._replace(multiprocessors=1))
    r2, j = points.PointsBackend(lambda: gpu).nearest(*describe(x, y, y[..., :0]), 1)
    (program,) = gpu.programs.values()
    assert kernels(program.plan)[-1] == "hopper_nearest"
    exact = ((x.astype(float)[..., :, None, :] - y.astype(float)[..., None, :, :]) ** 2).sum(-1)
    np.testing.assert_array_equal(j[..., 0], exact.argmin(-1))
    np.testing.assert_allclose(r2[..., 0], exact.min(-1), atol=1e-4)


FAULTS = {
    "norms_x + 2 * least": "norms_x + least",
    "half_norms - S": "half_norms + S",
    "test_many_dimensions": {
        "-(S + line)": "-S",
        "col_index(S_TILE, n0) < seqlen_k": "col_index(S_TILE, n0) <= seqlen_k",
        "TWICE = ACC(0), ACC(np.inf), ACC(-2)": "TWICE = ACC(0), ACC(np.inf), ACC(2)",
    },
    "cuda/kernels/hopper/pairs.py": {
        "            sync_warpgroup()                                    # all": "            pass  # all",
        "            release(Y)\n": "",
        "            release(X)\n": "",
        "                    wait(next_x)\n": "",
        "wait(Y)\n        return product": "return product",
        "advance(X, CONSUMERS)": "advance(X, 1)",
        "fills=parts + 1": "fills=parts",
        "                acquire(Y)\n": "",
        "                acquire(X)\n": "",
        "mX, batch, head, m0 + consumer * ROWS, sizes": "mX, batch, head, m0, sizes",
        "while n0 + 2 * TILE_N < seqlen_k:": "while n0 + 2 * TILE_N <= seqlen_k:",
        "if n0 + TILE_N < seqlen_k:": "if n0 + TILE_N <= seqlen_k:",
    },
}
