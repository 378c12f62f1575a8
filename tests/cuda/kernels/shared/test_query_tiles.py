"""Tested with what they are parts of: see FAULTS."""

FAULTS = {
    "cuda/kernels/shared/test_segments.py::test_nan_stays_in_its_segment_simulated[simulated-warps]": {
        "opaque(tile.segment.first_padded_row) // tile_m + at.m_block": "at.m_block",
    },
    "cuda/kernels/hopper/test_backward.py": {
        "m_block, m_blocks = first // TILE_M, (end + TILE_M - 1) // TILE_M": "m_block, m_blocks = 0, end // TILE_M",
        "return queries_from(sight, tile, at.head + 1)": "return queries_from(sight, tile, tile.heads)",
        "            if queries > 0:\n": "            if queries > -1:\n",
    },
}
