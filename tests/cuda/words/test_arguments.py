"""Tested with what they are parts of: see FAULTS."""

FAULTS = {
    "cuda/plan/test_planner.py::test_lse_that_nobody_wants_goes_to_scrap_memory_if_it_fits": {
        "<= SCRAP_BYTES": ">= SCRAP_BYTES",
    },
    "cuda/plan/test_planner.py::test_what_is_not_aligned_is_copied_for_cp_async": {
        "class AlignedMatrix(Matrix):": "class AlignedMatrix(Matrix):\n    find = Matrix.find\n\nclass Unused(Matrix):",
    },
}
