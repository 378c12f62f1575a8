"""BlockSparse, and its patterns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ..base.backends import backend
from ..base.checks import (
    Array,
    Integers,
    check_array,
    check_values,
    integer,
    integer_array,
    integers,
    own,
    shape_of,
    words_for,
)
from ..base.origin import Crop
from ..base.values import Held, broadcasts, moved
from .base import Grid, Mask


@dataclass(frozen=True, eq=False, repr=False)
class BlockSparse(Mask):
    """Key j is visible to query i iff ``blocks[..., i // rows, j // columns]``: Algorithm 5 skips the other blocks.

    Parameters
    ----------
    blocks : array of bool, (..., ceil(seqlen_q / rows), ceil(seqlen_k / columns))
        The leading axes are the batch axes, heads included, each of full size or 1.
    block_size : (int, int)
        Rows and columns of a block, any size.

    See Also
    --------
    BlockSparse.from_indices : from the blocks that each block of queries has chosen.
    BlockSparse.butterfly, BlockSparse.local_global, BlockSparse.strided : patterns.

    Notes
    -----
    The patterns are symmetric; ``& Causal()`` makes them causal. In a matrix that is not square, the pattern of the
    shorter axis is stretched along the longer one.
    """

    blocks: Array
    block_size: tuple[int, int] = (64, 64)

    _is_interval = False
    _examples = (
        ("blocks", lambda m, n: BlockSparse(np.ones((1, 1, -(-m // 128), -(-n // 128)), np.bool_), (128, 128))),
    )

    def __post_init__(self) -> None:
        check_array("BlockSparse blocks", self.blocks, np.bool_)
        self._set(block_size=_block_size(self.block_size))

    @classmethod
    def from_indices(
        cls,
        indices: Array | Sequence[Any],
        counts: Integers | None = None,
        *,
        shape: Iterable[int],
        block_size: tuple[int, int] = (64, 64),
    ) -> BlockSparse:
        """Each block of queries sees the blocks of keys that it has chosen, such as those of the largest pooled scores.

        Parameters
        ----------
        indices : integer array, (..., ceil(seqlen_q / rows), k)
            Blocks of keys, in any order, repeated or not; -1 is none. The leading axes are the batch axes, heads
            included, each of full size or 1.
        counts : integer array or int, optional
            How many of the k indices count, broadcast against (..., ceil(seqlen_q / rows)); the others are ignored.
        shape : tuple of int
            Shape of the mask: (..., seqlen_q, seqlen_k), its leading axes, if any, those of `indices` or 1.
        block_size : (int, int), optional
            Rows and columns of a block.

        Returns
        -------
        BlockSparse
            In the library of `indices`. CuPy arrays are not read on the host: kernels do all of it, and nothing waits
            for them. If it is made while a CUDA graph is captured, each launch of the graph makes it again, as long as
            it is kept alive.

        Raises
        ------
        TypeError
            For indices or counts that are not integers.
        ValueError
            For shapes that do not fit, for blocks without elements, and, in NumPy arrays, for counts and indices out of
            range; in CuPy arrays such indices are dropped.

        Notes
        -----
        Blocks of 64 x 64 or of 128 x 128 waste nothing on Hopper. `attention_forward` gives the lse by which the result
        is merged with attention to other keys, as to pooled ones.

        Examples
        --------
        >>> import numbattn as na
        >>> na.BlockSparse.from_indices([[0, -1], [2, 0], [1, 1]], shape=(3, 4), block_size=(1, 1)).blocks.astype(int)
        array([[1, 0, 0, 0],
               [1, 0, 1, 0],
               [0, 1, 0, 0]])
        """
        name = "BlockSparse.from_indices indices"
        given = own(name, integer_array(name, indices, "(..., blocks of queries, k)"))
        *batch, m, n = shape_of("shape", shape)
        rows, cols = _block_size(block_size)
        (*lead, k), m_blocks, n_blocks = given.shape, -(-m // rows), -(-n // cols)
        fits = all(a == b or 1 in (a, b) for a, b in zip(reversed(batch), reversed(lead[:-1])))
        if lead[-1:] != [m_blocks] or len(batch) >= len(lead) or not fits:
            raise ValueError(f"{name}: got the shape {given.shape}, expected (..., {m_blocks}, k), for the shape "
                             f"{(*batch, m, n)} in blocks of {rows} x {cols}")
        given, of_rows = given.reshape(math.prod(lead), k), _counts(counts, given)
        if isinstance(given, np.ndarray):
            blocks = _chosen(given, of_rows, n_blocks)
        else:
            arrays = {"indices": given, "counts": of_rows}
            backend("cupy").check_device({name: x for name, x in arrays.items() if x is not None})
            blocks = backend("cupy").chosen(given, of_rows, n_blocks)
        return cls(blocks.reshape(*lead, n_blocks), (rows, cols))

    @classmethod
    def butterfly(cls, shape: Iterable[int], block_size: tuple[int, int] = (64, 64)) -> BlockSparse:
        """Block i sees block j iff i and j are equal or differ in one bit: the paper's pattern, log2(n) blocks a row.

        Parameters
        ----------
        shape : tuple of int
            The shape of the mask, (..., seqlen_q, seqlen_k), its leading axes usually 1.
        block_size : (int, int), optional
            Rows and columns of a block.

        Returns
        -------
        BlockSparse

        Raises
        ------
        TypeError, ValueError
            For anything but a shape, and for blocks without elements.

        Examples
        --------
        >>> import numbattn as na
        >>> na.BlockSparse.butterfly((4, 4), block_size=(1, 1)).blocks.astype(int)
        array([[1, 1, 1, 0],
               [1, 1, 0, 1],
               [1, 0, 1, 1],
               [0, 1, 1, 1]])
        """
        return cls._built(shape, block_size, lambda i, j: ((i ^ j) & ((i ^ j) - 1)) == 0)

    @classmethod
    def local_global(
        cls, shape: Iterable[int], block_size: tuple[int, int] = (64, 64), local: int = 1, everywhere: int = 1
    ) -> BlockSparse:
        """Block i sees block j iff ``|i - j| <= local``, or one of them is among the first `everywhere` blocks.

        Parameters
        ----------
        shape : tuple of int
            The shape of the mask, (..., seqlen_q, seqlen_k), its leading axes usually 1.
        block_size : (int, int), optional
            Rows and columns of a block.
        local : int, optional
            Blocks on either side that a block sees.
        everywhere : int, optional
            How many of the first blocks see all, and are seen by all.

        Returns
        -------
        BlockSparse

        Raises
        ------
        TypeError, ValueError
            For anything but a shape, and for blocks without elements.

        Examples
        --------
        >>> import numbattn as na
        >>> na.BlockSparse.local_global((4, 4), block_size=(1, 1), local=0).blocks.astype(int)
        array([[1, 1, 1, 1],
               [1, 1, 0, 0],
               [1, 0, 1, 0],
               [1, 0, 0, 1]])
        """
        local, everywhere = integer("local", local), integer("everywhere", everywhere)
        return cls._built(shape, block_size, lambda i, j: (abs(i - j) <= local) | (np.minimum(i, j) < everywhere))

    @classmethod
    def strided(
        cls, shape: Iterable[int], block_size: tuple[int, int] = (64, 64), local: int = 1, stride: int = 4
    ) -> BlockSparse:
        """Block i sees block j iff ``|i - j| <= local``, or i - j is a multiple of `stride`.

        Parameters
        ----------
        shape : tuple of int
            The shape of the mask, (..., seqlen_q, seqlen_k), its leading axes usually 1.
        block_size : (int, int), optional
            Rows and columns of a block.
        local : int, optional
            Blocks on either side that a block sees.
        stride : int, optional
            1 or more.

        Returns
        -------
        BlockSparse

        Raises
        ------
        TypeError, ValueError
            For anything but a shape, and for blocks without elements.

        Examples
        --------
        >>> import numbattn as na
        >>> na.BlockSparse.strided((4, 4), block_size=(1, 1), local=0, stride=2).blocks.astype(int)
        array([[1, 0, 1, 0],
               [0, 1, 0, 1],
               [1, 0, 1, 0],
               [0, 1, 0, 1]])
        """
        local, stride = integer("local", local), integer("stride", stride, low=1)
        return cls._built(shape, block_size, lambda i, j: (abs(i - j) <= local) | ((i - j) % stride == 0))

    @classmethod
    def _built(cls, shape: Iterable[int], block_size: tuple[int, int], sees: Callable[[Any, Any], Any]) -> BlockSparse:
        *batch, m, n = shape_of("shape", shape)
        rows, cols = _block_size(block_size)
        m_blocks, n_blocks = -(-m // rows), -(-n // cols)
        shorter = min(m_blocks, n_blocks)
        i = np.arange(m_blocks)[:, None] * shorter // max(m_blocks, 1)
        j = np.arange(n_blocks) * shorter // max(n_blocks, 1)
        return cls(np.broadcast_to(sees(i, j), (*batch, m_blocks, n_blocks)).copy(), (rows, cols))

    def _grids(self) -> tuple[Grid, ...]:
        return (Grid(cast(Any, self.blocks).view(np.uint8), *self.block_size),)

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        rows, cols = self.block_size
        return (Held("blocks", self.blocks, (-(-seqlen_q // rows), -(-seqlen_k // cols))),)

    def _transposed(self, seqlen_q: int, seqlen_k: int, frame: Any = None) -> BlockSparse:
        rows, cols = self.block_size
        return BlockSparse(np.swapaxes(cast(Any, self.blocks), -2, -1), (cols, rows))

    def _cropped(self, crop: Crop) -> BlockSparse:
        """A mask of blocks so small that the crop begins with one."""
        for held in self._held(crop.seqlen_q, crop.seqlen_k):
            if self.blocks.shape[-2:] != held.shape:
                raise ValueError(f"mask: BlockSparse blocks: got the shape {self.blocks.shape}, expected (..., "
                                 f"{held.shape[0]}, {held.shape[1]}), the blocks of all ranks")
        rows, cols = (math.gcd(*x) for x in zip(self.block_size, (crop.first_query, crop.first_key)))
        row = (crop.first_query + rows * np.arange(-(-crop.queries // rows), like=cast(Any, self.blocks)))
        col = (crop.first_key + cols * np.arange(-(-crop.keys // cols), like=cast(Any, self.blocks)))
        height, width = self.block_size
        return BlockSparse(self.blocks[..., row[:, None] // height, col // width], (rows, cols))

    def _may_show(self, seqlen_q: int, seqlen_k: int) -> bool:
        return not isinstance(self.blocks, np.ndarray) or bool(self.blocks.any())


def _counts(counts: Any, indices: Any) -> Any:
    """How many indices of each row count, or None."""
    *rows, k = indices.shape
    name = "BlockSparse.from_indices counts"
    if counts is None:
        return None
    counts = own(name, integers(name, counts))
    if isinstance(counts, int):
        return np.full_like(indices, integer(name, counts, low=0, high=k), np.int32, shape=math.prod(rows))
    if not broadcasts(counts.shape, tuple(rows)):
        raise ValueError(f"{name}: got the shape {counts.shape}, which does not broadcast to {tuple(rows)}")
    if isinstance(counts, np.ndarray):
        check_values(name, counts, largest=k)
    return np.broadcast_to(moved(counts, indices), tuple(rows)).reshape(math.prod(rows))


def _chosen(indices: Any, counts: Any, n_blocks: int) -> Any:
    """Which blocks each row of the indices names, (rows, n_blocks). NumPy arrays, which are checked."""
    rows, k = indices.shape
    is_given = np.ones((rows, k), np.bool_) if counts is None else np.arange(k) < counts[:, None]
    wrong = indices[is_given & ((indices < -1) | (indices >= n_blocks))]
    if wrong.size:
        raise ValueError(f"BlockSparse.from_indices indices: got {wrong[0]}, allowed -1 to {n_blocks - 1}")
    blocks = np.zeros((rows, n_blocks), np.bool_)
    row, place = np.nonzero(is_given & (indices >= 0))
    blocks[row, indices[row, place].astype(np.int64)] = True
    return blocks


def _block_size(block_size: Any) -> tuple[int, int]:
    try:
        rows, cols = block_size
    except (TypeError, ValueError):
        raise TypeError(f"block_size: got {words_for(block_size)}, expected two integers (rows, columns)") from None
    return integer("block_size", rows, low=1), integer("block_size", cols, low=1)
