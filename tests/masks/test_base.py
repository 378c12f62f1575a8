"""What all masks share but `&` and `|`: equality, pickles, repr."""

import pickle
import subprocess
import sys

import numpy as np
import pytest

import numbattn as na

from .examples import ARRAY, INTERVALS, KINDS


def test_equality_is_by_value_for_numbers_and_by_identity_for_arrays():
    lengths = np.array([1, 2])
    same = [(na.Causal(), na.Causal()), (na.Window(1, 2), na.Window(1, np.int64(2))),
            (na.Causal() & na.Window(1, 2), na.Causal() & na.Window(1, 2)), (na.Lengths(lengths), na.Lengths(lengths)),
            (na.Causal() | na.Lengths(lengths), na.Causal() | na.Lengths(lengths))]
    for one, other in same:
        assert one == other
        assert hash(one) == hash(other)
    different = [(na.Causal(), na.Causal(0)), (na.Causal(), na.Window(None, 0)), (na.Lengths(3), na.Lengths(None, 3)),
                 (na.Lengths(lengths), na.Lengths(lengths.copy())), (na.Causal(), None),
                 (na.Causal() | na.Lengths(3), na.Causal() | na.Lengths(4)),
                 (na.Causal() | na.Lengths(3), na.Causal() & na.Lengths(3))]
    for one, other in different:
        assert one != other


def test_equality_of_masks_of_intervals():
    queries = np.array([0, 2])
    assert na.Segments(queries) == na.Segments(queries) != na.Segments(queries.copy())
    assert na.Prefix(3) == na.Prefix(3) != na.Prefix(4)


def test_a_pickled_mask_is_equal_if_it_holds_no_arrays():
    """Whose copies are others."""
    for mask, equal in ((na.Causal() | na.First(3), True), (na.First(ARRAY), False)):
        copy = pickle.loads(pickle.dumps(mask))
        assert (copy == mask) is equal
        np.testing.assert_array_equal(copy.dense(4, 5), mask.dense(4, 5))


def test_a_pickled_mask_hashes_alike_in_every_process():
    """Types and strings hash differently there: what has been cached stays behind."""
    mask = na.Causal() & (na.Window(3, 0) | na.Lengths(4))
    _, saved = na.attention_forward(*np.zeros((3, 6, 4)), mask=mask)
    assert hash(mask) == hash(saved.inputs.mask)
    code = ("import pickle, sys; import numbattn as na; mask, saved = pickle.load(sys.stdin.buffer); "
            "found = na.Causal() & (na.Window(3, 0) | na.Lengths(4)); assert mask in {found}; "
            "from dataclasses import replace; assert saved.problem in {replace(saved.problem)}")  # fmt: skip
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps((mask, saved)), check=True)


def test_masks_do_not_change():
    with pytest.raises(AttributeError):
        na.Causal().offset = 3


@pytest.mark.parametrize(("mask", "text"), [
    (na.Causal(), "Causal()"),
    (na.Causal(offset=0), "Causal(offset=0)"),
    (na.Causal() & na.Window(256, None), "Causal() & Window(256, None)"),
    (na.Causal() & (na.Window(1, 0) | na.Lengths(keys=2)), "Causal() & (Window(1, 0) | Lengths(keys=2))"),
    (na.Causal() & na.Window(1, 2) | na.Lengths(3), "Causal() & Window(1, 2) | Lengths(keys=3)"),
    (na.Lengths(keys=ARRAY), "Lengths(keys=<int64 array (2, 1)>)"),
    (na.Causal() & (na.Window(1, 0) | na.First(2)), "Causal() & (Window(1, 0) | First(n=2))"),
    (na.Segments([0, 2]) & na.Prefix(3), "Segments(queries=<int64 array (2,)>) & Prefix(lengths=3)"),
    (na.Prefix(3, 1), "Prefix(lengths=3, offset=1)"),
    (INTERVALS[4], "Intervals(first=<int64 array (1, 1, 5)>, end=<int64 array (2, 1, 5)>)"),
    (KINDS[5], "BlockSparse(blocks=<bool array (1, 1, 3, 3)>, block_size=(2, 2))"),
])  # fmt: skip
def test_repr(mask, text):
    assert repr(mask) == text


FAULTS = {
    ("masks/test_bands.py", "masks/test_dense.py"): {
        '_larger if side == "lo" else _smaller': '_larger if side == "hi" else _smaller',
        "clip(at, -FAR, FAR) + clip(shift, -FAR, FAR)": "at + shift",
        '"queries": (0, seqlen_q), "keys"': '"queries": (1, seqlen_q), "keys"',
        '"keys": (0, seqlen_k)}.get': '"keys": (1, seqlen_k)}.get',
        "own = (1,) * (len(shape) - x.ndim) + x.shape": "own = x.shape + (1,) * (len(shape) - x.ndim)",
    },
    "masks/test_logic.py::test_beside_the_keys_of_a_cache": {
        "seqlen_k if self._frame is None else self._frame._last_keys(seqlen_q, seqlen_k)": "seqlen_k",
    },
    (
        "masks/test_segments.py::test_segments",
        "masks/test_segments.py::test_alignment_within_segments",
        "masks/test_segments.py::test_batch_axes",
        "masks/test_segments.py::test_cupys_offsets_out_of_range_are_clamped",
        "masks/test_segments.py::test_pack_and_unpack",
        "masks/test_calls.py::test_masks[-segments]",
    ): {
        "reduce(_larger, (clip(interval": "reduce(_smaller, (clip(interval",
    },
    "masks/test_tail.py": {
        "other._may_truncate and other not in self._within": "False",
    },
    "test_errors.py": {
        "if missing < 1 or": "if",
        "count in (missing, missing - 1)": "count in (missing, missing)",
    },
    "base/test_origin.py::test_what_shows_nothing_says_so": {
        "(lo < keys) & (hi > -queries)": "(lo < keys)",
        "(lo <= hi) & (queries > 0) & (keys > 0)": "(lo <= hi) & (queries > 0)",
    },
}
