"""Arrays turned on a GPU, as on a CPU; what calls give to kernels is tested in tests/rotations."""

import numpy as np
import pytest

import numbattn as na
from numbattn.base.checks import DTYPES
from numbattn.cpu import rotations as on_cpus
from numbattn.cuda import rotations as module
from tests.tools.launch import launch, mostly_simulated

FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = DTYPES
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture(autouse=True)
def in_world(world, monkeypatch):
    monkeypatch.setattr(module, "launch", launch)


def check(x, positions, rotary, out=None, back=False):
    """As on CPUs, but for the order of additions and multiplications; nothing beyond is written."""
    out = np.full(x.shape, np.nan, x.dtype) if out is None else out
    width, want = rotary._width(x.shape[-1], positions.shape[-1]), np.empty_like(x)
    on_cpus.turn(want, x, positions, rotary, width, back)
    module.turn(out, x, positions, rotary, width, back)
    atol = 1e-15 * abs(x).max() if x.dtype == FLOAT64 else 1e-6
    rtol = {2: 2.0**-7 if x.dtype == BFLOAT16 else 2.0**-10, 4: 0, 8: 0}[x.itemsize]
    np.testing.assert_allclose(out.astype(float), want.astype(float), rtol=rtol, atol=atol)


def drawn(rng, shape, dtype):
    return rng.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize(("dtype", "shape", "rotary"), [
    (FLOAT16, (2, 1, 9, 21, 32), na.Rotary()),
    (FLOAT32, (1, 1, 2, 5, 24), na.Rotary(dims=20, interleaved=True)),
    *(pytest.param(*which, marks=mostly_simulated) for which in (
        (BFLOAT16, (1, 2, 3, 5, 64), na.Rotary(interleaved=True)),
        (FLOAT64, (1, 1, 2, 21, 9), na.Rotary(dims=6)),
        (FLOAT64, (1, 1, 2, 3, 20), na.Rotary(interleaved=True, scaling=YARN)),
        (BFLOAT16, (1, 1, 1, 20, 84), na.Rotary(dims=80, scaling=YARN)),
        (FLOAT32, (1, 1, 1, 2, 1200), na.Rotary()),
    )),
])  # fmt: skip
def test_as_on_cpus(rng, dtype, shape, rotary):
    positions = rng.integers(0, 100000, (1, 1, 1, shape[-2], 1))
    check(drawn(rng, shape, dtype), positions, rotary)


@mostly_simulated
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", [np.int32, np.int64, np.float32, np.float64])
def test_positions_along_several_axes(rng, kind, interleaved):
    positions = rng.uniform(0, 999, (2, 1, 1, 5, 3)).astype(kind)
    check(drawn(rng, (2, 2, 3, 5, 26), FLOAT32), positions, na.Rotary(dims=24, interleaved=interleaved), back=True)


@mostly_simulated
@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_of_any_strides_in_place(rng, interleaved):
    x = drawn(rng, (1, 2, 19, 3, 25), FLOAT16).swapaxes(2, 3)[..., ::-1, :24]
    check(x.copy(), np.arange(19).reshape(1, 1, 1, 19, 1), na.Rotary(interleaved=interleaved), out=x * 0)
    copy = x.copy()
    check(copy, np.arange(19).reshape(1, 1, 1, 19, 1), na.Rotary(interleaved=interleaved), out=copy)


def test_numbers_are_kept(rng):
    rotary, x = na.Rotary(), np.zeros((2, 16), np.float32)
    assert module.columns_of(rotary, x) is module.columns_of(rotary, x)
    assert module.turns_of(rotary, 16, True, x)[0] is module.turns_of(rotary, 16, True, x)[0]
    turns, back = (module.turns_of(rotary, 16, back, x)[0] for back in (False, True))
    np.testing.assert_array_equal(turns, -back)


FAULTS = {
    "-(-heads // HEADS) * first": "heads // HEADS * first",
    "minimum(group * HEADS + HEADS, heads)": "minimum(group * HEADS + HEADS, heads - 1)",
    "axis * width, row, cosines": "0, row, cosines",
    "(seqlen + ROWS - 1) // ROWS)\n": "seqlen // ROWS)\n",
    "-turns if back else turns": "turns",
    "map_elements(sine, angles": "map_elements(cosine, angles",
    "        if rest:": "        if not rest:",
    "* factor, REAL)\n            sines": ", REAL)\n            sines",
    "at * layout.dtype.itemsize": "0",
    "minimum(i, first_axis - 1)": "0",
}
