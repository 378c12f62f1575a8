"""Plans of a call against the formula: parts of points, and their products."""

import numpy as np
import pytest

from numbattn.cuda.points import Points
from numbattn.points import formula, kinds
from tests.points.test_formula import drawn
from tests.tools.device import GPU, HOPPER
from tests.tools.launch import simulated_only


def check(rng, columns=True, far=0, **about):
    problem, inputs, (x, y, _), _ = drawn(rng, dtype=np.float32, e=0, **about)
    w = rng.standard_normal((*problem.batch, problem.seqlen_k)).astype(np.float32) * 3 if columns else None
    got = Points(lambda: GPU(HOPPER)).logsumexp(problem, inputs, kinds.GAUSSIAN, w)
    exact, _ = drawn(rng, e=0, **about)[:2]
    t = ((x.astype(float)[..., :, None, :] - y[..., None, :, :]) ** 2).sum(-1)
    logs = -t / 2 + (0 if w is None else w.astype(float)[..., None, :])
    top = logs.max(-1, keepdims=True)
    wanted = np.log(np.exp(logs - top).sum(-1)) + top[..., 0]
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2 * abs(formula.logsumexp(problem, inputs, kinds.GAUSSIAN, w)
                                                                 - wanted).max() + 1e-6)


@pytest.mark.parametrize("columns", [True, False])
def test_one_tile(rng, columns):
    check(rng, columns, d=20, m=70, n=50, batch=(2,))
