"""Diagonals of tiles, along which the gradient of a function of j - i is summed."""

from typing import Any, NamedTuple

from ...tile import device, load, maximum, minimum, row_sum, save, simt
from .shares import share_of


class Diagonal(NamedTuple):
    """A diagonal of tiles in the score matrices of a Share: the queries of tile m_block, m_first <= m_block < m_end,
    and the keys from n_first + tile_m * (m_block - m_first) on."""

    number: Any
    share: Any
    m_first: Any
    m_end: Any
    n_first: Any


def diagonal_steps(tile_m, tile_n, threads):
    """Device functions: how many diagonals of tiles a score matrix has; number `item` of the diagonals of all shares;
    and sums along the diagonals of a tile, the columns of `plain`, where its rows are shifted.

    Diagonals of tiles overlap: each has tile_m + tile_n of elements, and the next one starts tile_n later. So its sums
    go to several rows, tile_n to each, where all lie in the order of diagonals; the rows are added up in the end.
    """
    TILE_M, TILE_N, PER_TILE = tile_m, tile_n, tile_m // tile_n
    DIAGONALS = simt(tile_n, tile_m, threads, threads // tile_n, 1)
    ALONG = DIAGONALS.row_vector()

    @device
    def sizes(seqlen_q, seqlen_k):
        """The number of tiles along either axis, and of diagonals that start below the first tile."""
        m_blocks, n_blocks = (seqlen_q + TILE_M - 1) // TILE_M, (seqlen_k + TILE_N - 1) // TILE_N
        return m_blocks, n_blocks, PER_TILE * (m_blocks - 1)

    @device
    def count(seqlen_q, seqlen_k):
        _, n_blocks, before = sizes(seqlen_q, seqlen_k)
        return before + n_blocks

    @device
    def diagonal_of(item, seqlen_q, seqlen_k, parts, own_batches, own_heads, batches, heads):
        m_blocks, n_blocks, before = sizes(seqlen_q, seqlen_k)
        diagonals = before + n_blocks
        number, share = item % diagonals, share_of(item // diagonals, parts, own_batches, own_heads, batches, heads)
        m_first = maximum(before - number + PER_TILE - 1, 0) // PER_TILE
        m_end = minimum((before - number + n_blocks + PER_TILE - 1) // PER_TILE, m_blocks)
        n_first = (number + PER_TILE * m_first - before) * TILE_N
        return Diagonal(number, share, m_first, m_end, n_first)

    @device
    def sum_along(target, number, plain, adds):
        """Those of diagonal of tiles `number`; target: the rows."""
        for row in range(PER_TILE + 1):
            line = target[row][(number + row) * TILE_N :]
            sums = row_sum(load(plain.T, DIAGONALS, row * TILE_N))
            if adds:
                sums = sums + load(line, ALONG, 0)
            save(line, sums, 0)

    return count, diagonal_of, sum_along
