"""Calls of a rank with the keys of another one, together, show what the mask shows."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import numbattn as na
from numbattn.distributed.blocks import hop_of
from numbattn.distributed.pieces import ORDERS, pieces_of
from numbattn.masks import All, as_mask

numbers = st.one_of(st.integers(-300, 300), st.sampled_from([-64, -1, 0, 1, 64]))
windows = st.tuples(st.none() | numbers, st.none() | numbers).filter(lambda ends: None in ends or sum(ends) >= 0)
bands = st.one_of(
    st.just(All()), st.builds(na.Causal, st.one_of(st.none(), numbers)), st.builds(na.Prefix, st.integers(0, 300)),
    windows.map(lambda ends: na.Window(*ends)),
    st.builds(na.Lengths, keys=st.integers(0, 300), queries=st.integers(0, 300)),
    st.builds(na.First, st.integers(0, 300)),
)  # fmt: skip


def tokens(pieces):
    return np.array([token for piece in pieces for token in range(piece.first, piece.end)], int)


@settings(deadline=None, max_examples=150)
@given(bands, bands, *[st.integers(1, 250)] * 2, st.booleans(), st.integers(1, 4), st.sampled_from(ORDERS),
       st.booleans(), st.data())  # fmt: skip
def test_blocks_show_what_the_mask_shows(one, other, m, n, square, ranks, order, joins, data):
    n, mask = m if square else n, as_mask(one) & other
    rank, source = (data.draw(st.integers(0, ranks - 1)) for _ in "qk")
    queries, keys = pieces_of(m, ranks, order)[rank], pieces_of(n, ranks, order)[source]
    rows, cols = tokens(queries), tokens(keys)
    hop, found = hop_of(mask, queries, keys, (m, n), joins), np.zeros((len(rows), len(cols)), int)
    for block in hop.blocks:
        assert hop.keys.start <= block.keys.start
        assert block.keys.stop <= hop.keys.stop
        part = found[block.queries, block.keys]
        part += block.mask.dense(*part.shape)
    np.testing.assert_array_equal(found, mask.dense(m, n)[rows[:, None], cols])


def test_all_is_in_one_block_where_there_is_a_mask_for_it():
    pieces = pieces_of(256, 2, "zigzag")
    for mask, blocks in (
        (All(), [[((0, 128), (0, 128), "All()")] * 2] * 2),
        (na.Causal(), [[((0, 128), (0, 128), "Causal(offset=0)"), ((64, 128), (0, 128), "All()")],
                       [((0, 128), (0, 64), "All()"), ((0, 128), (0, 128), "Causal(offset=0)")]]),
        (na.Lengths(keys=64), [[((0, 128), (0, 64), "All()"), ()]] * 2),
        (na.First(64), [[((0, 128), (0, 64), "All()"), ()]] * 2),
    ):  # fmt: skip
        for rank, of_rank in enumerate(blocks):
            for source, want in enumerate(of_rank):
                hop = hop_of(mask, pieces[rank], pieces[source], (256, 256), True)
                assert [((x.queries.start, x.queries.stop), (x.keys.start, x.keys.stop), repr(x.mask))
                        for x in hop.blocks] == ([want] if want else [])  # fmt: skip
                assert not want or (hop.keys.start, hop.keys.stop) == want[1]


def test_else_each_pair_of_pieces_is_one():
    pieces = pieces_of(256, 2, "zigzag")
    for mask, counts in (
        (na.Window(20, 0), [[2, 1], [1, 3]]), (na.Causal(-10), [[3, 1], [1, 1]]), (na.Prefix(200), [[4, 4], [4, 4]]),
    ):  # fmt: skip
        found = [[len(hop_of(mask, queries, keys, (256, 256), True).blocks) for keys in pieces] for queries in pieces]
        assert found == counts


FAULTS = {
    "block for block in blocks if block.may_show": "block for block in blocks",
    "is_band and lo <= 1 - m": "is_band",
    "and (queries, keys) == (m, n)": "",
    "return self.clipped(hi) if is_band and": "return self.clipped(hi) if",
    "- (block.keys.start - of_k.start) for": "for",
    "block.clipped(offset + place)": "block.clipped(offset)",
    "if offset >= of_k.stop - of_k.start - 1": "if offset >= 0",
    "_joined(blocks, of_q, of_k) if joins else None": "None",
}
