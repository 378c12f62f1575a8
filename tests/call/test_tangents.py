"""Every error that a user can make with tangents: what is raised, and what it says. Nothing is computed before."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn.call.problem import describe
from numbattn.call.tangents import checked_tangents, checked_tangents_of_gradients, parts_of


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


Q, K, V = zeros(2, 4, 5, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 3)
O, LSE = zeros(2, 4, 5, 3), zeros(2, 4, 5)
WIDE = zeros(2, 4, 5, 8, dtype=np.float64)


class CupyLike:
    """Looks like a CuPy array from outside."""

    shape, strides, ndim, dtype = (4, 5, 7), (140, 28, 4), 3, Q.dtype


CupyLike.__module__ = "cupy"
TANGENTS = [
    ((zeros(4, 5, 8), None, None), ValueError,
     r"tq: got the shape \(4, 5, 8\), expected \(2, 4, 5, 8\), the shape of q, or one axis more in front, of s"),
    ((zeros(3, 2, 4, 5), None, None), ValueError, r"tq: got the shape \(3, 2, 4, 5\), expected \(2, 4, 5, 8\)"),
    ((zeros(3, 2, 4, 5, 9), None, None), ValueError, r"expected \(3, 2, 4, 5, 8\), the shape of q after an axis of"),
    ((Q, K[None], None), ValueError, r"tk: got .* expected \(2, 2, 7, 8\), the shape of k: tq has no axis of tangents"),
    ((None, K[None], zeros(2, *V.shape)), ValueError,
     r"tv: got .* expected \(1, 2, 2, 7, 3\), the shape of v after the axis of tk, of 1 tangents"),
    ((Q[None], None, V), ValueError, r"tv: got .* expected \(1, 2, 2, 7, 3\)"),
    ((WIDE, None, None), TypeError, "tq: got float64, expected float32, the dtype of q"),
    ((Q.astype(">f4"), None, None), TypeError, r"tq: got >f4, expected float32, .*; pass tq.astype\(np.float32\)"),
    ((0.0, None, None), TypeError, "tq: got 0.0, expected a numpy.ndarray or a cupy.ndarray"),
    ((None, [1.0], None), TypeError, "tk: got list, expected a numpy.ndarray"),
]  # fmt: skip


@pytest.mark.parametrize(("tangents", "kind", "message"), TANGENTS)
def test_tangents_of_arrays(tangents, kind, message):
    with pytest.raises(kind, match=message):
        na.attention_jvp(Q, K, V, *tangents)


BIAS, LOGITS = zeros(4, 5, 7), zeros(4)
PARTS = [na.Bias(BIAS), na.Softcap(3.0), na.Sink(LOGITS)]


@pytest.mark.parametrize(("score", "tscore", "kind", "message"), [
    (PARTS, BIAS, TypeError, r"tscore: got numpy.ndarray of float32, expected a list or tuple of arrays or None"),
    (PARTS, [BIAS], ValueError, "tscore: got 1 tangents, expected 2, one for each array in score, of Bias, Sink"),
    (None, [BIAS], ValueError, "tscore: got 1 tangents, expected 0, one for each array in score$"),
    (PARTS, [BIAS[0], None], ValueError, r"tscore\[0\]: got the shape \(5, 7\), expected \(4, 5, 7\), the shape of B"),
    (PARTS, [None, LOGITS.astype(float)], TypeError, r"tscore\[1\]: got float64, expected float32, the dtype of Sink"),
    (PARTS, [None, 3.0], TypeError, r"tscore\[1\]: got 3.0, expected a numpy.ndarray"),
    (PARTS, [CupyLike(), None], TypeError, "arrays of NumPy and CuPy do not mix: q is a numpy.ndarray"),
    (PARTS, [BIAS[None], None], ValueError, r"tscore\[0\]: .* tq has no axis of tangents"),
    (na.Score(lambda s, batch, head, i, j, x: s + x[i], arrays=[zeros(5)]), [zeros(5)], NotImplementedError,
     r"tscore\[0\]: got numpy.ndarray of float32 for an array of a Score whose gradient is not wanted, expected None"),
    (na.Score(lambda s, batch, head, i, j, n, x: s + x[n[i]], arrays=[zeros(5, dtype=int), zeros(5)], gradient=True),
     [zeros(5), None], NotImplementedError, r"tscore\[0\]: got numpy.ndarray of float32 for an array of a Score whose"),
])  # fmt: skip
def test_tangents_of_scores(score, tscore, kind, message):
    with pytest.raises(kind, match=message):
        na.attention_jvp(Q, K, V, Q, None, None, tscore=tscore, score=score)


def calls(rng):
    """saved and tsaved of a call, with and without an axis of tangents."""
    q, k, v = (rng.standard_normal(x.shape, np.float32) for x in (Q, K, V))
    for tq in q, np.stack([q, q, q]):
        problem, inputs = describe(q, k, v)
        tangents, several = checked_tangents(inputs, tq, None, None)
        lead = (3,) if several else ()
        yield na.Saved(problem, inputs, O, LSE), na.SavedTangents(
            problem, tangents, zeros(*lead, *O.shape), zeros(*lead, *LSE.shape), several
        )


def test_tangents_of_gradients(rng):
    one, several = calls(rng)
    other, _ = calls(rng)
    wrong = [
        (one, {"tdo": O[0]}, ValueError, r"tdo: got the shape \(4, 5, 3\), expected \(2, 4, 5, 3\), the shape of to"),
        (several, {"tdo": O}, ValueError, r"tdo: got the shape \(2, 4, 5, 3\), expected \(3, 2, 4, 5, 3\)"),
        (several, {"dlse": LSE, "tdlse": LSE}, ValueError, r"tdlse: got .* expected \(3, 2, 4, 5\), the shape of tlse"),
        (one, {"tdo": O.astype(int)}, TypeError, "tdo: got int64, expected float32, the dtype of to"),
        (one, {"tdo": 0}, TypeError, "tdo: got 0, expected a numpy.ndarray"),
        (one, {"tdlse": LSE}, ValueError, "tdlse: got numpy.ndarray of float32 without dlse, whose tangent it is: "),
        (one, {"deterministic": 1}, TypeError, "deterministic: got 1"),
        ((one[0], one[0]), {}, TypeError, "tsaved: got numbattn.call.problem.Saved, expected what attention_forward"),
        ((one[1], one[1]), {}, TypeError, "saved: got numbattn.call.tangents.SavedTangents, expected what"),
    ]
    for (saved, tsaved), options, kind, message in wrong:
        with pytest.raises(kind, match=message):
            na.attention_backward_jvp(O, saved, tsaved, **options)
    problem, inputs = describe(Q[0], K[0], V[0])
    with pytest.raises(ValueError, match=r"tsaved: got <SavedTangents: a tangent of float32, numpy> of the shapes .* "):
        na.attention_backward_jvp(O[0], na.Saved(problem, inputs, O[0], LSE[0]), other[1])
    _, _, saved, _ = na.attention_forward_jvp(Q, K, V, None, None, None, score=na.Sink(LOGITS))
    with pytest.raises(ValueError, match=r"tsaved: got .*, float32, numpy>, with the same kinds of mask and score$"):
        na.attention_backward_jvp(O, saved, other[1])
    assert repr(several[1]) == "<SavedTangents: 3 tangents of float32, numpy>"


def test_gradients_of_gradients(rng):
    q, k, v = (rng.standard_normal(x.shape, np.float32) for x in (Q, K, V))
    score = [na.Bias(BIAS, gradient=False), na.Sink(LOGITS)]
    _, backprop = na.attention_vjp(q, k, v, score=score)
    _, backprop2 = backprop.vjp(O)
    with pytest.raises(ValueError, match=r"ddscore\[0\]: got .* for a Bias whose gradient is not wanted, expected"):
        backprop2(None, None, None, ddscore=[BIAS, None])
    with pytest.raises(ValueError, match=r"ddq: got the shape \(5, 8\), expected \(2, 4, 5, 8\), the shape of q"):
        backprop2(q[0, 0], None, None)
    with pytest.raises(ValueError, match="do: got the shape"):
        backprop.vjp(O[0])
    with pytest.raises(TypeError, match="saved: got 3, expected what attention_forward returned"):
        na.attention_backward_vjp(O, 3)


def test_laplacians():
    with pytest.raises(ValueError, match=r"jq: got .* expected \(2, 2, 4, 5, 8\), the shape of q after an axis of tan"):
        na.attention_laplacian(Q, K, V, Q, None, None)
    for lq in Q, None:
        with pytest.raises(ValueError, match=r"lk: got the shape .* expected \(2, 2, 7, 8\), the shape of k$"):
            na.attention_laplacian(Q, K, V, Q[None], None, None, lq, lk=K[None])
    _, jo, _ = na.attention_laplacian(Q, K, V, None, None, None)
    assert jo.shape == (0, *O.shape)
    score = na.Score(lambda s, batch, head, i, j, x: s + x[i], arrays=[x := np.zeros(5)], gradient=True)
    with pytest.raises(NotImplementedError, match=r"jscore\[0\]: got .* for an array of a Score, .* numbattn.Bias"):
        na.attention_laplacian(Q, K, V, None, None, None, jscore=[x[None]], score=score)


def test_caches_have_no_tangents():
    cache = na.KVCache.zeros(2, 2, 16, 8, like=Q)
    for function in na.attention_jvp, na.attention_forward_jvp, na.attention_laplacian:
        with pytest.raises(TypeError, match="k: got a KVCache, which has no tangents: pass k and v as arrays"):
            function(Q, cache, None, Q, None, None)


def test_all_but_tangents_is_named():
    with pytest.raises(TypeError, match="positional"):
        na.attention_jvp(Q, K, V, Q, None, None, ())


def test_parts_of_tangents_lie_as_the_parts_do(rng):
    """Within Segments, too; those of zero are None, and so are those of parts without arrays."""
    relative, table = na.RelativeBias(rng.standard_normal(3)), rng.standard_normal((2, 3))
    score = [na.Softcap(3.0), relative, na.Sink(np.zeros(4))]
    _, inputs = describe(Q, K, V, mask=na.Segments([0, 2, 5], [0, 4, 7]), score=score)
    tangents, _ = checked_tangents(inputs, None, None, None, [table, None])
    assert tangents.count == 2
    for some, number in (tangents, 1), (tangents.some(1, 2), 0):
        softcap, part, sink = parts_of(inputs, some, number)
        assert softcap is sink is None
        np.testing.assert_array_equal(part.table, table[1])
    np.testing.assert_array_equal(part._ahead(np.empty((5, 7))), inputs.score[1]._ahead(np.empty((5, 7))))


def test_a_number_has_a_tangent():
    """In bfloat16, too: what NumPy makes of an element is no array."""
    bias, tangent = (np.array(x, ml_dtypes.bfloat16) for x in (0.5, 2.0))
    _, inputs = describe(Q, K, V, score=na.Bias(bias))
    (part,) = parts_of(inputs, checked_tangents(inputs, None, None, None, [tangent])[0], 0)
    assert (part.bias.shape, float(part.bias)) == ((), 2.0)


def test_copies_of_tangents_are_of_the_same_call():
    """For other processes, too, whatever other functions do the same."""
    na.Score(lambda s, batch, head, i, j: 2 * s)
    saved = na.Saved.of(Q, K, V, O, LSE, score=[na.Score(doubled), na.Softcap(3.0)])
    tangents, _ = checked_tangents(saved.inputs, Q, None, V)
    tsaved = na.SavedTangents(saved.problem, tangents, O, LSE, False)
    for again in (copy.copy(tsaved), copy.deepcopy(tsaved), pickle.loads(pickle.dumps(tsaved))):
        assert checked_tangents_of_gradients(saved, again, None, None, None) == (None, None)
        assert repr(again) == repr(tsaved)
        np.testing.assert_array_equal(again.tangents.v, tangents.v)


def doubled(s, batch, head, i, j):
    return 2 * s


FAULTS = {
    'vars(self) | {"problem": problem}': "vars(self)",
    "x.tangent.dtype != x.array.dtype": "False",
    "given[0].tangent.ndim > given[0].array.ndim": "False",
    "if x.tangent.shape == expected": "if x.tangent.ndim == len(expected)",
    "if _call(own) != _call(problem):": "if own.shapes != problem.shapes:",
    "problem.mask_kinds, parts, problem.dropout": "problem.mask_kinds, [], problem.dropout",
    "elif x is first and may_be_several": "elif x is first",
    "\n    elif may_be_several": "\n    elif True",
    "if tdlse is not None and dlse is None": "if False",
    "if len(score) != len(parts)": "if len(score) > len(parts)",
    "tangent and tangent._within(inputs.mask._frame)": "tangent",
    "x if x is None else x[number, ...] for _": "x if x is None else x[0, ...] for _",
    "x[first:end] for x in (self.q": "x[:end] for x in (self.q",
    "test_jets.py": {
        "several = bool(given) and": "several = not given or",
    },
}
