"""Which queries that share keys are the rows of one work tile: those of a group's heads, or those of a head in several
sequences where all have the same keys."""

from ...tile import device, heads_as_rows, minimum
from ..scores import differs_by_head
from ..shared.schedule import split


def packing_steps(rows, queries, of_batch):
    """Device functions for work tiles of so many rows, `queries` for each head, of a group or of_batch: how many
    of them a chunk has; (tile, call), what number `tile` is; (X, work, alignment), its rows of an array."""
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
    """How many of so many rows of a work tile each of its heads has: heads are packed if they see the same keys."""
    few, problem = 1 << (work.problem.seqlen_q - 1).bit_length(), work.problem
    alone = problem.dropout or work.mask_by_head or problem.group_size == 1
    return rows if alone and not shares_keys(work) else few


def shares_keys(work):
    """Whether all sequences see the same keys, such as a prefix of all, and are more than the heads of a group."""
    problem = work.problem
    differ = work.mask or problem.dropout or problem.cache or differs_by_head(work.score)
    return not differ and problem.sharers > problem.group_size
