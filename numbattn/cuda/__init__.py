"""Attention on CuPy arrays: CUDA kernels that are Python functions."""
