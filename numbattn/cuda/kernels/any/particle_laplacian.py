"""The Laplacian of attention on any GPU by the coordinates of particles, each of which moves its own rows alone; the
equations are in `numbattn.cpu.particle_laplacian`.

All of jO is written, (particles x coordinates, ..., queries, features): that bounds it. A block keeps a tile of queries
and loops, coordinate by coordinate, over tiles of keys, which lie in the order of their particles. It computes P B of a
tile as matrices on CUDA cores; then jO of each particle from the rows of its keys, in registers, and writes it when the
particle has no more keys. What all keys add to jO of a query's own particle is added to what has been written.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ...build import Source
from ...compiler import types
from ...tile import (
    INDEX,
    Alignment,
    SharedMemory,
    aligned,
    allocate,
    block_index,
    device,
    dot,
    full,
    gather,
    get,
    index,
    line,
    load,
    maximum,
    minimum,
    opaque,
    part_sum,
    put,
    row_index,
    row_sum,
    save,
    scatter,
    shape,
    sync_threads,
    wait_copies,
    where,
)
from ...words.arguments import Argument, Matrices, Matrix, Statistic
from ...words.numbers import LOG2_E
from ...words.signatures import array_type, signature_of
from ...words.spec import Spec
from ..scores import SCORE, score_steps
from ..shared.layouts import DTYPES, left_operand, product_step, sum_type, sums, vector
from ..shared.recompute import low_steps
from ..shared.schedule import place
from ..shared.softmax import log2_step
from ..shared.visibility import MASK, band_of, element_test, needs_test, steps_to_next, visible_keys
from ..tables import FMA, Tiles, parameters, rows_of
from .tangent import with_tangent

OWNERS, TANGENTS = ("owners of queries", "owners of keys", "starts of owners"), ("tq", "tk", "tv")
NOBODY = -1  # the owner of rows that do not move


class Owners(NamedTuple):
    """Whose the rows are, and where jO along their coordinates is."""

    queries: Any  # the particle of each query, or NOBODY
    keys: Any
    starts: Any  # particle p has the keys [starts[p], starts[p + 1])
    jO: Any  # (particles x coordinates x batch x heads x queries, features)
    first: Any  # element of the batch
    coordinates: Any  # of a particle
    rows: Any  # of jO along one coordinate


class OwnersArgument(Argument):
    """The Owners of a call; their arrays are the OWNERS, and "to"."""

    def flat(self, planner, work):
        yield from (planner.whole(name) for name in (*OWNERS, "to"))
        coordinates = next(x.shape[-3] for name in TANGENTS if (x := planner.layouts.get(name)))
        yield from ("first", coordinates, math.prod(work.problem.lse_shape))

    def type(self, about):
        return types.NamedTuple([*[array_type(np.int32, 1)] * 3, array_type(about.dtype, 2), *[INDEX] * 3], Owners)


def particle_laplacian(*, dtype, head_dim, head_dim_v, tiles, tangents, mask, score, dropout, nbytes):
    """The kernel for these Tiles and head_dims rounded up to head_dim and head_dim_v. tangents: which of "q", "k" and
    "v" have one; nbytes: alignment of rows."""
    dtype, ACC, (_, tile_m, tile_n, threads, *_) = DTYPES[dtype], sum_type(DTYPES[dtype]), tiles
    HAS_TQ, HAS_TK, HAS_TV = (name in tangents for name in "qkv")
    shared = SharedMemory()
    S_TILE, product = product_step(tiles, tile_m, tile_n, shared, ACC)
    O_TILE = sums(tiles, tile_m, head_dim_v, run=vector(dtype))
    SHARED_Q, SHARED_TQ, fetch_q = with_tangent(shared, dtype, threads, tile_m, head_dim, HAS_TQ)
    SHARED_K, SHARED_TK, fetch_k = with_tangent(shared, dtype, threads, tile_n, head_dim, HAS_TK)
    SHARED_V, SHARED_TV, fetch_v = with_tangent(shared, dtype, threads, tile_n, head_dim_v, HAS_TV)
    SHARED_P, SHARED_PB = (shared.tile(tile_n, tile_m, ACC) for _ in range(2))  # transposed
    left_a, left_w, left_v = (left_operand(S_TILE, shared, ACC) for _ in range(3))
    TILE_M, TILE_N, ROWS_OF, LOG2E = tile_m, tile_n, Alignment(nbytes), ACC(LOG2_E)
    ROWS, COLUMNS, PARTS, O_ROWS, O_COLUMNS = (S_TILE.row_vector(), S_TILE.col_vector(), S_TILE.row_parts(),
                                               O_TILE.row_vector(), O_TILE.col_vector())  # fmt: skip
    ZERO, TWO, END, BENDS = ACC(0), ACC(2), 2**31 - 1, HAS_TQ or HAS_TK
    band_at, sees, tested, steps = band_of(mask), element_test(mask, S_TILE), needs_test(mask), steps_to_next(mask)
    apply, *_ = score_steps(score, S_TILE, ACC, after=len(score))
    (_, recompute, _), to_log2 = low_steps(dtype), log2_step(ACC)

    @device
    def move(so_far, O, owners, row0, queries, n0, n_end):
        """Write jO of the particles whose keys end before n_end; keys from n0 on are in shared memory. so_far: the next
        particle, its first key, jO + b O and b, sums over its keys so far, and O2. row0: of jO, that of the first of
        these queries along the coordinate of particle 0."""
        p, start, jO, b, O2 = so_far
        sP, sPB, sV, stV = allocate(SHARED_P), allocate(SHARED_PB), allocate(SHARED_V), allocate(SHARED_TV)
        _, _, starts, to, _, coordinates, rows = owners
        count, is_whole = shape(starts)[0] - 1, True
        while is_whole and p < count:
            stop = starts[p + 1]
            for key in range(maximum(start, n0), minimum(stop, n_end)):
                j = key - n0
                if HAS_TK:
                    PB = get(line(sPB, j).T, O_ROWS)
                    jO, b = jO + PB * get(line(sV, j), O_COLUMNS), b + PB
                if HAS_TV:
                    jO = jO + get(line(sP, j).T, O_ROWS) * get(line(stV, j), O_COLUMNS)
            is_whole = stop <= n_end
            if is_whole:
                jO = jO - b * O
                O2 = O2 - jO * (b * TWO)                        # - 2 jlse jO, without what p's own queries add
                at = p * coordinates * rows + row0
                save(aligned(to[at : at + queries], ROWS_OF), jO, 0)
                p, start, jO, b = p + 1, stop, full(O_TILE, ZERO), full(O_ROWS, ZERO)
        return p, start, jO, b, O2

    def kernel(mQ, mK, mV, mTQ, mTK, mTV, mO, mLse, mLow, mO2, owners, mask, scores, group_size, scale, scale_log2):
        batches, heads, seqlen_q = shape(mLse)
        m_block, batch, head = place(block_index(), batches * heads, heads)
        m0 = m_block * TILE_M
        queries = minimum(seqlen_q - m0, TILE_M)
        band, head_k = band_at(mask, batch, head), head // group_size
        first, end = visible_keys(band, m0, m0 + queries)
        seen_q, seen_k = maximum(band[2], 1), maximum(band[3], 1)   # rows beyond a sequence's length may be NaN
        tQ = Q = aligned(mQ[batch, head][:seen_q], ROWS_OF)
        tK = K = aligned(mK[batch, head_k][:seen_k], ROWS_OF)
        tV = V = aligned(mV[batch, head_k][:seen_k], ROWS_OF)
        to = aligned(owners.jO, ROWS_OF)
        lse, low = to_log2(load(mLse[batch, head], ROWS, m0)), load(mLow[batch, head], ROWS, m0) * LOG2E
        O, O2, w = load(aligned(mO[batch, head], ROWS_OF), O_TILE, m0), full(O_TILE, ZERO), full(PARTS, ZERO)
        i = row_index(O_ROWS, m0)
        for c in range(owners.coordinates):
            batch, head = opaque(batch), opaque(head)           # else addresses are kept in registers
            if HAS_TQ:
                tQ = aligned(mTQ[0][batch, head, c][:seen_q], ROWS_OF)
            if HAS_TK:
                tK = aligned(mTK[0][batch, head_k, c][:seen_k], ROWS_OF)
            if HAS_TV:
                tV = aligned(mTV[0][batch, head_k, c][:seen_k], ROWS_OF)
            own, a, own_b = full(O_TILE, ZERO), full(PARTS, ZERO), full(PARTS, ZERO)
            row0 = c * owners.rows + ((owners.first + batch) * heads + head) * seqlen_q
            p, start, jO, b = index(0), owners.starts[0], full(O_TILE, ZERO), full(O_ROWS, ZERO)
            n_block, n_blocks = first // TILE_N, (end + TILE_N - 1) // TILE_N
            n_block += steps(mask, batch, head, m_block, n_block, n_blocks - n_block)
            fetch_q(Q, tQ, m0)
            while n_block < n_blocks:
                n0 = n_block * TILE_N
                fetch_k(K, tK, n0)
                fetch_v(V, tV, n0)
                wait_copies()
                sync_threads()                                  # K and V have arrived
                sQ, stQ, sK, stK = allocate(SHARED_Q), allocate(SHARED_TQ), allocate(SHARED_K), allocate(SHARED_TK)
                S, _ = apply(product(sQ, sK), scores, batch, head, m0, n0)
                P = recompute(S, lse, low, scale_log2)          # Alg. 4 line 13: P = exp(S - lse)
                if tested(mask, band, batch, head, m_block, n_block, m0, m0 + TILE_M, n0, n0 + TILE_N):
                    P = where(sees(mask, band, batch, head, m0, n0), P, ZERO)
                same = load(owners.queries, ROWS, m0) == load(owners.keys, COLUMNS, n0)
                PA, PB, W = full(S_TILE, ZERO), full(S_TILE, ZERO), full(S_TILE, ZERO)
                if HAS_TQ:
                    A = product(stQ, sK) * scale
                    PA, W = P * A, P * A * A
                    a = part_sum(PA, a)
                    own = dot(own, left_a(PA), allocate(SHARED_V))
                if HAS_TK:
                    B = product(sQ, stK) * scale
                    PB, W = P * B, W + P * B * B
                if HAS_TQ and HAS_TK:
                    W = W + where(same, (P * product(stQ, stK) * scale + PA * B) * TWO, ZERO)
                    own_b = part_sum(where(same, PB, ZERO), own_b)
                if BENDS:
                    w = part_sum(W, w)
                    O2 = dot(O2, left_w(W), allocate(SHARED_V))
                if BENDS and HAS_TV:
                    O2 = dot(O2, left_v((PB + where(same, PA, ZERO)) * TWO), allocate(SHARED_TV))
                put(allocate(SHARED_P).T, P)
                put(allocate(SHARED_PB).T, PB)
                sync_threads()                                  # P and P B are there
                so_far = p, start, jO, b, O2
                p, start, jO, b, O2 = move(so_far, O, owners, row0 + m0, queries, n0, n0 + TILE_N)
                n_block += 1
                n_block += steps(mask, batch, head, m_block, n_block, n_blocks - n_block)
                sync_threads()                                  # all have read K, V, P and P B
            wait_copies()                                       # for Q, where no key is seen
            _, _, _, _, O2 = move((p, start, jO, b, O2), O, owners, row0 + m0, queries, END, END)
            if HAS_TQ:
                of_i = load(owners.queries, O_ROWS, m0)
                row = of_i * (owners.coordinates * owners.rows) + (i + row0)
                row = where((of_i != NOBODY) & (i < seqlen_q), row, NOBODY)
                a_sum, b_sum = row_sum(a), row_sum(own_b)
                own = own - O * a_sum                           # (P A) V - rowsum(P A) O
                jO = gather(to, O_TILE, row) + own
                scatter(to, jO, row)
                O2 = O2 - (jO * a_sum + own * b_sum) * TWO      # the rest of - 2 jlse jO
        O2 = O2 - O * row_sum(w)
        save(aligned(mO2[batch, head], ROWS_OF), O2, m0)

    given = [f"t{name}" for name in tangents]
    signature = signature_of(kernel, SPEC.arguments, dtype, ACC, {}, mask=mask, score=score, given=given)
    return Source(kernel, signature, threads, tiles.blocks, shared.nbytes)


# Rows as in `tangent_tiles`: several blocks share a multiprocessor, so that some write while others multiply. Faster
# than the dense way by 6, 9, 13, 27 for 16, 32, 64, 128 particles in float32, by 5, 5, 10, 18 in float64 (H200, 4 heads
# of 64); tiles of 32 x 32 take 9 % less for 128 particles in float32, and spill
TILES = {
    (4, 64): (Tiles("fma", 32, 16, 128, 8, blocks=3),),
    (4, 128): (Tiles("fma", 16, 16, 128, 16, blocks=3),),
    (4, 256): (Tiles("fma", 16, 8, 256, 16), Tiles("fma", 8, 8, 128, 16)),
    (8, 64): (Tiles("fma", 16, 8, 128, 8),),
    (8, 128): (Tiles("fma", 16, 8, 256, 32),),
    (8, 256): (Tiles("fma", 8, 8, 256, 32), Tiles("fma", 8, 4, 256, 32)),
    FMA: {
        256: Tiles("fma", 16, 16, 64, 8), 512: Tiles("fma", 16, 8, 128, 8), 1024: Tiles("fma", 8, 8, 128, 16),
        2048: Tiles("fma", 8, 2, 256, 32),
    },
}  # fmt: skip
UNDER_PRESSURE = {(4, size): tuple([row._replace(blocks=1) for row in TILES[4, size]]) for size in (64, 128)}
SHORT = {(16, 4): {64: Tiles("fma", 16, 16, 64, 8, blocks=5)}}

SPEC = Spec(
    particle_laplacian,
    (Matrix("q"), Matrix("k", "k"), Matrix("v", "k"), Matrices("tq", optional=True), Matrices("tk", "k", optional=True),
     Matrices("tv", "k", optional=True), Matrix("o"), Statistic("lse"), Statistic("lse_low"), Matrix("o2"),
     OwnersArgument(), MASK, SCORE, "group_size", "scale", "scale_log2"),
    tiles=lambda work: rows_of(TILES, UNDER_PRESSURE, work, SHORT),
    parameters=lambda work, tiles: {
        **parameters(work, tiles), "tangents": tuple([name for name in "qkv" if f"t{name}" in work.dtypes]),
    },
)  # fmt: skip
