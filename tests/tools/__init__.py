"""Tools of the tests: kernels compiled, assembled, interpreted and simulated without a GPU."""
