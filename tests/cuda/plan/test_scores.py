"""What is kept of a mask and of a part of a score between calls, and what is not."""

from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest

import numbattn as na
from numbattn.call import fitting
from numbattn.call.problem import describe
from numbattn.cuda.plan.masks import lowered_mask
from numbattn.cuda.plan.scores import lowered_part
from numbattn.scores.element import ScoreTangent

try:
    import cupy
except ImportError:
    cupy = None

Q = np.zeros((2, 8, 4), np.float32)
PARTS = {
    "softcap": (na.Softcap(2.0), True), "slopes": (na.Alibi(np.ones(2, np.float32)), True),
    "converted slopes": (na.Alibi(np.ones(2, np.float16)), False),
    "converted offset": (na.Alibi(np.ones(2, np.float32), offset=np.ones((2,), np.int64)), False),
    "bias": (na.Bias(np.ones((8, 8), np.float16)), True), "table": (na.RelativeBias(np.ones(3, np.float32)), True),
    "function": (na.Score(lambda s, batch, head, i, j, x: s + x[j], arrays=[np.ones(8)]), True),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_what_a_part_lowers_to_is_kept_if_its_arrays_are_its_own(name):
    part, is_kept = PARTS[name]
    problem, inputs = describe(Q, Q, Q, score=part)
    (part,) = inputs.score
    part._set(_on_host=[])
    first, again = lowered_part(part, 0, problem), lowered_part(part, 0, problem)
    assert (again is first) == is_kept
    assert [(name, x.shape, x.strides) for name, x in first[1].items()] == list(first[2])
    assert lowered_part(part, 1, problem)[1].keys() != first[1].keys() or not first[1]


@pytest.mark.parametrize(("mask", "is_kept"), [
    (na.Segments(np.array([0, 3, 8], np.int32)), True), (na.Segments(np.array([0, 3, 8], np.int64)), False),
    (na.Lengths(np.array([5, 6], np.int32)) & na.Causal(), True), (na.Dense(np.ones((2, 8, 8), bool)), True),
    (na.Segments(np.array([0, 3, 8], np.int32)) & na.Prefix(np.array([5, 6], np.int64)), False),
], ids=str)  # fmt: skip
def test_what_a_mask_lowers_to_is_kept_if_its_arrays_are_its_own(mask, is_kept):
    _, inputs = describe(Q, Q, Q, mask=mask)
    assert lowered_mask(inputs.mask, 8, 8) is not lowered_mask(inputs.mask, 8, 8)
    inputs.mask._set(_is_reusable=True)
    assert (lowered_mask(inputs.mask, 8, 8) is lowered_mask(inputs.mask, 8, 8)) == is_kept


def test_a_part_is_kept_as_it_is_within_segments():
    part, one, other = na.Alibi(1.0), na.Segments([0, 3, 8]), na.Segments([0, 8])
    assert part._within(one) is part._within(one)
    assert part._within(one)._frame is one
    assert part._within(other)._frame is other


def test_arrays_on_the_host_may_change():
    function = na.Score(lambda s, batch, head, i, j, x: s + x[j], arrays=[np.ones(8)], gradient=True)
    problem, inputs = describe(Q, Q, Q, score=[na.Alibi(np.ones(2, np.float32)), function])
    for part in (*inputs.score, ScoreTangent(function, [np.ones(8)], np.float64)):
        assert lowered_part(part, 0, problem) is not lowered_part(part, 0, problem)


def test_what_is_copied_from_the_host_is_kept(monkeypatch):
    """Converted, too: nobody else has the copies."""
    monkeypatch.setattr(fitting, "backend", lambda xp: SimpleNamespace(place=tuple))
    mask = fitting.fitted_mask(na.Segments(np.array([0, 3, 8])), Q, (*Q.shape[:1], 8, 8), "cupy")
    mask._set(_is_reusable=True)
    assert lowered_mask(mask, 8, 8) is lowered_mask(mask, 8, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "numpy"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("of", "shape"), [
    (na.Alibi, (2,)), (na.Bias, (8, 8)), (na.RelativeBias, (3,)), (na.Sink, (2,)),
])  # fmt: skip
def test_what_is_kept_follows_the_arrays(rng, of, shape, dtype, library):
    xp = import_module(library)
    q, array = cupy.asarray(rng.standard_normal(Q.shape, np.float32)), xp.zeros(shape, dtype)
    score = of(array)
    for value in (1.0, -2.0):
        array[...] = xp.arange(array.size).reshape(shape) * value / array.size
        np.testing.assert_array_equal(na.attention(q, q, q, score=score).get(),
                                      na.attention(q, q, q, score=of(array.copy())).get())


@pytest.mark.gpu
@pytest.mark.parametrize("mask_of", [
    na.Segments, lambda x: na.Segments(x) & na.Causal(), lambda x: na.Lengths(x[1:]), lambda x: na.Prefix(x[1:]),
    lambda x: na.Where(lambda batch, head, i, j, x: i + j < x[1], arrays=[x]),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_what_is_kept_of_a_mask_follows_the_arrays_on_the_host(rng, mask_of, dtype):
    q, offsets = cupy.asarray(rng.standard_normal(Q.shape, np.float32)), np.array([0, 3, 8], dtype)
    mask = mask_of(offsets)
    for end in (3, 3, 5, 3):
        offsets[1] = end
        want = na.attention(q, q, q, mask=mask_of(cupy.asarray(offsets)))  # lengths only a GPU knows: another kernel
        np.testing.assert_allclose(na.attention(q, q, q, mask=mask).get(), want.get(), rtol=0, atol=1e-6)


@pytest.mark.gpu
def test_a_part_is_checked_against_each_shape():
    score = na.Alibi(cupy.ones(2, np.float32))
    for length in (8, 9, 8):
        na.attention(*[cupy.zeros((2, length, 4), np.float32)] * 3, score=score)
    with pytest.raises(ValueError, match="Alibi slopes"):
        na.attention(*[cupy.zeros((3, 8, 4), np.float32)] * 3, score=score)


FAULTS = {
    "cuda/kernels/scores/test_alibi.py::test_slopes_of_all_heads_or_some": {
        "sum_broadcast(by_row.sum(axis=-1), grad.shape)": "by_row.sum(axis=-1)",
    },
    "cuda/plan/known.py": {
        "any(x is y or overlap(x, y) for y in held)": "True",
        "KNOWN.keep(value, key, found)": "pass",
        "held is not None and": "",
    },
}
