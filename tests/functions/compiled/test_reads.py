"""Derivatives of functions by what they read of their arrays."""

import math

import numpy as np
import pytest
from numba import types

import numbattn as na
from numbattn.functions.compiled.reads import in_python, is_by_class, is_by_distance


def of_all_forms(s, batch, head, i, j, x, y, count, table):
    """A product of two reads; transposed, of a part, from the end; in a loop, behind a branch, to a float64."""
    found = s * x[i, j] * x.T[j][i] + y[-1]
    for n in range(count[i]):
        found += math.sin(x[i][n]) / (n + 1)
    if table[head] > 0:
        found = found * table[head] + len(x) * x.shape[1] * x.ndim * x.size
    return found


def formula(s, head, i, j, x, y, count, table):
    found = s * x[i, j] ** 2 + y[-1] + sum(np.sin(x[i, n]) / (n + 1) for n in range(count[i]))
    return found * table[head] + x.size * 2 * x.size if table[head] > 0 else found


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_derivatives_by_reads(rng, dtype):
    x, y, count = rng.standard_normal((3, 4)).astype(dtype), rng.standard_normal(2), np.array([0, 1, 4])
    table = np.array([0.5, -1.0])
    arrays = x, y, count, table
    score = na.Score(of_all_forms, arrays=arrays, gradient=[True, True, False, True])
    reads, step = in_python(score._identity, score._wanted, arrays), 1e-6
    for head, i, j in (0, 2, 1), (1, 2, 3), (0, 0, 0), (1, 1, 2):
        got = np.zeros(x.size + y.size + table.size)
        for element, slope in reads(0.75, 0, head, i, j):
            got[element] += slope
        want = np.zeros_like(got)
        for at in range(want.size):
            two = []
            for change in (step, -step):
                moved = np.concatenate([x.ravel(), y, table]).astype(np.float64)
                moved[at] += change
                two.append(formula(0.75, head, i, j, moved[: x.size].reshape(x.shape), moved[x.size : x.size + 2],
                                   count, moved[x.size + 2 :]))  # fmt: skip
            want[at] = (two[0] - two[1]) / (2 * step)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_what_is_no_function_of_arrays_reads_nothing():
    score = na.Score(lambda s, batch, head, i, j, x: s if i < j else s * x[0], arrays=[np.ones(1)], gradient=True)
    reads = in_python(score._identity, score._wanted, score.arrays)
    assert list(reads(2.0, 0, 0, 0, 1)) == []
    assert list(reads(2.0, 0, 0, 1, 1)) == [(0, 2.0)]


def iterating(s, batch, head, i, j, x):
    for y in x:
        s += y
    return s


