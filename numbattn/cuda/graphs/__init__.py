"""Attention over the edges of graphs by CUDA kernels."""
