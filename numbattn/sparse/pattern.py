"""The blocks of a sparse matrix, as lists for kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np

from ..base.checks import A, same_library, words_for
from ..base.forks import cached_property
from ..masks import BlockSparse

SIZES = 16, 32, 64, 128  # of blocks
TAKER = "numbattn.sparse"


def bits(x: Any) -> Any:
    """The memory of x as integers, since CuPy does not index all dtypes."""
    return x.view(f"u{x.dtype.itemsize}")


class Lists(NamedTuple):
    """For each line of blocks, a row or a column, where its entries start, (lines + 1,); and the entries, (blocks, 2):
    the place of a block along the line, and its number."""

    starts: Any
    entries: Any

    def of(self, line: int) -> Any:
        """A line's entries: places and numbers."""
        return self.entries[self.starts[line] : self.starts[line + 1]].T


class Pattern:
    """The sparsity pattern of a weight matrix: the blocks that it has.

    Its lists are made once on the CPU, and copied to a GPU when they are first needed there, which waits for it.

    Parameters
    ----------
    mask : BlockSparse
        Its `blocks`, (rows, columns), of block_size: W has rows * block_size[0] rows, one for each input feature, and
        columns * block_size[1] columns. A CuPy array is copied once, which waits for the GPU.

    Attributes
    ----------
    shape : (int, int)
        The shape of W, features in and features out.
    block_size : (int, int)
    blocks : array of bool
        A NumPy array.
    count : int
        The number of blocks.
    places : array of int32, (count, 2)
        The row and column of each block, row by row.

    Raises
    ------
    TypeError
        For anything but a BlockSparse.
    ValueError
        For blocks with batch axes, and sizes that kernels do not have: 16, 32, 64 or 128.

    Examples
    --------
    >>> import numbattn as na
    >>> from numbattn import sparse
    >>> pattern = sparse.Pattern(na.BlockSparse.butterfly((64, 64), block_size=(16, 16)))
    >>> pattern.shape, pattern.count
    ((64, 64), 12)
    """

    def __init__(self, mask: BlockSparse) -> None:
        if not isinstance(mask, BlockSparse):
            raise TypeError(f"mask: got {words_for(mask)}, expected a BlockSparse")
        if mask.blocks.ndim != 2:
            raise ValueError(f"mask: got blocks of the shape {mask.blocks.shape}, expected (rows, columns)")
        if not set(mask.block_size) <= set(SIZES):
            raise ValueError(f"mask: got a block_size of {mask.block_size}, allowed {', '.join(map(str, SIZES))}")
        blocks: Any = mask.blocks
        self.blocks: Any = np.array(blocks if isinstance(blocks, np.ndarray) else blocks.get())
        self.block_size = mask.block_size
        self._on_devices: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"Pattern({self.count} of {self.blocks.size} blocks of {self.block_size}, {self.shape})"

    @cached_property
    def shape(self) -> tuple[int, int]:
        (rows, columns), (height, width) = self.blocks.shape, self.block_size
        return rows * height, columns * width

    @cached_property
    def places(self) -> Any:
        """The row and column of each block."""
        return np.argwhere(self.blocks).astype(np.int32)

    @cached_property
    def count(self) -> int:
        return len(self.places)

    @cached_property
    def _by_column(self) -> Lists:
        return self._lists(1)

    @cached_property
    def _by_row(self) -> Lists:
        return self._lists(0)

    def _lists(self, axis: int) -> Lists:
        lines = self.places[:, axis]
        order = np.argsort(lines, kind="stable")
        starts = np.searchsorted(lines[order], np.arange(self.blocks.shape[axis] + 1))
        entries = np.stack([self.places[order, 1 - axis], order], axis=1)
        return Lists(starts.astype(np.int32), entries.astype(np.int32))

    def _groups(self, members: int) -> Any:
        """Groups of `members` blocks of one row, (groups, 1 + 2 members): the row, and the column and number of each
        block, -1 if none is left."""
        found = []
        for row in range(len(self.blocks)):
            entries = self._by_row.of(row).T
            for first in range(0, len(entries), members):
                group = np.full((members, 2), -1, np.int32)
                some = entries[first : first + members]
                group[: len(some)] = some
                found.append([row, *group.ravel()])
        return np.array(found, np.int32).reshape(-1, 1 + 2 * members)

    def _kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """What a backend has made of the lists under this key, made once."""
        found = self._on_devices.get(key)
        return self._on_devices.setdefault(key, make()) if found is None else found

    def values(self, dense: A) -> A:
        """The pattern's blocks of a dense matrix.

        Parameters
        ----------
        dense : array, of the pattern's `shape`

        Returns
        -------
        w : array, (count, rows of a block, columns of a block)
        """
        same_library(TAKER, dense=dense)
        if dense.shape != self.shape:
            raise ValueError(f"dense: got the shape {dense.shape}, expected {self.shape}")
        (rows, columns), (height, width) = self.blocks.shape, self.block_size
        whole: Any = dense
        row, column = np.asarray(self.places.T, like=whole)
        blocks = whole.reshape(rows, height, columns, width).swapaxes(1, 2)
        found: Any = bits(blocks)[row, column].view(dense.dtype)
        return found

    def dense(self, w: A) -> A:
        """The dense matrix, with zeros outside of the blocks.

        Parameters
        ----------
        w : array, (count, rows of a block, columns of a block)

        Returns
        -------
        dense : array, of the pattern's `shape`
        """
        same_library(TAKER, w=w)
        if w.shape != (self.count, *self.block_size):
            raise ValueError(f"w: got the shape {w.shape}, expected {(self.count, *self.block_size)}")
        (rows, columns), (height, width) = self.blocks.shape, self.block_size
        whole: Any = np.zeros((rows, columns, height, width), w.dtype, like=cast(Any, w))
        row, column = np.asarray(self.places.T, like=whole)
        bits(whole)[row, column] = bits(w)
        found: Any = whole.swapaxes(1, 2).reshape(self.shape)
        return found
