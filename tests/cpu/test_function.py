"""Score functions, compiled for tiles."""

from functools import partial

import numba
import numpy as np
import pytest

import numbattn as na
from numbattn.cpu import function as compiled
from tests.tools.process import printed


def test_arrays_of_a_function_may_be_any_view(rng):
    q, k, v = rng.standard_normal((3, 2, 30, 8)).astype(np.float32)
    table = rng.standard_normal((40, 3, 60))[::-1, 1, ::2]

    def function(s, batch, head, i, j, table, shown):
        return s + table[i - 40, j - 30] if shown[j - 30] else s    # from the end, as in NumPy

    shown = rng.random(30) < 0.5
    got = na.attention(q, k, v, score=na.Score(function, arrays=[table, shown]))
    want = na.attention(q, k, v, score=na.Bias(np.where(shown, table[:30], 0)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
def test_a_tile_and_its_derivative(rng, dtype):
    """Rows are keys, columns queries; what lies behind the tile is left as it is."""
    place = rng.standard_normal(20).astype(dtype)
    S, slopes, table = place.copy(), np.full(20, np.nan, dtype), rng.standard_normal((30, 40))
    score = na.Score(lambda s, batch, head, i, j, table: s * s * table[i, j] + 10 * batch + head, arrays=[table])
    record = compiled.record_of(score.arrays)
    value, derivative = (compiled.tile_function(score, dtype, which).ctypes for which in (False, True))
    before, at = place[:15].reshape(3, 5), table[11:16, 13:16].T
    derivative(S.ctypes.data, slopes.ctypes.data, 3, 5, 7, 2, 11, 13, record.ctypes.data)
    np.testing.assert_allclose(slopes[:15].reshape(3, 5), 2 * before * at, rtol=1e-5)
    np.testing.assert_array_equal(S, place)
    assert np.isnan(slopes[15:]).all()
    value(S.ctypes.data, 0, 3, 5, 7, 2, 11, 13, record.ctypes.data)
    np.testing.assert_allclose(S[:15].reshape(3, 5), before**2 * at + 72, rtol=1e-5)
    np.testing.assert_array_equal(S[15:], place[15:])


def test_what_does_the_same_is_compiled_once():
    x = np.ones((3, 4))
    misses = compiled._tile_function.cache_info().misses
    for number in (5, 6, 5, 6, 5):
        na.attention(x, x, x, score=na.Score(lambda s, batch, head, i, j, number=number: s + number))
    assert compiled._tile_function.cache_info().misses == misses + 2


PROCESS = """
import sys
import numpy as np
import numbattn as na
from numbattn.cpu import compile, function

class NoCompiler:
    def __init__(self, *args):
        print("compiles")
        sys.exit()

if sys.argv[1] == "read":
    compile.CFunc = NoCompiler
for factor in map(float, sys.argv[2:]):
    score = na.Score(lambda s, batch, head, i, j: factor * s)
    S, record = np.ones(1), function.record_of(())
    function.tile_function(score, S.dtype).ctypes(S.ctypes.data, 0, 1, 1, 0, 0, 0, 0, record.ctypes.data)
    print(*S)
"""


def test_what_several_processes_kept_on_disk_is_told_apart(tmp_path):
    """Each compiles its function first, so that Numba gives both the same names."""
    process = partial(printed, PROCESS, NUMBATTN_CACHE_DIR=str(tmp_path))
    assert process("compile", "2") == ["2.0"]
    assert process("compile", "3") == ["3.0"]
    assert process("read", "2", "3", "4") == ["2.0", "3.0", "compiles"]


@numba.njit
def bent(s, at, depth=3):
    if depth:
        return bent(s, at, depth - 1)
    return s if s < at else at + (s - at) / 2


def test_a_function_that_calls_others(rng):
    q, k, v, do = rng.standard_normal((4, 5, 4))
    o, backprop = na.attention_vjp(q, k, v, score=na.Score(lambda s, batch, head, i, j: bent(s, 100.0)))
    want, wanted = na.attention_vjp(q, k, v)
    for x, y in zip((o, *backprop(do)), (want, *wanted(do))):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-14)
    assert na.check_score(na.Score(lambda s, batch, head, i, j: bent(s, 0.5))) < 1e-6


def test_what_numba_compiled_is_taken_apart(rng):
    q, k, v = rng.standard_normal((3, 5, 4))
    function = lambda s, batch, head, i, j: s * 2       # noqa: E731
    got = na.attention(q, k, v, score=na.Score(numba.njit(function)))
    np.testing.assert_array_equal(got, na.attention(q, k, v, score=na.Score(function)))


def test_what_numba_cannot_compile_is_named():
    def opens_a_file(s, batch, head, i, j):
        return open("x").read()

    x = np.zeros((3, 4))
    with pytest.raises(TypeError, match=r"score: Numba cannot compile .*opens_a_file, line \d+ of .*test_function.py"):
        na.attention(x, x, x, score=na.Score(opens_a_file))


FAULTS = {
    "value_of(S[j, i], batch, head, m0 + i, n0 + j, arrays)": "value_of(S[j, i], batch, head, i, j, arrays)",
    "(data_address(x), *x.shape": "(data_address(x), *x.shape[::-1]",
    "scores/test_parts.py::test_what_was_minus_infinity_has_no_gradient": {
        "seen = S[j, i] != hidden": "seen = True",
    },
    "scores/test_parts.py::test_gradients_of_a_function_by_finite_differences": {
        "return differentiate if order else apply": "return apply",
    },
    "test_jets.py::test_functions": {
        "F[rows + j, i] = bend_of(": "F[rows + j, i] = slope_of(",
        "kinds, dtype.str, order)": "kinds, dtype.str, order > 0)",
    },
}
