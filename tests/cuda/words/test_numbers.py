import math

import numbattn as na
from numbattn.base.origin import Origin
from numbattn.cuda.words.numbers import NUMBERS, MaskNumbers, numbers_of


def numbers(dropout=None):
    found = numbers_of(MaskNumbers(*range(8)), dropout, Origin(query=20, key=21, heads=24), 0.25)
    return dict(zip(NUMBERS, found, strict=True))


def test_each_has_its_value():
    found = numbers()
    assert [found[name] for name in ("hi", "own_hi", "threshold", "first_key", "heads_in_all")] == [1, 7, 0, 21, 24]
    assert (found["scale"], found["scale_log2"], found["inverse_scale"]) == (0.25, 0.25 * math.log2(math.e), 4)
    assert (found["kept_scale"], found["ds_scale"], found["delta_scale"]) == (1, 0.25, 2)


def test_dropout():
    found = numbers(na.Dropout(0.75, seed=(2 << 32) + 1, offset=3))
    assert [found[name] for name in ("threshold", "offset", "key_low", "key_high")] == [3 << 14, 3, 1, 2]
    assert (found["kept_scale"], found["ds_scale"], found["delta_scale"]) == (4, 0.5, 0.5)


FAULTS = {
    "factors(scale, dropout.scale, 2)": "factors(scale, dropout.scale)",
    "2 / kept_scale, 1 / scale": "1 / scale, 2 / kept_scale",
    "*mask, *dropout._numbers": "*mask, *dropout._numbers[::-1]",
}
