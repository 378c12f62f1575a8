"""Any array may lie in any way: what a kernel is promised of its matrices holds for each, see `tools.device.run`."""

import numpy as np
import pytest

import numbattn as na
from tests.tools.device import AMPERE, HOPPER, on

LAYOUTS = {
    "columns apart": lambda *lead, cols, dtype: np.zeros((*lead, 2 * cols), dtype)[..., ::2],
    "rows apart": lambda *lead, cols, dtype: np.zeros((*lead, cols + 1), dtype)[..., :-1],
    "broadcast": lambda *lead, cols, dtype: np.broadcast_to(np.zeros((), dtype), (*lead, cols)),
}
ROWS = "q", "o", "do", "tq", "tdo"
MATRICES = *ROWS, "k", "v", "tk", "tv"
SCORES = {"bias": (na.Bias, (2, 9, 12)), "table": (na.RelativeBias, (2, 5))}


def nothing(*launched):
    pass


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("device", "dtype", "score"), [(AMPERE, "float32", "bias"), (HOPPER, "float16", "table")])
def test_one_array_at_a_time(device, dtype, score, layout):
    """In the tangents of a backward pass, whose kernels take most; none of them runs."""
    part, shape = SCORES[score]
    part, tangent = part(np.zeros(shape, np.float32)), np.zeros(shape, np.float32)
    shapes = {name: (1, 2, 9 if name in ROWS else 12, 16) for name in MATRICES}
    for name in MATRICES:
        x = {other: np.zeros(shape, dtype) for other, shape in shapes.items()}
        *lead, cols = shapes[name]
        x[name] = LAYOUTS[layout](*lead, cols=cols, dtype=dtype)
        given = x["q"], x["k"], x["v"]
        with on(device, nothing):
            _, _, saved, tsaved = na.attention_forward_jvp(
                *given, x["tq"], x["tk"], x["tv"], score=part, tscore=[tangent]
            )
            saved = na.Saved.of(*given, x["o"], saved.lse, score=part)
            na.attention_backward_jvp(x["do"], saved, tsaved, tdo=x["tdo"])


FAULTS = {
    "cuda/plan/planner.py": {
        "for x in argument.matrices\n": "for x in argument.matrices[:1]\n",
        "alignment(layout) == VECTOR_BYTES for layout in layouts": "True for layout in layouts",
    },
}
