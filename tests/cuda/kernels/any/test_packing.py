"""Work tiles: each head of each sequence is in one of them."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from numbattn.cuda.kernels.any.packing import packing_steps
from numbattn.cuda.tile import thread_index
from tests.tools.launch import launch


class Call(NamedTuple):
    heads: Any
    group_size: Any


@pytest.mark.parametrize("of_batch", [False, True])
@pytest.mark.parametrize(("batches", "heads", "group_size", "rows", "queries"), [
    (2, 4, 2, 16, 1), (3, 6, 6, 16, 4), (5, 2, 1, 16, 16), (21, 3, 1, 16, 1), (8, 4, 4, 16, 4),
])  # fmt: skip
def test_each_matrix_is_in_one_tile(of_batch, batches, heads, group_size, rows, queries):
    tiles_of_chunk, place_of, _ = packing_steps(rows, queries, of_batch)

    def kernel(heads, group_size, found, count):
        if thread_index() < found.shape[0]:
            batch, head_k, head, end = place_of(thread_index(), Call(heads, group_size))
            found[thread_index(), 0], found[thread_index(), 1] = batch, head_k
            found[thread_index(), 2], found[thread_index(), 3] = head, end
        if thread_index() == 0:
            count[0] = tiles_of_chunk(batches, heads, group_size)

    found, count = np.zeros((70, 4), np.int32), np.zeros(1, np.int32)
    launch(kernel, (1, 1, 1), 96, 0, np.int32(heads), np.int32(group_size), found, count)
    seen = np.zeros((batches, heads), int)
    for batch, head_k, head, end in found[: count[0]]:
        tile = seen[batch:end, head] if of_batch else seen[batch, head:end]
        assert 0 < tile.size <= rows // queries
        assert head_k == head // group_size
        tile += 1
    assert (seen == 1).all()


FAULTS = {
    (
        "cuda/kernels/any/test_packing.py",
        "cuda/kernels/any/test_decode.py::test_keys_that_all_sequences_share",
        "cuda/kernels/any/test_decode.py::test_sequences_that_differ_share_no_tile",
    ): {
        "minimum(head + COUNT, (head_k + 1) * call.group_size)": "head + COUNT",
        "head, (part + 1) * COUNT": "head, part * COUNT + 1",
        "head // call.group_size, head": "head, head",
        "heads * ((batches + COUNT - 1) // COUNT)": "heads * (batches // COUNT)",
        "if alone and not shares_keys(work)": "if alone",
        "work.mask or problem.dropout": "problem.dropout",
        "or problem.cache or differs_by_head(work.score)": "or problem.cache",
        "problem.sharers > problem.group_size": "problem.sharers > 1",
    },
}
