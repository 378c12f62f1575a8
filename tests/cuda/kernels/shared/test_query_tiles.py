"""The tiles of queries that blocks of keys walk over: those that see them, head by head, none of them twice."""

from itertools import product

import numpy as np
import pytest

from numbattn.cuda.kernels.shared.query_tiles import KeyTile, QueryTile, key_lengths, padded_number, queries_steps
from numbattn.cuda.kernels.shared.segments import Segment
from numbattn.cuda.kernels.shared.visibility import MaskArgs
from numbattn.cuda.tile import index, minimum, thread_index
from numbattn.cuda.words.numbers import SIDES
from tests.tools.launch import launch

from ..states import SEQLEN_K, SEQLEN_Q, TILE_M, TILE_N, random_cells, shown, states_of

HEADS, M, N = 2, 20, 24
SEGMENT = Segment(*[np.int32(0)] * len(Segment._fields))


def key_tile(number, keys):
    """Number `number` of both heads, as arguments."""
    first = number * TILE_N
    return KeyTile(*map(np.int32, (0, 0, 0, HEADS, number, first, min(first + TILE_N, keys))), SEGMENT)


def walked(kinds, mask, keys, tile_m=TILE_M, tile_n=TILE_N):
    """For each tile of keys all that is walked over, (head, tile of queries)."""
    first_queries, next_queries, _ = queries_steps(kinds, tile_m, tile_n)
    KEYS = np.int32(tile_n)

    def kernel(mask, segment, keys, out):
        number = index(thread_index())
        if number < out.shape[0]:
            end = minimum((number + 1) * KEYS, keys)
            tile = KeyTile(index(0), index(0), index(0), index(HEADS), number, number * KEYS, end, segment)
            at, step = first_queries(mask, tile), index(0)
            while at.m_block < at.m_blocks and step < out.shape[1]:
                out[number, step, 0], out[number, step, 1] = at.head, at.m_block
                at, step = next_queries(mask, tile, at), step + 1

    out = np.full((-(-keys // tile_n), 200, 2), -1, np.int32)
    launch(kernel, (1, 1, 1), 32, 0, mask, SEGMENT, np.int32(keys), out)
    return [[(head, m_block) for head, m_block in found.tolist() if head >= 0] for found in out]


EDGES = {  # lo, hi, queries and keys, each of two heads
    "window": [(-3, 2), (4, 9), (M, 17), (N, 13)],
    "nothing": [(0, 0), (0, 0), (0, 0), (N, N)],
    "one head": [(-99, -99), (99, 99), (M, 0), (N, N)],
    "last head": [(-99, -1), (-80, 1), (M, M), (N, N)],
}  # fmt: skip


@pytest.mark.parametrize("case", EDGES)
def test_tiles_in_a_band(case):
    arrays = tuple(np.array([edge], np.int32) for edge in EDGES[case])
    mask = MaskArgs(*map(np.int32, (-99, 99, M, N)), arrays, (np.int32(0),) * 2)
    i, j = np.ogrid[:M, :N]
    seen = np.array([(i + lo <= j) & (j <= i + hi) & (i < queries) & (j < keys)
                     for lo, hi, queries, keys in zip(*EDGES[case])])  # fmt: skip
    tiles = [*product(range(HEADS), range(0, M, TILE_M))]
    assert walked(SIDES, mask, N) == [
        [(head, m // TILE_M) for head, m in tiles if seen[head, m : m + TILE_M, n : n + TILE_N].any()]
        for n in range(0, N, TILE_N)
    ]


def test_tiles_that_blocks_show(rng):
    """Runs of empty ones are skipped, to the next head where there is no other. All is turned: see `states_of`."""
    cells = random_cells(rng)
    mask, _ = states_of(cells, "k")
    mask = mask._replace(queries=np.int32(SEQLEN_K), keys=np.int32(SEQLEN_Q))
    some, _ = shown(cells)
    found = walked(("blocks",), mask, SEQLEN_Q, TILE_N, TILE_M)
    assert found == [[*map(tuple, np.argwhere(some[:, n]).tolist())] for n in range(some.shape[1])]


def test_what_lies_within_a_tile_needs_no_test():
    """Of a window; what ends within the tile does."""
    mask = MaskArgs(*map(np.int32, (-9, 9, 18, 24)))
    _, _, needs_mask = queries_steps((), TILE_M, TILE_N)
    tile = key_tile(1, 24)

    def kernel(mask, tile, out):
        m_block = index(thread_index())
        if m_block < out.shape[0]:
            out[m_block] = needs_mask(mask, tile, QueryTile(index(0), m_block, index(5), ()), tile.first)

    out = np.zeros(5, np.int32)
    launch(kernel, (1, 1, 1), 32, 0, mask, tile, out)
    i, j = np.ogrid[: 5 * TILE_M, TILE_N : 2 * TILE_N]
    seen = (abs(i - j) <= 9) & (i < 18)
    assert out.tolist() == [int(not seen[m : m + TILE_M].all()) for m in range(0, 5 * TILE_M, TILE_M)]


@pytest.mark.parametrize(("queries", "keys", "longest"), [
    ((9, 9), (5, 7), 7), ((9, 0), (5, 7), 5), ((0, 0), (5, 7), 0),
])  # fmt: skip
def test_the_longest_keys_of_heads_that_have_queries(queries, keys, longest):
    arrays = tuple(np.array([x], np.int32) for x in (queries, keys))
    mask, longest_of = MaskArgs(*map(np.int32, (-99, 99, 9, 24)), arrays), key_lengths(("queries", "keys"))

    def kernel(mask, tile, out):
        if thread_index() == 0:
            out[0] = longest_of(mask, tile)

    out = np.full(1, -1, np.int32)
    launch(kernel, (1, 1, 1), 32, 0, mask, key_tile(0, 24), out)
    assert out[0] == longest


def test_numbers_of_padded_tiles():
    """A segment's from where its own begin."""
    tile = key_tile(0, 24)._replace(segment=SEGMENT._replace(first_padded_row=np.int32(256)))

    def kernel(tile, out):
        if thread_index() == 0:
            out[0] = padded_number(tile, QueryTile(index(0), index(3), index(9), ()), 64)

    out = np.zeros(1, np.int32)
    launch(kernel, (1, 1, 1), 32, 0, tile, out)
    assert out[0] == 256 // 64 + 3


FAULTS = {
    "m_block, m_blocks = first // TILE_M, (end + TILE_M - 1) // TILE_M": "m_block, m_blocks = 0, end // TILE_M",
    "return queries_from(mask, tile, at.head + 1)": "return queries_from(mask, tile, tile.heads)",
    "            if queries > 0:\n": "            if queries > -1:\n",
    "head < tile.heads and m_block >= m_blocks": "head < tile.heads and m_block > m_blocks",
    "return m_block + steps(mask, tile.batch, head, tile.n_block, m_block, end - m_block), ()": "return m_block, ()",
    "return QueryTile(head - 1, m_block, m_blocks, known)": "return QueryTile(head, m_block, m_blocks, known)",
    "m0, m_end, n0, n0 + KEYS)": "m0, m_end, n0, n0 + 1)",
    "// tile_m + at.m_block": "// tile_m",
    "cuda/kernels/shared/test_segments.py::test_nan_stays_in_its_segment_simulated[simulated-warps]": {
        "opaque(tile.segment.first_padded_row) // tile_m + at.m_block": "at.m_block",
    },
}