REFUSED = {
    "slices": (lambda s, batch, head, i, j, x: s + x[1:][i], "has a slice of an array whose gradient is wanted, or"),
    "iteration": (iterating, "or iterates over it: read its entries"),
    "no rule": (lambda s, batch, head, i, j, x: s + x[i].real, "of .* has no rule here\n.* or pass gradient="),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_differentiated_is_refused(rng, name):
    function, text = REFUSED[name]
    q, score = rng.standard_normal((2, 3, 4)), na.Score(function, arrays=[np.ones(3)], gradient=True)
    o, saved = na.attention_forward(q, q, q, score=score)
    with pytest.raises(TypeError, match=f"(?s){text}"):
        na.attention_backward(o, saved)


BY_CLASS = {
    "kinds": (lambda s, batch, head, i, j, x, kind: 2 * s - 3 * x[kind[i], kind[j]], True),
    "parts": (lambda s, batch, head, i, j, x, kind: s + kind[i] * x[head][kind[j]], True),
    "transposed": (lambda s, batch, head, i, j, x, kind: s + x.T[kind[j], kind[i]], True),
    "part of transposed": (lambda s, batch, head, i, j, x, kind: s + x.T[kind[j]][kind[i]], True),
    "kinds of the others": (lambda s, batch, head, i, j, x, kind: s + x[kind[j], kind[i]], False),
    "kinds of the key": (lambda s, batch, head, i, j, x, kind: s + x[kind[j], kind[j]], False),
    "no kind": (lambda s, batch, head, i, j, x, kind: s + x[kind[i], head], False),
    "distances": (lambda s, batch, head, i, j, x, kind: s + x[head, abs(i - j)], False),
    "products": (lambda s, batch, head, i, j, x, kind: s * x[kind[i], kind[j]], False),
    "of s": (lambda s, batch, head, i, j, x, kind: s + x[int(s), kind[j]], False),
    "branches": (lambda s, batch, head, i, j, x, kind: s + x[kind[i], kind[j]] if i > j else s, False),
    "not in all heads": (lambda s, batch, head, i, j, x, kind: s if head else s + x[kind[i], kind[j]], False),
    "two": (lambda s, batch, head, i, j, x, kind: s + x[0, kind[j]] + x[1, kind[j]], False),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_CLASS)
def test_which_reads_are_of_classes_of_keys(name):
    function, want = BY_CLASS[name]
    score = na.Score(function, arrays=[np.ones((3, 3)), np.zeros(5, int)], gradient=True)
    kinds = types.Array(types.float64, 2, "A"), types.Array(types.int64, 1, "A")
    assert is_by_class(score._identity.function, score._wanted, types.float32, kinds) == want


BY_DISTANCE = {
    "distances": (lambda s, batch, head, i, j, x, bucket: s + 2 * x[head, min(abs(i - j), 2)], True),
    "buckets": (lambda s, batch, head, i, j, x, bucket: s + x[bucket[i - j], head], True),
    "slopes": (lambda s, batch, head, i, j, x, bucket: s - x[head, 0] * abs(j - i), True),
    "of a head": (lambda s, batch, head, i, j, x, bucket: s + x[0, head], True),
    "branches": (lambda s, batch, head, i, j, x, bucket: s + x[0, 0] if i - j < 3 else s, False),
    "queries": (lambda s, batch, head, i, j, x, bucket: s + x[head, i // 64 - j // 64], False),
    "products": (lambda s, batch, head, i, j, x, bucket: s * x[head, i - j], False),
    "keys": (lambda s, batch, head, i, j, x, bucket: s + x[head, i - j] * bucket[j], False),
    "two": (lambda s, batch, head, i, j, x, bucket: s + x[0, i - j] + x[1, i - j], False),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_DISTANCE)
def test_which_reads_are_by_distance(name):
    function, want = BY_DISTANCE[name]
    score = na.Score(function, arrays=[np.ones((3, 3)), np.zeros(5, int)], gradient=True)
    kinds = types.Array(types.float64, 2, "A"), types.Array(types.int64, 1, "A")
    assert is_by_distance(score._identity.function, score._wanted, types.float32, kinds) == want


FAULTS = {
    'by_distance & {"s", "j"}': 'by_distance & {"s"}',
    "head, i + j, j, arrays, 0)[:2]": "head, i + j, j, arrays, 0)[1:2]",
    "    return not by_all and not by": "    return not by",
    "last = index if axis == x.last else last": "last = index",
    "-1 if self.last < 0 else array.ndim - 1 - self.last": "self.last",
    "max(self.last - self.array.ndim + array.ndim, -1)": "array.ndim - 1",
    'by_query & {"s", "j"}': 'by_query & {"s"}',
    '!= {"j"}': '!= {"i"}',
    "    if by_all or": "    if",
    "nowhere) == 1": "nowhere) > 0",
    "builder.add(element, builder.mul(index, stride))": "builder.add(element, index)",
    'builder.icmp_signed("<", index, INT64(0))': 'builder.icmp_signed(">", index, INT64(0))',
    "strides[len(places) :]": "strides[: -len(places)]",
    "strides[::-1]": "strides",
    "first = builder.add(first, strides[0])": "pass",
    "number += 1": "number += 2",
    "test_jets.py::test_functions_of_arrays": {
        "builder.mul(element, common.step)": "element",
        "of_user(changing(s, 0, tangents), batch": "of_user(changing(s, s, tangents), batch",
        "return of_derived if identity.key[order] is None else of_given": "return of_derived",
    },
}
