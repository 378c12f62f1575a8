"""Queries that share keys, packed as the rows of one work tile: those of a group's heads, or those of one head in
several sequences that have the same keys."""

from ...tile import device, heads_as_rows, minimum
from ..scores import differs_by_head
from ..shared.schedule import split


def packing_steps(rows, queries, of_batch):
    """Device functions for work tiles of `rows` rows, `queries` for each of several heads, or with of_batch for each of
    several sequences: (batches, heads, group_size) -> how many work tiles a chunk has; (tile, call) -> the batch, key
    head, first head and end of number `tile`; (X, work, alignment) -> its rows of an array."""
    COUNT, QUERIES = rows // queries, queries

    @device
    def tiles_of_heads(batches, heads, group_size):
        return batches * (heads // group_size) * ((group_size + COUNT - 1) // COUNT)

    @device
    def place_of_heads(tile, call):
        rest, part = split(tile, (call.group_size + COUNT - 1) // COUNT)
        batch, head_k = split(rest, call.heads // call.group_size)
        head = head_k * call.group_size + part * COUNT
        return batch, head_k, head, minimum(head + COUNT, (head_k + 1) * call.group_size)

    @device
    def rows_of_heads(X, work, alignment):
        return heads_as_rows(X[work.batch][work.head : work.end], alignment, QUERIES)

    @device
    def tiles_of_sequences(batches, heads, group_size):
        return heads * ((batches + COUNT - 1) // COUNT)

    @device
    def place_of_sequences(tile, call):
        part, head = split(tile, call.heads)
        return part * COUNT, head // call.group_size, head, (part + 1) * COUNT

    @device
    def rows_of_sequences(X, work, alignment):
        return heads_as_rows(X[work.batch : work.end, work.head], alignment, QUERIES)

    if of_batch:
        return tiles_of_sequences, place_of_sequences, rows_of_sequences
    return tiles_of_heads, place_of_heads, rows_of_heads


def queries_of(work, rows):
    """How many of a work tile's rows each head has: heads are packed if they see the same keys."""
    few, problem = 1 << (work.problem.seqlen_q - 1).bit_length(), work.problem
    alone = problem.dropout or work.mask_by_head or problem.group_size == 1
    return rows if alone and not shares_keys(work) else few


def shares_keys(work):
    """Whether all sequences see the same keys, such as a common prefix, and there are more of them than heads in a
    group."""
    problem = work.problem
    differ = work.mask or problem.dropout or problem.cache or differs_by_head(work.score)
    return not differ and problem.sharers > problem.group_size
