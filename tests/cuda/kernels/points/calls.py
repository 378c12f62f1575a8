"""Sums over pairs of points by the CUDA kernels, without a GPU: against the formula in float64."""

import numpy as np
from numpy.testing import assert_allclose

from numbattn.cuda.points import Points
from numbattn.points import kinds
from numbattn.problem import describe
from tests.points import plain
from tests.tools.device import GPU, HOPPER

EPS = {np.dtype(dtype): eps for dtype, eps in (("float16", 2e-3), ("float32", 4e-6), ("float64", 1e-12))}


def drawn(rng, dtype=np.float32, batch=(1, 1), m=40, n=70, d=3, e=1):
    """x, y, b and c."""
    return [rng.standard_normal((*batch, *sizes)).astype(dtype) for sizes in ((m, d), (n, d), (n, e), (m, e))]


def check(x, y, b, c, kind=kinds.GAUSSIAN, mask=None, device=HOPPER, only=("sums", "gradient"), **vectors):
    """Both passes, or only one."""
    gpu, (problem, inputs) = GPU(device), describe(x, y, b, mask=mask)
    points, visible = Points(lambda: gpu), True
    given = {name: x.astype(problem.sum_dtype) for name, x in vectors.items()}
    found = {name: getattr(points, name)(problem, inputs, kind, *[c] * (name == "gradient"), **given) for name in only}
    if mask is not None:
        visible = np.broadcast_to(inputs.mask.dense(problem.seqlen_q, problem.seqlen_k), problem.score_shape)
        x, y, b, c = (np.nan_to_num(points) for points in (x, y, b, c))
    for name, got in found.items():
        want = getattr(plain, name)(kind, x, y, b, *[c] * (name == "gradient"), visible, **given)
        assert got.dtype == problem.sum_dtype
        assert_allclose(got, want, atol=EPS[x.dtype] * (abs(want).max(initial=0) + 1e-30), rtol=0)
