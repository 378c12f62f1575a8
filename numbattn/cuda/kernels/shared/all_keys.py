"""dQ of a block that has all keys of its heads: no other block adds to it."""

from ...tile import (
    Alignment,
    aligned,
    allocate,
    device,
    dot,
    full,
    index,
    maximum,
    mma,
    put,
    save,
    shape,
    sync_threads,
)
from .query_tiles import KeyTile, key_lengths


def no_dq_steps(*_):
    """In place of `dq_steps`, for blocks that have only some of the keys."""

    @device
    def keys_given(mask, batch, head_k, group_size, end_key):
        return end_key

    @device
    def keep(dS):
        pass

    @device
    def no_dq(to_dq, batch, head, first, last):
        pass

    return keys_given, keep, no_dq, no_dq


def dq_steps(S_TILE, head_dim, threads, shared, mask, nbytes, SHARED_K):
    """Device functions for a block that has all keys of its heads, and so computes all of dQ: the end of the keys that
    any head sees; dS to shared memory; dQ of a tile of queries from there; zeros for tiles that see nothing.
    """
    (tile_n, tile_m), ACC = S_TILE.shape, SHARED_K.dtype.type
    Q_TILE = mma(tile_m, head_dim, threads, max(threads // (2 * tile_m), 1))
    SHARED_DS, TILE_M, ROWS_OF, ZERO = shared.tile(tile_n, tile_m, ACC, 1), tile_m, Alignment(nbytes), ACC(0)
    longest = key_lengths(mask)

    @device
    def keys_seen(mask, batch, head_k, group_size, end_key):
        """How many keys any head sees. Keys after these may be NaN, and 0 * NaN is NaN."""
        head = head_k * group_size
        tile = KeyTile(batch, head_k, head, head + group_size, index(0), index(0), index(0), index(0))
        return maximum(longest(mask, tile), 1)

    @device
    def share(dS):
        put(allocate(SHARED_DS), dS)

    @device
    def save_dq(to_dq, batch, head, m0, scale):
        sync_threads()                                          # dS is there
        dQ = dot(Q_TILE, allocate(SHARED_DS).T, allocate(SHARED_K))
        save(aligned(to_dq[0][batch, head], ROWS_OF), dQ * scale, m0)

    @device
    def save_zeros(to_dq, batch, head, first, end):
        _, _, seqlen_q, _ = shape(to_dq[0])
        for m_block in range((seqlen_q + TILE_M - 1) // TILE_M):
            if m_block < first or m_block >= end:
                save(aligned(to_dq[0][batch, head], ROWS_OF), full(Q_TILE, ZERO), m_block * TILE_M)

    return keys_seen, share, save_dq, save_zeros
