"""Kernels for half precision by mma.sync, from compute capability 8.0 on."""
