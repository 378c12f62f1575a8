"""Rows of many keys, and numbers near the largest. All else: see test_api."""

from importlib import import_module

import numpy as np
import pytest

import numbattn as na
from numbattn.cpu import decode
from numbattn.cpu.arguments import LONG
from tests.accuracy import check, exact

MANY = decode.FEW + 1  # queries that decode.py does not compute


def test_long_rows_lose_no_digits(rng):
    """O and l grow along all keys; the errors of the gradients come from those of o and lse."""
    q, k = (size * rng.standard_normal((n, 8), dtype=np.float32) for size, n in ((0.01, MANY), (1, 16 * LONG)))
    check(q, k, rng.random(k.shape, dtype=np.float32), rng)


@pytest.mark.parametrize("options", [{}, {"dropout": na.Dropout(0.3, 1)}, {"score": na.Sink(np.float32(3.0))}])
def test_parts_of_a_long_row_that_see_nothing(rng, options):
    """Some queries see keys of one part alone, one of none, and nobody one of the parts."""
    n = 3 * LONG + 300
    first, end = np.zeros(MANY, int), np.full(MANY, n)
    first[1:5], end[1:5] = (3, LONG + 7, 2 * LONG + 5, 9), (LONG - 2, LONG + 90, n, 9)
    mask = na.Intervals(first, end) & na.BlockSparse(np.array([[True, False, True, True]]), (MANY, LONG))
    q, k, v = (rng.standard_normal((size, 8), dtype=np.float32) for size in (MANY, n, n))
    o, lse, _ = check(q, k, v, rng, mask=mask, **options)
    assert np.isneginf(lse[[2, 4]]).all()
    assert not o[[2, 4]].any()


@pytest.mark.parametrize("m", [1, MANY])
def test_the_largest_values(rng, m):
    """The number of keys times the largest one is finite."""
    largest = np.finfo(np.float32).max / 70
    q, k, v = (rng.uniform(-1, 1, (size, 8)).astype(np.float32) for size in (m, 64, 64))
    o = na.attention(q, k, v * largest)
    np.testing.assert_allclose(o / largest, exact(o, q, k, v)[0], rtol=1e-6, atol=1e-6)


def test_an_interrupted_call_leaves_out_as_it_was(rng, monkeypatch):
    """Where it is more than one native call."""
    module = import_module("numbattn.cpu.forward")
    run, q, out = module.launch, rng.standard_normal((MANY, 8), dtype=np.float32), np.full((MANY, 8), 7, np.float32)

    def interrupted(*arguments):
        run(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "launch", interrupted)
    monkeypatch.setattr(module, "is_one_step", lambda work: False)
    with pytest.raises(KeyboardInterrupt):
        na.attention(q, q, q, out=out)
    assert (out == 7).all()


FAULTS = {
    "if n_next != first:": "if False:",
    "(sums, m, l) if n_next == first else (next_sums, m_next, l_next)": "(sums, m, l)",
    "min(n_next + LONG, n_end)": "n_end",
    (
        "test_api.py::test_masks[numpy-dropout-window]",
        "test_api.py::test_masks[numpy--lengths]",
        "test_api.py::test_pairs_of_masks[numpy-causal-causal]",
        "test_api.py::test_masks[numpy--blocks]",
    ): {
        "fill(l, 0)": "pass",
        "drops, batch, head, m0, n0)": "drops, head, batch, m0, n0)",
    },
    "scores/test_parts.py": {
        "score(S, given.steps, scratch.slopes, batch, head, m0, n0, at.offset)": "pass",
    },
    (
        "masks/test_segments.py::test_packed_is_separate",
        "masks/test_segments.py::test_nan_stays_in_its_segment[None-v-nan]",
        "masks/test_segments.py::test_nan_stays_in_its_segment[None-q-nan]",
    ): {
        "first -= (first - segment) % TILE_N": "first = first // TILE_N * TILE_N",
    },
    "call/test_problem.py::test_out_of_any_strides": {
        "or not out.flags.carray": "",
        "elif out is not o:": "elif False:",
    },
    "test_an_interrupted_call_leaves_out_as_it_was": {
        "return len(calls) <= 1 and all(is_one_step(work) for _, _, work, _ in calls)": "return True",
    },
    "cpu/score.py": {
        "scores/test_parts.py": {
            "offsets[step] = 0 if offset is None else offset": "offsets[step] = 0",
            "aligned if numbers[IS_ALIGNED] else ": "",
            "slopes[own * S.size : (own + order) * S.size]": "slopes[: order * S.size]",
            "(tiles, order) if is_nonlinear else (-1, 0)": "(tiles, order)",
            "if kind == number:": "if kind <= number:",
        },
    },
    "cpu/scores/function.py": {
        "base/test_origin.py::test_heads_and_elements_of_the_batch": {
            "batch + origin.batch, head + origin.head": "batch + origin.batch, head",
            "m0 + origin.query, n0 + origin.key": "m0 + origin.query, n0",
        },
    },
    "cpu/scores/softcap.py": {
        "scores/test_parts.py": {
            "derivative[j, i] = (S[j, i] + one) * half * half": "derivative[j, i] = one",
        },
    },
    "cpu/scores/bias.py": {
        "scores/test_parts.py": {
            "bias.strides[1] == bias.itemsize": "True",
            "0 if one_key else n0 + j] += dS": "n0 + j] += dS",
        },
    },
    "cpu/scores/distance.py": {
        "scores/test_parts.py": {
            "return LoweredStep(x.shape, x.strides,": "return LoweredStep(x.shape, x.shape,",
            "*lead, _ = compact(x).shape": "lead = compact(x).shape",
            "S.dtype.type(slope) * array": "array",
            "dx[0, entry] += slope": "dx[0, entry] -= slope",
            "first, reach = n0 - m0 - row.offset": "first, reach = n0 - m0",
        },
    },
    "cpu/tile.py": {
        "cpu/points/test_sums.py::test_masks[blocks]": {
            "if state == PARTIAL": "if state == EMPTY",
        },
    },
    "cpu/softmax.py": {
        ("cpu/test_decode.py", "cpu/test_forward.py"): {
            "alpha * l[r] + beta * l_next[r]": "l[r] + l_next[r]",
            "if l_next[r] != 0:": "if l[r] != 0:",
        },
        (
            "test_api.py::test_masks[numpy-dropout-window]",
            "test_api.py::test_masks[numpy--lengths]",
            "test_api.py::test_pairs_of_masks[numpy-causal-causal]",
            "test_api.py::test_masks[numpy--blocks]",
        ): {
            "S[j, i] if S[j, i] > m[i] else m[i]": "S[j, i] if S[j, i] < m[i] else m[i]",
            "exp(alpha[i] - m[i])": "exp(m[i] - alpha[i])",
            "l[i] *= alpha[i]": "pass",
            "O[i, c] *= alpha[i]": "pass",
            "min(first + SUMMED, keys)": "min(first + SUMMED - 1, keys)",
            "m[i] + log_l": "m[i] + l[i]",
            "if l[i] != 0 else -np.inf": "if l[i] != 0 else 0.0",
            "O.dtype.type(kept_scale / l[i]": "O.dtype.type(1 / l[i]",
            "alpha[i] = exp(m[i] - m_new)": "alpha[i] = 1",
            "l[i] * alpha[i] + exp(logit - m_new)": "l[i] * alpha[i]",
        },
    },
}
