"""What is added up from step to step is the whole, whatever comes first and last, and is rounded once."""

import numpy as np
import pytest

import numbattn as na
from numbattn.call.problem import describe
from numbattn.distributed.totals import Output, Total
from tests.accuracy import random

ROWS = slice(2, 5), slice(0, 1), slice(3, 7)
EVERY = slice(0, 7)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("rows", [ROWS, (EVERY, *ROWS), (*ROWS, EVERY), (EVERY,), ()], ids=["some", "first", "last",
                                                                                         "one", "none"])  # fmt: skip
@pytest.mark.parametrize("wide", [False, True])
def test_sums(rng, rows, dtype, wide):
    """Of numbers whose sums are exact in any dtype. What is added to has memory of its own from then on."""
    total, want, last = Total(np.empty((2, 7, 3), dtype)), np.zeros((2, 7, 3)), None
    for some in rows:
        part = rng.integers(-9, 9, want[..., some, :].shape).astype(total.dtype)
        want[..., some, :] += part
        total.add(some, part)
        if last is not None:
            last[...] = 99  # its memory is free
        last = part if some != rows[0] else None
    found = total.result(total.dtype if wide else np.dtype(dtype))
    assert found.dtype == (total.dtype if wide else dtype)
    np.testing.assert_array_equal(found, want)


def test_what_has_all_rows_is_taken_as_it_is(rng):
    part = rng.standard_normal((7, 3))
    total = Total(part)
    total.add(EVERY, part)
    assert total.result(part.dtype) is part


def test_what_comes_last_is_added_before_it_is_rounded():
    """1 + 1/2048 is no float16, 1 + 2/2048 is: each alone would be lost."""
    total = Total(np.empty((1, 1), np.float16))
    for value in (1, 1 / 2048, 1 / 2048):
        total.add(slice(0, 1), np.full((1, 1), value, np.float32))
    assert total.result(np.dtype(np.float16)) == 1 + 2 / 2048


# ------------------------------------------------------------------------------------------------------------ attention
STEPS = {  # queries, keys
    "all rows first": [(EVERY, slice(0, 4)), (slice(2, 5), slice(4, 6)), (EVERY, slice(6, 9))],
    "some rows": [(slice(2, 5), slice(0, 4)), (slice(4, 7), slice(4, 6))],
    "one": [(EVERY, slice(0, 9))],
    "none": [],
}


@pytest.mark.parametrize("sink", [None, na.Sink(0.5)], ids=["", "sink"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", STEPS)
def test_attention_over_some_keys_after_others(rng, name, dtype, sink):
    """As over all of them at once; the last call rounds, where its results are not of the dtype of sums."""
    q, k, v = (random(rng, (2, n, 8), dtype) for n in (7, 9, 9))
    whole, _ = describe(q, k, v)
    output, seen = Output(whole, q), np.zeros((7, 9), bool)
    for number, (rows, keys) in enumerate(STEPS[name], 1):
        seen[rows, keys] = True
        wide = sink is not None or number < len(STEPS[name])
        output.attend(rows, *describe(q[:, rows], k[:, keys], v[:, keys], wide=wide))
    output.add_sink(sink)
    found = output.result(np.dtype(dtype))
    o, saved = na.attention_forward(q, k, v, mask=seen, score=sink)
    tolerance = {"rtol": 8 * np.finfo(dtype).eps, "atol": 8 * np.finfo(dtype).eps}
    assert found.dtype == dtype
    np.testing.assert_allclose(found, o, **tolerance)
    if STEPS[name]:
        np.testing.assert_allclose(output.lse, saved.lse, **tolerance)


FAULTS = {
    "self.sum is None and part": "part",
    "        lse[...] = -math.inf": "        pass",
    "np.where(lse == -math.inf, lse, sink._like(o)._logits(lse))": "sink._like(o)._logits(lse)",
    "slice(rows.stop, self.shape[-2])": "slice(0, 0)",
    "slice(0, rows.start)": "slice(0, 0)",
    "        self.settle()\n        if self.sum": "        if self.sum",
    "            self.settle()\n            return": "            return",
    "or problem.out_shape != self.shape": "",
    "            self.rounded, out = (o, rows), o[..., rows, :]": "            out = o[..., rows, :]",
    "super().result(dtype) if self.rounded is None": "self.rounded[0] if self.rounded",
    "            self._write(out[..., rows, :], rows, part)": "            pass",
    "out, self.whole[..., rows, :], *part": "out, *part",
    "            self._take(*part)\n        else": "            self._take(*map(np.copy, part))\n        else",
}
