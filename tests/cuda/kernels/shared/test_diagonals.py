"""Tested with what they are parts of: see FAULTS."""

FAULTS = {
    "cuda/kernels/hopper/test_score_gradient.py": {
        "+ n_blocks + PER_TILE - 1)": "+ n_blocks)",
        "(number + PER_TILE * m_first - before)": "(number - before)",
        "(number + row) * TILE_N": "number * TILE_N",
    },
}
