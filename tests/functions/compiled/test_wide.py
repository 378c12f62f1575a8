"""Arrays of integers and booleans as functions of scores see them: compiled, the same as in plain Python."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numbattn as na
from numbattn.cpu.function import element

INTEGERS = np.int8, np.int64, np.uint8, np.uint32  # each is compiled


def of_integers(s, which, head, i, j, x, floats):
    """Many expressions, so that one function is compiled."""
    a, c, n = x[i], x[j], 0
    if which == 0:
        return s * (a - c)
    if which == 1:
        return a * c - s
    if which == 2:
        return s - -a
    if which == 3:
        return ~a + s
    if which == 4:
        return s + a // (c + 3) if c > 0 else s + (-a) // 7
    if which == 5:
        return s + (-a) % 7 + (a - c) % -5
    if which == 6:
        return s + (a << 3) + ((a - c) >> 1)
    if which == 7:
        return abs(a - c) + s
    if which == 8:
        return s + min(a, c) - max(a, 3)
    if which == 9:
        return (a ^ c) - (a | 5) + (c & 255) + s
    if which == 10:
        return s + a**2 - c
    if which == 11:
        return s + (i - a) * (j - c) + len(x) - a + x.shape[0] - x.size - x.ndim
    if which == 12:
        for each in x:
            n -= each
        return s + n
    if which == 13:
        return s + x[::-1][i] - x[1:][0] + (x.T[j] - x.T[i])
    if which == 14:
        return (a - c) / 4 + floats[i] * a
    if which == 15:
        return s if a - c < -1 else math.sqrt(abs(c - a))
    if which == 16:
        n = a if a > c else -1
        return s + n - c
    return s - c - np.minimum(a, c) + np.abs(a - c) * float(a)


def of_booleans(s, which, head, i, j, x, grid):
    a, c, d = x[i], x[j], grid[i][j]
    if which == 0:
        return s * (a - c)
    if which == 1:
        return s + (a + c + d) * 2.5
    if which == 2:
        return -a * s - +d
    if which == 3:
        return s + a * c + (a & c) + (a | d) + (a ^ c)
    if which == 4:
        return s if not a else s + (c << 2)
    if which == 5:
        return s + abs(a - c) + max(a, d) - min(a, 3)
    if which == 6:
        return s + (a < c) - (i < j) + (a == d)
    if which == 7:
        return s + a // 2 + a / 2 + a**2
    if which == 8:
        return s + sum((a, c, d)) + int(a)
    return s + grid.shape[1] + len(grid) + grid[i, j] * s


def check(function, places, x, y):
    score = na.Score(function, arrays=[x, y])
    compiled = element(score)
    for which, i, j in places:
        at = 0.75, which, 0, i, j
        assert compiled(*at) == pytest.approx(float(score._value(*at)), rel=1e-12), at


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_expressions_of_integers(data):
    dtype = data.draw(st.sampled_from(INTEGERS))
    about = np.iinfo(dtype)
    numbers = st.integers(max(about.min, -(2**31)), min(about.max, 2**31))
    x = np.array(data.draw(st.lists(numbers, min_size=3, max_size=3)), dtype)
    places = [(which, i, (i + 1) % 3) for which in range(18) for i in range(3)]
    check(of_integers, places, x, np.linspace(0, 1, 3))


@given(st.lists(st.booleans(), min_size=9, max_size=9))
@settings(max_examples=20, deadline=None)
def test_expressions_of_booleans(found):
    grid = np.array(found).reshape(3, 3)
    check(of_booleans, [(which, i, j) for which in range(10) for i in range(3) for j in range(2)], grid[0], grid)


def test_parts_of_an_array_are_as_wide():
    def function(s, batch, head, i, j, x):
        row = x[batch, 1:]
        for each in x[batch]:
            s += each[0] - each[1]
        return s - row[i][j] + row[i, 0] * x.T[0, 1, 0] - row.shape[0]

    x = np.random.default_rng(0).integers(0, 255, (2, 4, 3), dtype=np.uint8)
    score = na.Score(function, arrays=[x[:, ::-1]])
    for place in np.ndindex(2, 1, 3, 3):
        assert element(score)(0.5, *place) == float(score._value(0.5, *place))


def test_what_a_function_would_write_is_refused():
    def writes(s, batch, head, i, j, x):
        x[j] = i
        return s

    q = np.zeros((3, 4))
    for dtype in np.float64, np.uint8:
        with pytest.raises(TypeError, match=r"Numba cannot compile .*writes"):
            na.attention(q, q, q, score=na.Score(writes, arrays=[np.zeros(3, dtype)]))


def test_a_table_of_bytes_that_is_attended_to():
    """Differences are negative, in values and derivatives, in the reference, too."""
    rng = np.random.default_rng(0)
    q, k, v, do = rng.standard_normal((4, 2, 7, 8))

    def apart(s, batch, head, i, j, place):
        return s * (place[i] - place[j]) / 9

    place = rng.integers(0, 10, 7)
    wide, narrow = (na.Score(apart, arrays=[place.astype(dtype)]) for dtype in (np.int64, np.uint8))
    (want, backward), (o, backprop) = (na.attention_vjp(q, k, v, score=score) for score in (wide, narrow))
    for x, y in zip((o, *backprop(do)), (want, *backward(do))):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_allclose(na.reference.attention_forward(q, k, v, score=narrow)[0], want, rtol=1e-12)


FAULTS = {
    "return types.int64 if _is_narrow(kind) else kind": "return kind",
    "lambda x: widen(array_of(x).T)": "lambda x: array_of(x).T",
    "kind.copy(readonly=True)": "kind",
    "functions/entries.py": {
        "return x.item() if isinstance(x, np.generic) else": "return x if isinstance(x, np.generic) else",
    },
}
