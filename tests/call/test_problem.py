"""What a Problem says, what is left for the backward pass, and what may be handed over. Errors: see test_errors."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

import numbattn as na
from numbattn.call.problem import describe


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


Q, K, V = zeros(2, 4, 5, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 3)


@pytest.mark.parametrize("make", [
    lambda: zeros(5, 8),
    lambda: zeros(5, 2, 8)[:, 1],
    lambda: zeros(8, 5).T,
    lambda: zeros(10, 16)[::2, ::2],
    lambda: zeros(5, 8)[::-1, ::-1],
    lambda: np.lib.stride_tricks.as_strided(zeros(102), (5, 8), (4 * 3, 4 * 20)[::-1]),
    lambda: np.lib.stride_tricks.as_strided(zeros(125), (5, 8), (4 * 3, 4 * 2 * 8)),     # rows between columns
], ids=range(7))  # fmt: skip
def test_out_of_any_strides(rng, make):
    out, (q, k, v) = make(), rng.standard_normal((3, 5, 8)).astype(np.float32)
    assert na.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, na.attention(q, k, v))


def test_out_in_the_memory_of_an_input_is_no_overlap(rng):
    """Where none of its elements is one of the input."""
    qo, (k, v) = rng.standard_normal((5, 2, 8)), rng.standard_normal((2, 7, 8))
    want = na.attention(qo[:, 0].copy(), k, v)
    na.attention(qo[:, 0], k, v, out=qo[:, 1])
    np.testing.assert_array_equal(qo[:, 1], want)


def test_saved_fields_can_be_replaced(rng):
    """Partial results, merged by their lse, go back in this way."""
    q, k, v = rng.standard_normal((3, 6, 4))
    o, saved = na.attention_forward(q, k, v)
    _, half = na.attention_forward(q, k[:3], v[:3])
    merged = dataclasses.replace(half, o=o, lse=saved.lse)
    _, dk, dv = na.attention_backward(o, merged)
    _, dk_whole, dv_whole = na.attention_backward(o, saved)
    np.testing.assert_allclose(dk, dk_whole[:3], rtol=1e-12)
    np.testing.assert_allclose(dv, dv_whole[:3], rtol=1e-12)


def shifted(s, batch, head, i, j, x):
    return s + x[i]


def diagonal(batch, head, i, j, x):
    return x[i] <= j + head


UNEQUAL = na.Segments([0, 4, 6], [0, 3, 9])


@pytest.mark.parametrize("options", [
    {"mask": UNEQUAL, "score": na.Alibi(0.3)},
    {"mask": UNEQUAL, "score": na.RelativeBias([0.0, 1.0, 3.0])},
    {"score": na.Score(shifted, arrays=[np.arange(6.0)], gradient=True)},
    {"mask": na.Where(diagonal, [np.arange(6)])},
], ids=["alibi", "relative", "score", "where"])  # fmt: skip
def test_copies_of_saved_are_of_the_same_call(rng, options):
    """For other processes, too: with the frame of a distance, the function of a Score, the shape of a Where; whatever
    other functions do the same."""
    na.Score(lambda s, batch, head, i, j, x: s + x[i], arrays=[np.arange(6.0)])
    (q, do), (k, v) = rng.standard_normal((2, 3, 6, 4)), rng.standard_normal((2, 3, 9, 4))
    _, saved = na.attention_forward(q, k, v, **options)
    want = na.attention_backward(do, saved)
    for again in (copy.deepcopy(saved), pickle.loads(pickle.dumps(saved))):
        assert again.problem == saved.problem
        for dx, wanted in zip((*(found := na.attention_backward(do, again)), *found.score), (*want, *want.score)):
            np.testing.assert_array_equal(dx, wanted)


def test_problem():
    problem, inputs = describe(Q, K, V, causal=True, mask=na.Lengths(3), dropout=na.Dropout(0.1, 1))
    assert (problem.batch, problem.heads, problem.heads_k, problem.matrices) == ((2, 4), 4, 2, (2, 4))
    assert problem.mask_kinds == (na.Causal, na.Lengths)
    assert inputs.scale == pytest.approx(8**-0.5)
    other, _ = describe(Q + 1, K, V, causal=True, mask=na.Lengths(5), scale=3, dropout=na.Dropout(0.2, 2))
    assert problem == other             # numbers are no part of it
    assert hash(problem) == hash(other)
    assert problem != describe(Q, K, V)[0]


def test_a_memmap_is_an_array(tmp_path):
    path = tmp_path / "q"
    Q.tofile(path)
    q = np.memmap(path, np.float32, "r", shape=Q.shape)
    assert na.attention(q, K, V).shape == (2, 4, 5, 3)


FAULTS = {
    "test_statistics.py::test_gradients_of_one_matrix_and_of_no_heads": {
        "max(self.heads_k, 1)": "self.heads_k",
    },
    "test_copies_of_saved_are_of_the_same_call": {
        "scores/distance.py": {'{"_frame": self._frame})': "{})"},
        "replace(problem, score_kinds=kinds_of(inputs.score))": "problem",
        "masks/where.py": {"self.block_size), in_call": "self.block_size)"},
    },
    (
        "caches/test_ragged.py::test_out_is_checked_before_anything_runs",
        "caches/test_kv_cache.py::test_errors_of_calls",
    ): {
        "problem.out_shape if packing is None else packing.shape_of(problem.out_shape)": "problem.out_shape",
        "(*caches, *asked._leaves, *wanted)": "(*asked._leaves, *wanted)",
        "*asked._leaves, *wanted)": "*given._leaves, *wanted)",
        '({"q": passed}, (cache,))': '({"q": q}, (cache,))',
    },
}
