"""Products with block-sparse matrices: layers whose time and memory are proportional to the number of blocks.

>>> import numpy as np
>>> import numbattn as na
>>> from numbattn import sparse
>>> pattern = sparse.Pattern(na.BlockSparse.butterfly((256, 512), block_size=(64, 64)))
>>> rng = np.random.default_rng(0)
>>> w = rng.standard_normal((pattern.count, 64, 64), dtype=np.float32)         # the blocks that are there, row by row
>>> x = rng.standard_normal((3, 1000, 256), dtype=np.float32)
>>> y, backprop = sparse.product_vjp(x, w, pattern)                             # x @ pattern.dense(w)
>>> dx, dw = backprop(np.ones_like(y))
>>> y.shape, dx.shape, dw.shape == w.shape
((3, 1000, 512), (3, 1000, 256), True)

Arrays are NumPy's, computed on CPUs, or CuPy's, computed on the GPU, of float16, bfloat16, float32 or float64. Results
are equal bit for bit from call to call.
"""

from .pattern import Pattern
from .product import product, product_vjp

__all__ = ["Pattern", "product", "product_vjp"]
