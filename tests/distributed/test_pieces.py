from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numbattn import distributed as nad
from numbattn.distributed.pieces import ORDERS, UNIT, lengths_of, pieces_of


@settings(deadline=None)
@given(st.integers(0, 3000), st.integers(1, 9), st.sampled_from(ORDERS))
def test_pieces(length, ranks, order):
    """Each token is in one piece; pieces begin at multiples and lie in the rank's part without gaps."""
    pieces = pieces_of(length, ranks, order)
    assert len(pieces) == ranks
    assert sorted(token for own in pieces for piece in own for token in range(*piece[:2])) == list(range(length))
    for own in pieces:
        assert all(piece.first % UNIT == 0 for piece in own)
        assert [piece.row for piece in own] == [sum(before.length for before in own[:n]) for n in range(len(own))]
        assert all(one.end <= other.first for one, other in pairwise(own))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_causal_work_is_equal_in_zigzag(ranks):
    def work(order):
        return [sum(piece.end**2 - piece.first**2 for piece in own) for own in pieces_of(1 << 16, ranks, order)]

    assert max(work("zigzag")) < 1.01 * min(work("zigzag"))
    assert max(work("contiguous")) > 2 * min(work("contiguous"))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 300), st.integers(1, 8), st.sampled_from(ORDERS), st.integers(-3, 2))
def test_split_and_join(length, ranks, order, axis):
    shape = [2, 3, 4]
    shape[axis] = length
    x, ring = np.random.default_rng(0).random(shape), nad.Simulated(ranks, order)
    parts = ring.split(x, axis=axis)
    assert [part.shape[axis] for part in parts] == lengths_of(length, ranks, order)
    for part, own in zip(parts, pieces_of(length, ranks, order)):
        tokens = [token for piece in own for token in range(*piece[:2])]
        np.testing.assert_array_equal(part, np.take(x, tokens, axis=axis))
    np.testing.assert_array_equal(ring.join(parts, axis=axis), x)


def test_errors():
    ring = nad.Simulated(2)
    with pytest.raises(TypeError, match="x: got list"):
        ring.split([1, 2])
    with pytest.raises(ValueError, match="axis: got 2, allowed -2 to 1"):
        ring.split(np.zeros((2, 2)), axis=2)
    with pytest.raises(TypeError, match=r"parts: got .* expected a list of 2, a part for each rank"):
        ring.join([np.zeros((2, 2))])
    with pytest.raises(ValueError, match="order: got 'stripes', allowed 'zigzag' or 'contiguous'"):
        nad.Simulated(2, "stripes")
    with pytest.raises(ValueError, match="ranks: got 0, allowed 1 or more"):
        nad.Simulated(0)


FAULTS = {
    "min(length, UNIT * (number * units // count))": "number * length // count",
    "[bounds[rank], bounds[-1 - rank]]": "[bounds[2 * rank], bounds[2 * rank + 1]]",
    "key=lambda x: x[0]": "key=lambda x: 0",
    "row += end - first": "row += 1",
}
