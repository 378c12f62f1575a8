"""Mask functions of the user's own, compiled."""

import numpy as np
import pytest
from numba import types

from numbattn.functions.compiled.truth import check, reads, truth_element
from numbattn.functions.frozen import frozen

TABLE = (types.Array(types.int32, 1, "A"),)


def helped(batch, head, i, j, x):
    return i > j and x[head] > 0


READS = {
    "nothing": (lambda batch, head, i, j, x: True, (False, False)),
    "its array": (lambda batch, head, i, j, x: x[i] > x[j], (False, False)),
    "batch": (lambda batch, head, i, j, x: x[batch] > j, (True, False)),
    "head by a helper": (lambda batch, head, i, j, x: helped(batch, head, i, j, x), (False, True)),
    "both in a branch": (lambda batch, head, i, j, x: head > batch if i > j else False, (True, True)),
    "their sum": (lambda batch, head, i, j, x: batch + head > j, (True, True)),
}


@pytest.mark.parametrize("name", READS)
def test_what_it_reads(name):
    function, expected = READS[name]
    assert reads(frozen(function), TABLE) == expected


def test_integers_of_arrays_are_wide():
    test = truth_element(frozen(lambda batch, head, i, j, x: x[i] - x[j] < 0))
    assert test(0, 0, 0, 1, (np.array([1, 2], np.uint8),))


def test_what_may_fail_is_refused():
    check(frozen(lambda batch, head, i, j, x: x[i] > x[j]), TABLE)
    with pytest.raises(TypeError, match=r"Where function: <lambda>, line .* prints"):
        check(frozen(lambda batch, head, i, j, x: print(i) is None), TABLE)


FAULTS = {
    "works_with(types.int64, UNREAD)": "works_with(UNREAD, UNREAD)",
    "refuse_failing(test": "str(test",
}
