"""A Rotary: what it takes, when two are equal, copies."""

import copy
import pickle

import numpy as np
import pytest

import numbattn as na

LINEAR = {"rope_type": "linear", "factor": 2}


def test_equal_by_their_numbers():
    one = na.Rotary(500, 64, True, LINEAR)
    assert one == na.Rotary(500.0, dims=np.int64(64), interleaved=np.True_, scaling=dict(LINEAR))
    assert len({one, na.Rotary(500.0, 64, True, one.scaling), na.Rotary(500.0, 64, True)}) == 2
    assert one != na.Rotary(500.0, 64, False, LINEAR)
    scaling = dict(LINEAR)
    held = na.Rotary(scaling=scaling)
    scaling["factor"] = 3
    assert held == na.Rotary(scaling=LINEAR)


def test_equal_ones_share_what_is_known():
    """So that whoever makes one a call waits once for its numbers on a GPU."""
    assert na.Rotary(500.0)._known is na.Rotary(500)._known is not na.Rotary(500, dims=8)._known


def test_copies_and_what_is_shown():
    one = na.Rotary(500.0, 64, scaling=LINEAR)
    one._turns(64)
    for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one)), eval(f"na.{one!r}")):
        assert other == one
        assert hash(other) == hash(one)
    assert repr(na.Rotary()) == "Rotary(base=10000.0, interleaved=False)"


@pytest.mark.parametrize(("numbers", "error", "words"), [
    ({"base": "big"}, TypeError, "Rotary base: got 'big', expected a number"),
    ({"base": 1}, ValueError, "Rotary base: got 1.0, expected a finite number above 1"),
    ({"base": np.inf}, ValueError, "Rotary base: got inf"),
    ({"dims": 7}, ValueError, "Rotary dims: got 7, expected an even number"),
    ({"dims": 0}, ValueError, "Rotary dims: got 0, allowed 2 or more"),
    ({"dims": 2.0}, TypeError, "Rotary dims: got 2.0, expected an integer"),
    ({"interleaved": 1}, TypeError, "Rotary interleaved: got 1, expected True or False"),
])  # fmt: skip
def test_errors(numbers, error, words):
    with pytest.raises(error, match=words):
        na.Rotary(**numbers)


FAULTS = {
    "return known_of(self)": "return {}",
    "1 < base < math.inf": "1 < base",
    "self.scaling is None else checked(self.scaling)": "True else self.scaling",
}
