"""How the tiles of keys are shared out among blocks. Gradients: see test_api."""

import ctypes
import pickle

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from numbattn.cpu.backward import TILE_N, run

from ..accuracy import check
from ..tools.blocks import run_blocks


def test_blocks_share_the_tiles_of_all_segments(rng, monkeypatch):
    """Equally, and each tile is one block's, so that no two add to the same dK."""
    touched = []

    def one_by_one(call, blocks, work, nbytes, arrays):
        *_, dk, _ = arrays
        for block in range(blocks):
            before = dk.copy()
            run_blocks(call, block, block + 1, nbytes, arrays)
            touched.append((dk != before).any(axis=(0, 1, 3)))

    monkeypatch.setitem(run.__globals__, "launch", one_by_one)
    segments = np.arange(5) * 2 * TILE_N  # of two tiles each
    q, k, v, do = rng.standard_normal((4, segments[-1], 4))
    o, saved = na.attention_forward(q, k, v, mask=na.Segments(segments))
    na.attention_backward(do, saved)
    assert [rows.sum() for rows in touched] == [TILE_N] * 8
    assert (np.sum(touched, axis=0) == 1).all()


def test_blocks_add_to_sums_of_their_own(rng, monkeypatch):
    """Of numbers that many elements share; those of other blocks may run at the same time."""
    touched = []

    def one_by_one(call, blocks, work, nbytes, arrays):
        *_, addresses, _, _, _ = arrays
        sums = (ctypes.c_double * blocks).from_address(int(addresses[0, 0]))
        for block in range(blocks):
            run_blocks(call, block, block + 1, nbytes, arrays)
            touched.append(sums[block])

    monkeypatch.setitem(run.__globals__, "launch", one_by_one)
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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("m", [3, 80], ids=["few queries", "many queries"])
def test_scores_with_a_large_common_part(rng, dtype, m):
    """Rows of P sum to 1 in the backward pass, too, though lse has no digits for what differs. Scores have no rounding
    errors."""
    q, k = rng.integers(-2, 3, (2, 2, 150, 8)).astype(dtype)
    q[..., 0] = k[..., 0] = 2**11
    v = rng.standard_normal((2, 150, 8)).astype(dtype)
    options = {"scale": 0.25, "causal": True, "score": na.Sink(np.full(2, 2.0**20))}
    check(q[:, -m:], k, v, rng, **options)


def test_what_rounding_took_from_lse_is_saved(rng):
    q, k, v, do = rng.standard_normal((4, 20, 4), dtype=np.float32)
    q[..., 0] = k[..., 0] = 1000
    _, saved = na.attention_forward(q, k, v)
    grads, again = (na.attention_backward(do, x) for x in (saved, pickle.loads(pickle.dumps(saved))))
    rest = na.attention_backward(do, na.Saved.of(q, k, v, saved.o, saved.lse))  # at most 1, and no more
    np.testing.assert_array_equal(grads.dv, again.dv)
    np.testing.assert_allclose(grads.dv.sum(0), do.sum(0), rtol=1e-5, atol=1e-5)
    assert abs(rest.dv.sum(0) - do.sum(0)).max() > 1e-3


FAULTS = {
    "for n_tile in range(n_first, at.end": "for n_tile in range(at.first, at.end",
    "(chunk - at.segment // TILE_N) % chunks": "chunk",
    "base/test_origin.py::test_results_of_the_dtype_of_sums": {
        "x.shape), problem.result_dtype": "x.shape), problem.dtype",
    },
    (
        "test_api.py::test_masks[numpy-dropout-window]",
        "test_api.py::test_masks[numpy--lengths]",
        "test_api.py::test_pairs_of_masks[numpy-causal-causal]",
        "test_api.py::test_masks[numpy--blocks]",
        "test_api.py::test_rows_that_see_nothing[numpy-float32]",
        "test_api.py::test_beyond_lengths_nothing_leaks[numpy-Causal()-nan]",
        "test_api.py::test_gradient_of_lse_is_ignored_where_nothing_is_seen[numpy]",
    ): {
        "range(head_k * group_size, (head_k + 1) * group_size)": "range(head_k, heads, heads_k)",
        "end, chunks * TILE_N)": "end, TILE_N)",
        "        clear(work.dk[t, batch, head_k])": "        pass",
        "            clear(work.dq[t, 0, batch, head])": "            pass",
        " if in_parts else dq[:, 0]": " if False else dq[:, 0]",
    },
    "cpu/test_subnormals.py": {
        "    restore(before)\n": "    pass\n",
    },
    "test_scores_with_a_large_common_part": {
        "call/passes.py": {"saved._exactly(D)": "D"},
    },
    "cpu/backward_tile.py": {
        "cpu/test_backward.py::test_scores_with_a_large_common_part": {
            "(S[j, i] - lse[i]) - low[i]": "S[j, i] - lse[i]",
        },
        "cpu/test_backward.py::test_what_rounding_took_from_lse_is_saved": {
            "    fill(at.low, 0)\n": "",
        },
        (
            "test_api.py::test_masks[numpy-dropout-window]",
            "test_api.py::test_masks[numpy--lengths]",
            "test_api.py::test_pairs_of_masks[numpy-causal-causal]",
            "test_api.py::test_masks[numpy--blocks]",
            "test_api.py::test_rows_that_see_nothing[numpy-float32]",
            "test_api.py::test_beyond_lengths_nothing_leaks[numpy-Causal()-nan]",
            "test_api.py::test_gradient_of_lse_is_ignored_where_nothing_is_seen[numpy]",
        ): {
            "at.D[i] -= dlse[i]": "at.D[i] += dlse[i]",
            "m_end = max(min(m_end, band[2]), m0)": "pass",
            "at.dOT, dO, dtype.type(given.kept_scale), scratch": "at.dOT, dO, dtype.type(1), scratch",
            "lse[i] if lse[i] != -np.inf else dtype.type(np.inf)": "lse[i]",
            "at.D[i] if lse[i] != -np.inf else dtype.type(0)": "at.D[i]",
            "given.drops, batch, head": "given.drops, head, batch",
            "matmul(dV, P, dO, kept_scale, scratch, at.pairs)": "matmul(dV, P, dO, dtype.type(1), scratch, at.pairs)",
            "matmul(dK, dP, Q, scale, scratch, at.pairs)": "matmul(dK, dP, Q, dtype.type(1), scratch, at.pairs)",
            "matmul_tn(dQ, dP, keys.K, scale,": "matmul_tn(dQ, dP, keys.K, dtype.type(1),",
            "dP[j, i] * Z[j, i] - D[i]": "dP[j, i] - D[i]",
            "P[j, i] *= Z[j, i]": "pass",
            "P[j, i] * (dP[j, i] - D[i])": "P[j, i] * dP[j, i] - D[i]",
        },
    },
}
