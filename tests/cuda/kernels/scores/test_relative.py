"""Tables, and their gradients."""

import numpy as np
import pytest

import numbattn as na
from tests.accuracy import check, random
from tests.scores import test_parts as scores
from tests.tools.device import HOPPER, TURING, on
from tests.tools.launch import compiled_only, simulated_only

UNFUSED = pytest.mark.xfail(reason="the interpreter rounds products that ptxas fuses with sums")


@pytest.mark.parametrize(("device", "dtype"), [
    pytest.param(HOPPER, np.float16, id="Hopper", marks=simulated_only),  # compiled: hopper/test_score_gradient
    pytest.param(TURING, np.float32, id="any GPU", marks=[compiled_only, pytest.mark.slow, UNFUSED]),
])  # fmt: skip
def test_entries_far_from_the_diagonal(rng, sizes, device, dtype):
    """Tiles of which all elements are added the first entry of the table, or the last one."""
    sizes(1, 1, 140, 140)
    with on(device):
        score = na.RelativeBias(random(rng, 9, dtype), offset=10)
        check(*scores.qkv(rng, dtype, heads_k=1, d=8, e=8), rng, score=score)


FAULTS = {
    "entry_of(n0 - key - BEFORE, table)": "entry_of(n0 - key, table)",
    "entry_of(n0 - key + AHEAD, table)": "entry_of(n0 - key, table)",
    "(LAST_COL, LAST_ROW) if transposed": "(LAST_ROW, LAST_COL) if transposed",
    "table[batch, head, entry], F": "table[batch, head, 0], F",
    "table[batch, head, entry], to_scaled(ONE, scores)": "table[batch, head, 0], to_scaled(ONE, scores)",
    "head, entry], to_scaled(ONE, scores)": "head, entry], ONE",
    (
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-softcap-alibi-sink]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-relative-softcap]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-bias of keys]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-pair bias-softcap-bias "
        "of queries]",
        "cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-relative-function-shift]",
    ): {
        "diagonal_index(layout, SIGN * (n0 - key)) * SIGN": "diagonal_index(layout, SIGN * (n0 - key))",
        "entry, _ = read(ahead, shape(table)[-1] // 2)": "entry, _ = read(ahead, shape(table)[-1])",
    },
    (
        "cuda/kernels/scores/test_distance.py::test_offsets",
        "cuda/kernels/scores/test_distance.py::test_distances_within_segments_of_unequal_lengths",
    ): {
        "* SIGN - of_queries(offsets, m0)": "* SIGN",
    },
    "cuda/kernels/scores/test_distance.py::test_offsets": {
        "problem.seqlen_q - 1 + offset": "problem.seqlen_q - 1",
    },
}
