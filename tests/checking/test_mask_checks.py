"""check_mask."""

import numpy as np
import pytest

import numbattn as na
from numbattn.checking import mask_checks


def looks_up(batch, head, i, j, x):
    return x[i, j + head] > batch


def test_reads_are_looked_for_everywhere():
    assert na.check_mask(na.Where(looks_up, [np.zeros((900, 602))]), 900, 600, heads=3, batch=2) == 0
    with pytest.raises(ValueError, match=r"outside of its arrays, of shapes .* at batch = 0, head = 2, i = 0, j = 599"):
        na.check_mask(na.Where(looks_up, [np.zeros((900, 601))]), 900, 600, heads=3, batch=2)


WRONG = {
    "no function": (lambda: na.check_mask(na.Causal()), TypeError, r"Causal\(\), expected a numbattn.Where"),
    "zero divided by": (lambda: na.check_mask(na.Where(lambda batch, head, i, j: 1 / (i - j) > 0)), ValueError,
                        "raises ZeroDivisionError in Python"),
    "too large": (lambda: na.check_mask(na.Where(lambda batch, head, i, j: 2**62 * i > j), 16, 16), ValueError,
                  "compiled gives .*, in Python .*, at batch = 0, head = 0, i = "),
    "a number": (lambda: na.check_mask(na.Where(lambda batch, head, i, j: i)), TypeError, "something else than True"),
    "no heads": (lambda: na.check_mask(na.Where(lambda batch, head, i, j: True), heads=0), ValueError, "heads: got 0"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), WRONG.values(), ids=WRONG)
def test_errors(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_what_a_gpu_computes_is_compared(monkeypatch):
    monkeypatch.setattr(mask_checks, "cupy_if_any", lambda: np)      # the CPU instead
    mask = na.Where(lambda batch, head, i, j, x: x[j] > head, [np.arange(9, dtype=np.uint8)])
    na.check_mask(mask, 5, 9, heads=3)
    monkeypatch.setattr(mask_checks, "visible", lambda mask, m, n, near: np.zeros((1, 1, m, n), bool))
    with pytest.raises(ValueError, match=r"on the GPU gives False, in Python True, at .* head = 0, i = 0, j = 1"):
        na.check_mask(mask, 5, 9, heads=3)


@pytest.mark.gpu
def test_on_a_gpu():
    import cupy

    na.check_mask(na.Where(lambda batch, head, i, j, x: x[j] > head, [cupy.arange(9)]), 5, 9, heads=3)
    na.check_mask(na.Where(lambda batch, head, i, j: i * j % 7 < 3 * head), 300, 9, heads=3)


FAULTS = {
    "places, shown.ravel()": "places, shown.ravel()[:0]",
    "if bool(one) != other": "if bool(one) > other",
}
