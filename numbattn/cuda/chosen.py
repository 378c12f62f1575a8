"""Masks of blocks from lists of blocks, on a GPU. Nothing waits for it."""

from typing import Any

import numpy as np

from .kernel import kernel_factory, launch
from .tile import block_index, shape, sync_threads, thread_index

THREADS = 128  # of a block, which writes a row


def chosen(indices: Any, counts: Any, n_blocks: int) -> Any:
    """Booleans (rows, n_blocks): the blocks that indices[row] names, by its first counts[row] entries, if there are
    counts.

    Indices out of range are ignored.
    """
    blocks = np.empty((len(indices), n_blocks), np.bool_, like=indices)
    if blocks.size:
        arrays = () if counts is None else (counts,)
        launch(kernel_of(bool(arrays)), (len(blocks), 1, 1), THREADS, 0, blocks.view(np.uint8), indices, arrays)
    return blocks


@kernel_factory
def kernel_of(has_counts):
    HAS_COUNTS = has_counts

    def kernel(blocks, indices, counts):
        row, (_, n_blocks), (_, count) = block_index(), shape(blocks), shape(indices)
        for block in range(thread_index(), n_blocks, THREADS):
            blocks[row, block] = 0
        sync_threads()  # all of the row is 0
        for place in range(thread_index(), count, THREADS):
            block = indices[row, place]
            if 0 <= block < n_blocks and (not HAS_COUNTS or place < counts[0][row]):
                blocks[row, block] = 1

    return kernel
