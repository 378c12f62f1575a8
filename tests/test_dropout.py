import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import numbattn as na
from numbattn.dropout import philox4x32

# Random123 1.14, tests/kat_vectors, philox4x32 7: counter, key, result
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
]


def words(text):
    return [np.uint64(int(word, 16)) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(counter, key, result):
    assert philox4x32(*words(counter), *words(key)) == tuple(words(result))


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers_of_arrays(counter, key, result):
    got = philox4x32(*(np.full(3, word) for word in words(counter)), *words(key))
    np.testing.assert_array_equal(got, np.repeat(words(result), 3).reshape(4, 3))


def test_dropout_mask_is_the_documented_map():
    """Element by element, from the definition."""
    dropout = na.Dropout(0.37, seed=0xFEDCBA9876543210, offset=77)
    mask = na.dropout_mask(dropout, (2, 3, 40, 50))
    for b, i, j in np.random.default_rng(0).integers((6, 40, 50), size=(300, 3)):
        counter = (4 * (j // 16) + (j // 2) % 4, 8 * (i // 16) + i % 8, b, 77)
        drawn = philox4x32(*map(np.uint64, counter), np.uint64(0x76543210), np.uint64(0xFEDCBA98))
        halves = [(int(word) >> shift) & 0xFFFF for word in drawn for shift in (0, 16)]
        number = halves[4 * ((i // 8) % 2) + 2 * ((j // 8) % 2) + j % 2]
        assert mask[b // 3, b % 3, i, j] == (number >= round(65536 * 0.37))


@given(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 40)))
def test_a_larger_mask_holds_the_smaller(shape):
    dropout = na.Dropout(0.5, seed=3)
    larger = na.dropout_mask(dropout, (4, 50, 50))
    np.testing.assert_array_equal(na.dropout_mask(dropout, shape), larger[tuple(map(slice, shape))])


@pytest.mark.parametrize("p", [0, 1 / 65536, 0.1, 0.5, 0.999, 65535 / 65536])
def test_fraction_kept_and_scale(p):
    dropout = na.Dropout(p, seed=4)
    n = 2048
    kept = na.dropout_mask(dropout, (n, n)).mean()
    exact = 1 - round(65536 * p) / 65536
    assert abs(kept - exact) <= 5 * np.sqrt(exact * (1 - exact)) / n
    assert dropout.scale * exact == pytest.approx(1, rel=1e-15)


def test_seed_offset_and_matrix_all_matter():
    masks = [na.dropout_mask(na.Dropout(0.5, *value), (2, 64, 64))
             for value in [(0,), (1,), (2**32,), (0, 1), (0, 2**32 - 1)]]  # fmt: skip
    flat = [matrix for mask in masks for matrix in mask]
    for i, one in enumerate(flat):
        for other in flat[:i]:
            assert 0.4 < (one == other).mean() < 0.6


def test_it_is_a_value():
    assert na.Dropout(0.5, 1) == na.Dropout(0.5, 1, 0)
    assert hash(na.Dropout(0.5, 1)) == hash(na.Dropout(0.5, np.int64(1)))
    assert na.Dropout(0.5, 1) != na.Dropout(0.5, 1, 1)


FAULTS = {
    "ROUNDS = 7": "ROUNDS = 6",
    "(k0 + W0) & LOW": "k0 + W0",
    "x_high ^ c3 ^ k1, x_low": "x_low ^ c3 ^ k1, x_high",
    "return round(65536 * self.p)": "return int(65536 * self.p)",
    "65536 / (65536 - self.threshold)": "1 / (1 - self.p)",
    "self.seed & 0xFFFFFFFF, self.seed >> 32": "self.seed >> 32, self.seed & 0xFFFFFFFF",
    "rows + 8 * (w // 2)": "rows + 8 * (w % 2)",
    "number >= dropout.threshold": "number > dropout.threshold",
    "cpu/test_tile.py::test_draw": {
        "self.threshold, self.offset, *self.key": "self.threshold, *self.key, self.offset",
    },
}
