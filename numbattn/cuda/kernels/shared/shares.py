"""Shares of the score matrices that an array of a score is broadcast to: who adds up which."""

from typing import Any, NamedTuple

from ...tile import device, minimum


class MatrixShare(NamedTuple):
    """Part number `part` of the score matrices that a matrix of an array is broadcast to: [first, end) of these."""

    own_batch: Any
    own_head: Any
    part: Any
    heads: Any  # of a batch, to which it is broadcast
    first: Any
    end: Any


@device
def share_of(number, parts, own_batches, own_heads, batches, heads):
    """Share number `number` of all matrices of an array."""
    matrix, part = number // parts, number % parts
    own_batch, own_head = matrix // own_heads, matrix % own_heads
    served_heads = 1 if own_heads > 1 else heads
    count = served_heads if own_batches > 1 else batches * served_heads
    size = (count + parts - 1) // parts
    return MatrixShare(own_batch, own_head, part, served_heads, part * size, minimum((part + 1) * size, count))


@device
def score_matrix(share, number):
    """The batch and the head of score matrix number `number`."""
    return share.own_batch + number // share.heads, share.own_head + number % share.heads
