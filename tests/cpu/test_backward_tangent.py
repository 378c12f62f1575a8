"""How the tiles of keys are shared out among blocks, several directions at once. All else: see test_jets."""

import numpy as np

import numbattn as na
from numbattn import reference
from numbattn.cpu.backward import TILE_N, run
from tests.tools.blocks import run_blocks


def test_blocks_share_the_tiles_of_all_segments(rng, monkeypatch):
    """Each tile is one block's, so that no two add to the same tdK, and sums for a slope are each block's own."""
    touched = []

    def one_by_one(call, blocks, work, nbytes, arrays):
        *_, tdk, _ = arrays
        if len(tdk) < 2:  # of the gradients themselves
            run_blocks(call, 0, blocks, nbytes, arrays)
            return
        for block in range(blocks):
            before = tdk.copy()
            run_blocks(call, block, block + 1, nbytes, arrays)
            touched.append((tdk != before).any(axis=(0, 1, 3)))

    monkeypatch.setitem(run.__globals__, "launch", one_by_one)
    segments = np.arange(5) * 2 * TILE_N  # of two tiles each
    q, k, v, do = rng.standard_normal((4, segments[-1], 4))
    tq, slopes = rng.standard_normal((2, *q.shape)), rng.standard_normal(2)  # two directions
    options = {"mask": na.Segments(segments), "score": na.Alibi(np.array(0.1))}
    _, _, saved, tsaved = na.attention_forward_jvp(q, k, v, tq, None, None, tscore=[slopes], **options)
    _, tgrads = na.attention_backward_jvp(do, saved, tsaved)
    assert (np.sum(touched, axis=0) == 1).all()
    assert len(touched) > 1
    wanted = reference.attention_backward_jvp(do, q, k, v, tq, None, None, tscore=[slopes], **options)
    for got, want in zip((*tgrads, *tgrads.score), (*wanted, *wanted.score), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


def test_results_do_not_depend_on_threads(rng):
    """Nor on who computes along with them: to the bit."""
    q, k, v, do, tq, tk = rng.standard_normal((6, 2, 700, 16))
    for x in q, k:
        _, _, saved, tsaved = na.attention_forward_jvp(x, k, v, tq, tk, None)
        one, other = (na.attention_backward_jvp(do, saved, tsaved)[1] for _ in range(2))
        for a, b in zip(one, other):
            np.testing.assert_array_equal(a, b)


FAULTS = {
    "cpu/backward_directions.py": {
        "test_jets.py": {
            "tD[i] += more[i]": "pass",
            "tD[i] -= tdlse[i]": "pass",
            "subtract(dP, at.D)": "pass",
            "tS[j, i] * dP[j, i] + P[j, i] * (tdP[j, i] - tD[i])": "tS[j, i] * dP[j, i] + P[j, i] * tdP[j, i]",
            "P[j, i] * (tS[j, i] - tlse[i])": "P[j, i] * tS[j, i]",
            "multiply(tS, Z)": "pass",
            "multiply(tdP, Z)": "pass",
            "            multiply(P, Z)": "            pass",
            "product(tdV, tS, dO, kept_scale, True)": "product(tdV, tS, dO, scale, True)",
            "product_tn(tdQ, dS, tK, scale, True)": "pass",
        },
    },
    "cpu/score_gradients.py": {
        "cpu/test_backward_tangent.py": {
            "sums.addresses[t]": "sums.addresses[0]",
        },
    },
}
