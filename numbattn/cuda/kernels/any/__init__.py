"""The kernels for any GPU, and those that are no product of matrices."""
