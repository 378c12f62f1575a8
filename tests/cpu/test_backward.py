"""How the tiles of keys are shared out among blocks. Gradients: see test_api."""

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from numbattn.cpu.backward import TILE_N, backward


def test_blocks_share_the_tiles_of_all_segments(rng, monkeypatch):
    """Equally, and each tile is one block's, so that no two add to the same dK."""
    touched = []

    def one_by_one(kernel, blocks, work, scratch):
        (_, _, dk, _), _ = kernel.records[-1].held
        for block in range(blocks):
            before = dk.copy()
            kernel(block, block + 1, np.zeros(1, np.int32), scratch())
            touched.append((dk != before).any(axis=(0, 2)))

    monkeypatch.setitem(backward.__globals__, "launch", one_by_one)
    segments = np.arange(5) * 2 * TILE_N  # of two tiles each
    q, k, v, do = rng.standard_normal((4, segments[-1], 4))
    o, saved = na.attention_forward(q, k, v, mask=na.Segments(segments))
    na.attention_backward(do, saved)
    assert [rows.sum() for rows in touched] == [TILE_N] * 8
    assert (np.sum(touched, axis=0) == 1).all()


def test_blocks_add_to_sums_of_their_own(rng, monkeypatch):
    """Of numbers that many elements share; those of other blocks may run at the same time."""
    touched = []

    def one_by_one(kernel, blocks, work, scratch):
        _, (dx,) = kernel.records[-1].held
        for block in range(blocks):
            kernel(block, block + 1, np.zeros(1, np.int32), scratch())
            touched.append(dx[0, block, 0, 0])

    monkeypatch.setitem(backward.__globals__, "launch", one_by_one)
    q, k, v, do = rng.standard_normal((4, 4 * TILE_N, 4))
    score, mask = na.Alibi(np.array(0.1)), na.Lengths(keys=3 * TILE_N)
    o, saved = na.attention_forward(q, k, v, score=score, mask=mask)
    (got,) = na.attention_backward(do, saved).score
    assert len(set(touched)) == 4
    np.testing.assert_allclose(got, sum(touched))
    np.testing.assert_allclose(got, reference.attention_backward(do, q, k, v, score=score, mask=mask).score[0])


@pytest.mark.parametrize("seqlen", [16, 300])
def test_where_terms_cancel_the_error_is_that_of_the_terms(rng, seqlen):
    """delta comes of the rounded o. Where values are alike P dP is nearly P delta, and little is left of either; what
    is left of the sum for a slope is as wrong as the sum of both."""
    dtype, distance = ml_dtypes.bfloat16, abs(np.arange(seqlen)[:, None] - np.arange(seqlen))
    q, k, v, do = rng.standard_normal((4, 8, seqlen, 16))
    q, k, v, do = (x.astype(dtype) for x in (q, k, 1 + v / 100, do))
    score = na.Alibi(np.full(8, 0.1))
    _, saved = na.attention_forward(q, k, v, score=score)
    (got,) = na.attention_backward(do, saved).score
    (want,) = reference.attention_backward(do, q, k, v, score=score).score
    V, dO, P = v.astype(float), do.astype(float), na.attention_weights(q.astype(float), k.astype(float), score=score)
    terms = P * distance * (abs(dO @ V.swapaxes(-2, -1)) + (abs(dO) * abs(P @ V)).sum(-1, keepdims=True))
    errors, unit = abs(got - want), float(ml_dtypes.finfo(dtype).eps)
    assert (errors <= unit / 2 * terms.sum((-2, -1))).all()
    assert (errors > abs(want) / 20).any()
