"""Every error a user can make, by name, got and allowed; and what a Problem says."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn.problem import describe, sum_to


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


Q, K, V = zeros(2, 4, 5, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 3)


class CupyLike:
    """Looks like a CuPy array from outside."""

    shape, strides, ndim, dtype = Q.shape, Q.strides, 4, Q.dtype


CupyLike.__module__ = "cupy"


@pytest.mark.parametrize(("arguments", "error", "message"), [
    (([[1.0]], K, V), TypeError, r"q: got list, expected a numpy.ndarray or a cupy.ndarray"),
    ((Q, 3.0, V), TypeError, r"k: got float, expected a numpy.ndarray"),
    ((Q, K, None), TypeError, r"v: got NoneType, expected a numpy.ndarray"),
    ((np.ma.array(Q), K, V), TypeError, r"q: got numpy.ma.\w*\.?MaskedArray, expected a numpy.ndarray"),
    ((CupyLike(), K, V), TypeError, r"q is a cupy.ndarray, k is a numpy.ndarray, v is a numpy.ndarray"),
    ((zeros(8), K, V), ValueError, r"q: got the shape \(8,\), expected \(..., sequence, features\)"),
    ((Q, K, zeros(7)), ValueError, r"v: got the shape \(7,\)"),
    ((Q.astype(int), K, V), TypeError, r"q: got int64, allowed float16, bfloat16, float32, float64"),
    ((Q.astype(complex), K, V), TypeError, r"q: got complex128, allowed float16"),
    ((Q.astype(object), K, V), TypeError, r"q: got object, allowed float16"),
    ((Q.astype(">f4"), K, V), TypeError, r"q: got >f4, allowed float16"),
    ((Q, K.astype(np.float64), V), TypeError, r"k: got float64, expected float32, the dtype of q"),
    ((Q, K, V.astype(ml_dtypes.bfloat16)), TypeError, r"v: got bfloat16, expected float32"),
    ((Q, zeros(2, 2, 7, 9), V), ValueError, r"k: got head_dim 9, expected 8, the head_dim of q"),
    ((Q, K, zeros(2, 2, 6, 3)), ValueError, r"v: got 6 rows, expected 7, one for each row of k"),
    ((Q, zeros(2, 3, 7, 8), zeros(2, 3, 7, 3)), ValueError, r"q: got 4 heads, expected a multiple of 3"),
    ((Q, K, zeros(2, 4, 7, 3)), ValueError, r"v: got 4 heads, expected 2, as many as k"),
    ((Q, zeros(2, 0, 7, 8), zeros(2, 0, 7, 3)), ValueError, r"q: got 4 heads, expected a multiple of 0"),
    ((Q, zeros(3, 2, 7, 8), zeros(3, 2, 7, 3)), ValueError, r"batch axes of q \(2,\), k \(3,\) and v \(3,\) do not"),
])  # fmt: skip
def test_arrays(arguments, error, message):
    with pytest.raises(error, match=message):
        na.attention(*arguments)


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"scale": 0}, ValueError, r"scale: got 0, allowed finite and > 0"),
    ({"scale": -1.0}, ValueError, r"scale: got -1.0, allowed finite and > 0"),
    ({"scale": float("inf")}, ValueError, r"scale: got inf, allowed finite and > 0"),
    ({"scale": float("nan")}, ValueError, r"scale: got nan, allowed finite and > 0"),
    ({"scale": "a"}, TypeError, r"scale: got 'a', expected a number"),
    ({"scale": np.ones(2)}, TypeError, r"scale: got array\(\[1., 1.\]\), expected a number"),
    ({"causal": 1}, TypeError, r"causal: got 1, expected True or False"),
    ({"dropout": 0.1}, TypeError, r"dropout: got 0.1, expected a numbattn.Dropout\(p, seed\)"),
    ({"mask": "causal"}, TypeError, r"mask: got str, expected a numbattn mask or a boolean array, True = visible"),
    ({"mask": zeros(2, 4, 5, 7)}, TypeError, r"mask: got ndarray of float32, .*True = visible .*not masks"),
    ({"mask": np.ones((5, 7), bool)}, ValueError, r"mask: Dense visible: got the shape \(5, 7\), expected "
                                                  r"\(2 or 1, 4 or 1, 5, 7\): all batch axes, heads included"),
    ({"mask": np.ones((2, 2, 5, 7), bool)}, ValueError, r"Dense visible: got the shape \(2, 2, 5, 7\)"),
    ({"mask": np.ones((2, 4, 5, 8), bool)}, ValueError, r"Dense visible: got the shape \(2, 4, 5, 8\)"),
    ({"mask": na.Bits(np.ones((1, 1, 5, 2), np.uint32))}, ValueError, r"Bits words: .* expected .*, 5, 1\)"),
    ({"mask": na.BlockSparse(np.ones((1, 1, 2, 2), bool), (2, 4))}, ValueError, r"BlockSparse blocks: .*, 3, 2\)"),
    ({"mask": na.Lengths(np.array([3, 4]))}, ValueError, r"keys: got the shape \(2,\), expected \(2 or 1, 4 or 1\)"),
    ({"mask": na.Causal(np.zeros((1, 2), int))}, ValueError, r"Causal offset: got the shape \(1, 2\)"),
    ({"mask": na.Lengths(np.array([[8], [1]]))}, ValueError, r"Lengths keys: got values from 1 to 8, allowed 0 to 7"),
    ({"mask": na.Lengths(queries=np.array([[-1], [1]]))}, ValueError, r"got values from -1 to 1, allowed 0 to 5"),
    ({"mask": na.Lengths(8)}, ValueError, r"Lengths keys: got 8, allowed 0 to 7"),
    ({"mask": na.Causal() & na.Lengths(-1)}, ValueError, r"Lengths keys: got -1, allowed 0 to 7"),
    ({"out": [1]}, TypeError, r"out: got list"),
    ({"out": zeros(2, 4, 5, 8)}, ValueError, r"out: got the shape \(2, 4, 5, 8\), expected \(2, 4, 5, 3\)"),
    ({"out": zeros(2, 4, 5, 3, dtype=np.float64)}, TypeError, r"out: got float64, expected float32"),
    ({"out": np.broadcast_to(zeros(3), (2, 4, 5, 3))}, ValueError, r"out: got a read-only array"),
    ({"out": np.lib.stride_tricks.as_strided(zeros(3), (2, 4, 5, 3), (0, 0, 0, 4))}, ValueError, r"share memory"),
])  # fmt: skip
def test_options(options, error, message):
    with pytest.raises(error, match=message):
        na.attention(Q, K, V, **options)


def test_out_must_not_overlap_an_input():
    buffer = zeros(10, 8)
    q, out = buffer[:5], buffer[4:9]
    with pytest.raises(ValueError, match="out: overlaps q"):
        na.attention(q, zeros(7, 8), zeros(7, 8), out=out)
    qo = zeros(5, 2, 8)     # side by side in one array is no overlap
    na.attention(qo[:, 0], zeros(7, 8), zeros(7, 8), out=qo[:, 1])


@pytest.mark.parametrize(("gradients", "error", "message"), [
    ({"do": 3.0}, TypeError, r"do: got float, expected a numpy.ndarray"),
    ({"do": CupyLike()}, TypeError, r"q is a numpy.ndarray, do is a cupy.ndarray"),
    ({"do": Q}, ValueError, r"do: got the shape \(2, 4, 5, 8\), expected \(2, 4, 5, 3\), the shape of o"),
    ({"do": zeros(2, 4, 5, 3, dtype=np.float16)}, TypeError, r"do: got float16, expected float32, the dtype of o"),
    ({"dlse": zeros(2, 4, 7)}, ValueError, r"dlse: got the shape \(2, 4, 7\), expected \(2, 4, 5\), the shape of lse"),
    ({"dlse": zeros(2, 4, 5, dtype=np.float64)}, TypeError, r"dlse: got float64, expected float32, the dtype of lse"),
])  # fmt: skip
def test_gradients(gradients, error, message):
    o, saved = na.attention_forward(Q, K, V)
    with pytest.raises(error, match=message):
        na.attention_backward(**{"do": o, "saved": saved, **gradients})


def test_saved_is_what_forward_returned():
    with pytest.raises(TypeError, match=r"saved: got tuple, expected what attention_forward returned"):
        na.attention_backward(zeros(5, 3), (1, 2))


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


@pytest.mark.parametrize("shape", [(2, 6, 5, 3), (6, 5, 3), (1, 1, 5, 3), (2, 2, 5, 3), (5, 3), (2, 1, 5, 3)])
def test_sum_to(rng, shape):
    """The sum is the adjoint of broadcasting: <sum_to(x), y> = <x, y broadcast>."""
    x, y = rng.standard_normal((2, 6, 5, 3)), rng.standard_normal(shape)
    y4 = y.reshape((1,) * (4 - y.ndim) + shape)
    broadcast = np.broadcast_to(np.repeat(y4, 6 // y4.shape[1], axis=1), x.shape)
    assert sum_to(x, shape).shape == shape
    np.testing.assert_allclose(np.vdot(sum_to(x, shape), y), np.vdot(x, broadcast))
