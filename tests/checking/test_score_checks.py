"""check_score."""

import math

import numpy as np
import pytest

import numbattn as na
from numbattn.checking import score_checks
from numbattn.functions.compiled import reads


@pytest.mark.parametrize(("lengths", "read", "at"), [
    pytest.param((5, 7), lambda s, batch, head, i, j, x: s + x[i, j], "i = 0, j = 6", marks=pytest.mark.slow),
    ((5, 6), lambda s, batch, head, i, j, x: s + x[i - 6, j] , "i = 0, j = 0"),
    ((9000, 6000), lambda s, batch, head, i, j, x: s + x[1 if i < 8999 else j, 0], "i = 8999"),
    ((5, 6), lambda s, batch, head, i, j, x: s + x[2 * head, batch], "batch = 0, head = 3, i = 0, j = 0"),
])  # fmt: skip
def test_reads_outside_of_arrays_are_found(lengths, read, at):
    score = na.Score(read, arrays=[np.zeros((5, 6))])
    with pytest.raises(ValueError, match=rf"reads outside of its arrays, of shapes \(5, 6\), at .*{at}"):
        na.check_score(score, *lengths, heads=4, batch=2)
    assert na.check_score(na.Score(read, arrays=[np.zeros((9000, 6000), bool)]), *lengths) < 1e-6


def test_derivatives_by_arrays_are_compared(monkeypatch, rng):
    """With a wrong one, as of a rule that is, it says where."""
    def of_two(s, batch, head, i, j, x, y):
        return s * x[i, 1] + math.exp(y[j]) * x[i, 0]

    score = na.Score(of_two, arrays=[rng.random((5, 2), np.float32), rng.random(6)], gradient=True)
    assert na.check_score(score, 5, 6) < 1e-6
    found = reads.in_python

    def wrong(*given):
        for_each = found(*given)
        return lambda *element: ((at, slope * (1 + (at == 12))) for at, slope in for_each(*element))

    monkeypatch.setattr(reads, "in_python", wrong)
    with pytest.raises(ValueError, match=r"the derivative by arrays\[1\]\[2\] is .* at s = .*, i = 0, j = 2"):
        na.check_score(score, 5, 6)


@pytest.mark.parametrize("shape", [(1, 1, 5, 7), (2**12, 2**13, 16, 16), (1, 1, 2**20, 2**21), (3, 2**30, 2**40, 2)])
def test_walks_are_bounded_and_see_all_of_each_axis(shape):
    walks = score_checks._walks(shape)
    for walk in walks:
        visited = [-(-(size - 1) // step) + 1 for size, step in zip(shape, walk)]
        assert math.prod(visited) <= 8 * score_checks.MOST_PLACES
    for axis, size in enumerate(shape):
        least = min(walk[axis] for walk in walks)
        assert least == 1 if size <= score_checks.MOST_PLACES else (size - 1) / least > score_checks.MOST_PLACES / 2


def test_many_heads_of_many_batches():
    def reads(s, batch, head, i, j, x):
        return s + x[batch] * x[head]

    sizes = {"heads": 2**13, "batch": 2**12}
    assert na.check_score(na.Score(reads, arrays=[np.zeros(2**13, bool)]), 16, 16, **sizes) < 1e-6
    with pytest.raises(ValueError, match="at batch = 0, head = 8191, i = 0, j = 0"):
        na.check_score(na.Score(reads, arrays=[np.zeros(2**13 - 1, bool)]), 16, 16, **sizes)


def test_places_that_are_compared():
    """As many as are wanted, with the ends of all axes."""
    for shape in (1, 1, 1, 1), (1, 1, 3, 90), (7, 8, 9, 1000):
        places = np.array([*score_checks.compared(shape)])
        assert len(places) <= score_checks.MOST_COMPARED
        np.testing.assert_array_equal(places.min(axis=0), 0)
        np.testing.assert_array_equal(places.max(axis=0), np.array(shape) - 1)


WRONG = {
    "a spread of nothing": (lambda: na.check_score(na.Score(plain), spread=math.nan), "spread: got nan, allowed are"),
    "an infinite spread": (lambda: na.check_score(na.Score(plain), spread=math.inf), "spread: got inf"),
    "a negative spread": (lambda: na.check_score(na.Score(plain), spread=-1), "spread: got -1.0"),
    "too many heads": (lambda: na.check_score(na.Score(plain), heads=2**70), r"heads: got .*, allowed 1 to 2\*\*48"),
    "zero divided by": (lambda: na.check_score(na.Score(lambda s, batch, head, i, j: s + 1 / (i - j))),
                        "<lambda> raises ZeroDivisionError in Python.*i = 0, j = 0"),
    "a complex number": (lambda: na.check_score(na.Score(lambda s, batch, head, i, j: s**0.5)), "raises TypeError"),
    "an integer too large": (lambda: na.check_score(na.Score(lambda s, batch, head, i, j: s + (2**62 * i) % 7)),
                             r"<lambda>, compiled gives .*, in Python .*, at s = .*, batch = 0, head = 0, i = "),
    "a derivative too large": (lambda: na.check_score(na.Score(plain, lambda s, b, h, i, j: 1 + (2**62 * i) % 7)),
                               "the derivative, compiled, gives .*, in Python"),
    "a wrong derivative": (lambda: na.check_score(na.Score(plain, lambda s, b, h, i, j: 2.0)),
                           "the derivative is 2, finite differences give 1, at s = .*, i = "),
    "a wrong second": (lambda: na.check_score(na.Score(plain, lambda *x: 1.0, (), lambda *x: 2.0)),
                       "the second derivative is 2, finite differences give 0, at s = .*, i = "),
}  # fmt: skip


def plain(s, batch, head, i, j):
    return s - i


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_where_a_score_is_infinite_it_has_no_derivative():
    assert na.check_score(na.Score(lambda s, batch, head, i, j: s if j <= i else s - math.inf)) < 1e-6


def test_what_a_gpu_computes_is_compared(monkeypatch):
    monkeypatch.setattr(score_checks, "cupy_if_any", lambda: np)      # the CPU instead
    score = na.Score(lambda s, batch, head, i, j, x: s - x[j] * head, arrays=[np.arange(9, dtype=np.uint8)])
    assert na.check_score(score, 5, 9, heads=3) < 1e-6
    forward = na.attention_forward

    def astray(q, k, v, **options):
        return forward(q, k, v, scale=options["scale"])

    monkeypatch.setattr("numbattn.api.attention_forward", astray)
    with pytest.raises(ValueError, match="is not on the GPU what it is in Python: results of 5 queries and 9 keys"):
        na.check_score(score, 5, 9, heads=3)


@pytest.mark.gpu
def test_on_a_gpu():
    import cupy

    def apart(s, batch, head, i, j, place, shown):
        return s - (place[i] - place[j]) * 0.1 * shown[head] - (i - j) % 3

    place, shown = cupy.arange(9, dtype=np.uint8), cupy.array([True, False])
    assert na.check_score(na.Score(apart, arrays=[place, shown]), 9, 9, heads=2) < 1e-6


FAULTS = {
    "np.where(finite, got, 0), want": "got, want",
    'elements.compare("compiled"': '(lambda *_: None)("compiled"',
    "room //= min(shape[each], most)": "pass",
    "n * (size - 1) / max(count - 1, 1)": "n",
}
