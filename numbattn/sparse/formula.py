"""Products with block-sparse matrices by NumPy: one matrix product for each row or column of blocks.

x and dy are (rows, features), w (blocks, height, width). float16 and bfloat16 are computed in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base.checks import dtype_of_sums
from .pattern import Lists, Pattern

quiet = np.errstate(under="ignore")


@quiet
def forward(x: Any, w: Any, pattern: Pattern) -> Any:
    """Y = X W."""
    return _product(x, w, pattern._by_column, pattern.block_size, pattern.shape[1])


@quiet
def backward_x(dy: Any, w: Any, pattern: Pattern) -> Any:
    """dX = dY W^T."""
    return _product(dy, w.swapaxes(1, 2), pattern._by_row, pattern.block_size[::-1], pattern.shape[0])


def _product(x: Any, w: Any, lists: Lists, block_size: tuple[int, int], features: int) -> Any:
    (depth, width), ACC = block_size, dtype_of_sums(x.dtype)
    panels, blocks = x.astype(ACC, copy=False).reshape(len(x), -1, depth), w.astype(ACC, copy=False)
    y = np.empty((len(x), features), x.dtype)
    for line in range(features // width):
        places, numbers = lists.of(line)
        found = panels[:, places].reshape(len(x), -1) @ blocks[numbers].reshape(-1, width)
        y[:, line * width : (line + 1) * width] = found
    return y


@quiet
def backward_w(x: Any, dy: Any, pattern: Pattern) -> Any:
    """dW = X^T dY, for the blocks of the pattern."""
    (height, width), ACC = pattern.block_size, dtype_of_sums(x.dtype)
    panels, X = dy.astype(ACC, copy=False).reshape(len(dy), -1, width), x.astype(ACC, copy=False)
    dw = np.empty((pattern.count, height, width), x.dtype)
    for line in range(len(pattern.blocks)):
        places, numbers = pattern._by_row.of(line)
        found = X[:, line * height : (line + 1) * height].T @ panels[:, places].reshape(len(dy), -1)
        dw[numbers] = found.reshape(height, -1, width).swapaxes(0, 1)
    return dw
