"""Tested with what they are parts of: see FAULTS."""

FAULTS = {
    "test_small.py::test_tables_and_offsets_that_heads_share": {
        "matrices, name = math.prod(heads) // tables": "matrices, name = 1",
        "of_heads.strides[-1:] * 2": "(0, 0)",
    },
    "test_small.py::test_matrices_that_tma_cannot_move": {
        "[route] if all(map(fits_tensor_map, matrices)) else []": "[route]",
    },
    (
        "cuda/plan/test_planner.py::test_what_offsets_depend_on",
        "cuda/plan/test_planner.py::test_the_gradient_of_a_table_by_its_offset",
    ): {
        "lead = np.broadcast_shapes(lead, planner.layouts[array_of_offset(number)].shape)": "pass",
    },
    "cuda/plan/test_planner.py::test_what_a_batch_shares_is_summed_in_as_many_parts_as_fill_the_gpu": {
        " if blocks < 2 * room else 1), served)": ", 1), served)",
        "* -(-served // parts))": "* served // parts)",
        "max(source.blocks, THREADS // source.threads)": "THREADS // source.threads",
        "blocks, served = own * blocks": "blocks, served = blocks",
    },
    "cuda/plan/test_planner.py::test_slopes_get_their_gradient_from_a_kernel_of_its_own": {
        " or sums_by_row(number) in planner.temporaries": "",
    },
}
