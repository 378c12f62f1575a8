"""The backend for products of CuPy arrays, see `numbattn.sparse.product`."""

from ..launch import current_gpu
from .products import SparseBackend

PRODUCTS = SparseBackend(current_gpu)
forward, backward_x, backward_w = PRODUCTS.forward, PRODUCTS.backward_x, PRODUCTS.backward_w

__all__ = ["backward_w", "backward_x", "forward"]
