"""Tangents of scores, and how gradients and their tangents go back, against NumPy's formulas of the parts."""

import math
from dataclasses import replace

import numpy as np
import pytest

import numbattn as na
from numbattn.base.origin import Origin
from numbattn.call.problem import describe
from numbattn.cuda.kernels.scores import class_of, is_scaled, sink_tangent_step, tangent_steps
from numbattn.cuda.kernels.scores.score import Scores
from numbattn.cuda.kernels.scores.sink import SinkKind
from numbattn.cuda.tile import load, mma, save
from numbattn.cuda.views import contiguous
from numbattn.scores import ArrayPart
from tests.tools.launch import launch, mostly_simulated, poisoned

HEADS, M, N = 2, 40, 24
M0, N0, TILE = 16, 8, mma(16, 8, 32)
ONE, SCALE = (1, 1), np.float32(0.25)  # the matrix whose tile is computed


def bent(s, batch, head, i, j, weights):
    return math.tanh(s) * weights[head] + s * (i - j) / 8 if i != j else -math.inf


def shifted(s, batch, head, i, j):
    return s + (i - j) * batch


def random(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


PARTS = {
    "softcap": lambda rng: na.Softcap(1.5),
    "alibi": lambda rng: na.Alibi(random(rng, HEADS), offset=3),
    "bias": lambda rng: na.Bias(random(rng, HEADS, M, N)),
    "bias of keys": lambda rng: na.Bias(np.where(np.arange(N) == N0 + 3, -np.inf, random(rng, N))),
    "relative": lambda rng: na.RelativeBias(random(rng, HEADS, 21), offset=np.array([[1, 2], [3, 4]])),
    "sink": lambda rng: na.Sink(random(rng, HEADS)),
    "function": lambda rng: na.Score(bent, arrays=[random(rng, HEADS)]),
    "shift": lambda rng: na.Score(shifted),
}


def lowered(parts, problem):
    """The kinds of parts, or None, and their Scores."""
    kinds, values, logits = [], [], []
    for part in parts:
        if part is None:
            kinds.append(None)
            continue
        kind, numbers, arrays = class_of(type(part)).lowered(part, 0, problem)
        arrays = list(arrays.values())
        kinds.append(kind.of_layout(contiguous(arrays[0].shape, arrays[0].dtype) if arrays else None))
        if isinstance(part, na.Score):
            values.append((np.int32(0), Origin(*[np.int32(0)] * 4), np.int32(M), np.int32(N), tuple(arrays)))
            continue
        own = [part._own_axes, 0][: len(arrays)]
        arrays = [np.broadcast_to(x, (2, HEADS, *x.shape[x.ndim - axes :])) for x, axes in zip(arrays, own)]
        numbers = [np.int32(x) if isinstance(x, int) else np.float32(x) for x in numbers]
        if part._has_step:
            values.append((*arrays, *numbers))
        else:
            logits.append(arrays[0])
    return tuple(kinds), Scores(SCALE, 1 / SCALE, tuple(values), tuple(logits))


def formulas(parts, tparts, after, S, tS, dS, tdS):
    """S and tS after all parts, dS0 and tdS0."""
    S, tS = SCALE.astype(float) * S, SCALE.astype(float) * tS
    F, tF, at = np.ones_like(S), np.zeros_like(S), 0
    for part, tpart in zip(parts, tparts):
        if not part._has_step:
            continue
        if tpart is not None:
            tS = tpart._applied(tS)
        elif part._is_nonlinear:
            hidden = np.isneginf(S) | np.isneginf(part._applied(S))
            slope, bend = (np.where(hidden, 0, x) for x in (part._derivative(S), part._curvature(S)))
            if at > after:
                F, tF = F * slope, tF * slope + F * bend * tS
            tS = slope * tS
        S, at = part._applied(S), at + 1
    return S, tS, F * dS, F * tdS + tF * dS


CASES = [("softcap",), ("sink", "alibi"), ("bias", "softcap", "alibi"), ("relative", "function", "bias of keys"),
         ("alibi", "softcap", "shift", "function"), ("bias of keys", "softcap", "bias")]  # fmt: skip


@pytest.mark.parametrize("transposed", [
    pytest.param(False, id="rows are queries"), pytest.param(True, id="rows are keys", marks=mostly_simulated),
])  # fmt: skip
@pytest.mark.parametrize(("names", "after", "constant"), [
    *(pytest.param(names, -1, None, id="-".join(names)) for names in CASES),
    pytest.param(CASES[4], 1, None, id="after a softcap"),
    *(pytest.param(*which, marks=mostly_simulated, id=name) for name, *which in (
        ("forward", CASES[4], 4, None), ("constant bias", CASES[2], -1, "bias"),
        ("constant table", CASES[3], -1, "relative"),
    )),
])  # fmt: skip
def test_a_tile(rng, names, after, constant, transposed):
    parts = [PARTS[name](rng) for name in names]
    tparts = [
        replace(part, **{part._name: random(rng, *part._array.shape)})
        if isinstance(part, ArrayPart) and name != constant else None for name, part in zip(names, parts)
    ]  # fmt: skip
    given = random(rng, 4, 2, HEADS, M, N)
    problem, _ = describe(given[0, ..., :1], *[given[0, ..., :N, :1]] * 2)
    (score, scores), (tangents, tscores) = lowered(parts, problem), lowered(tparts, problem)
    apply, pull_back = tangent_steps(score, tangents, TILE, np.float32, transposed, after)
    m0, n0 = np.int32(M0), np.int32(N0)

    def kernel(inputs, outputs, scores, tscores, m0, n0):
        S, tS, (F, tF) = apply(load(inputs[0], TILE, 0), load(inputs[1], TILE, 0), scores, tscores, 1, 1, m0, n0)
        dS, tdS = pull_back(load(inputs[2], TILE, 0), load(inputs[3], TILE, 0), F, tF)
        save(outputs[0], S, 0)
        save(outputs[1], tS, 0)
        save(outputs[2], dS, 0)
        save(outputs[3], tdS, 0)

    def tile(x):
        x = x[ONE][M0 : M0 + 16, N0 : N0 + 16]
        return x.T[:, :8] if transposed else x[:, :8]

    inputs, found = tuple(map(np.ascontiguousarray, map(tile, given))), tuple(poisoned((16, 8)) for _ in range(4))
    launch(kernel, (1, 1, 1), 32, 0, inputs, found, scores, tscores, m0, n0)
    factors = (1 if is_scaled(score) else SCALE,) * 2 + (1, 1)
    for x, want, factor in zip(found, formulas(parts, tparts, after, *given.astype(float)), factors):
        np.testing.assert_allclose(x * factor, tile(want), rtol=1e-4, atol=1e-5)


def test_the_tangent_of_a_sink(rng):
    """Where rows see nothing it adds nothing."""
    step, ROWS = sink_tangent_step((None, SinkKind()), np.float32), TILE.row_vector()
    logits, tangents = random(rng, 2, 1, HEADS)
    m, total, tlse = random(rng, 3, 16)
    total = np.where(np.arange(16) == 3, 0, 1 + total**2)

    def kernel(tlse, m, total, scores, tscores, out):
        tlse, m, total = load(tlse, ROWS, 0), load(m, ROWS, 0), load(total, ROWS, 0)
        save(out, step(tlse, m, total, scores, tscores, 0, 1), 0)

    scores, tscores = (Scores(np.float32(1), np.float32(1), (), (x,)) for x in (logits, tangents))
    out = poisoned(16)
    launch(kernel, (1, 1, 1), 32, 0, tlse, m, total, scores, tscores, out)
    P = np.where(total > 0, np.exp(logits[0, 1] - m) / np.where(total > 0, total, 1), 0)
    np.testing.assert_allclose(out, tlse + P * tangents[0, 1], rtol=1e-5)
    assert sink_tangent_step((None, None), np.float32)(tlse, m, total, scores, (), 0, 1) is tlse


FAULTS = {
    "tS * to_scaled(ONE, scores), FF": "tS, FF",
    "tS = tS * to_scaled(ONE, scores)": "pass",
    "tF * slope + F * tslope": "tF * slope + tslope",
    "return dS * F, tdS * F + dS * tF": "return dS * F, tdS * F",
    "given += [tangent] * bool(tangent)": "given += [tangent]",
    "is_counted = len(before) > after": "is_counted = len(before) >= after",
    "add_tangent(tS, tS, found, tscores,": "add_tangent(tS, tS, found, scores,",
    "(slope, tS * bend)": "(slope, bend)",
    "cuda/kernels/scores/softcap.py": {
        "(2 * r - 1) * (2 * inverse)": "(1 - 2 * r) * (2 * inverse)",
    },
    "cuda/kernels/scores/function.py": {
        "where(seen, bend, 0)": "bend",
    },
    "cuda/kernels/scores/sink.py": {
        "where(total > 0, exp2((logit - m) * LOG2E) * reciprocal(total) * tangent, 0)":
            "exp2((logit - m) * LOG2E) * tangent",
    },
}
