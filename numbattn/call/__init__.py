"""A call, checked and fitted: its arrays and options as one `problem.Problem`, and its tangents."""
