"""What is packed is what compiled code reads."""

import gc
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
from numba.core.errors import TypingError

import numbattn as na
from numbattn.cpu.compile import Kernel
from numbattn.cpu.forward import forward_kernel
from numbattn.cpu.launch import launch
from numbattn.cpu.record import HOLE, At, Later, Record, data_address


class Pair(NamedTuple):
    x: Any
    number: Any


@Kernel
def add_up(first, end, stop, scratch, out, pair, seed, scale, address):
    """out[0] = all that is read, each element of the array times its own factor."""
    out[0] = scratch[0][0] + 10 * pair.number[1] + scale + seed % np.uint64(7)
    for i in range(pair.x.shape[0]):
        for j in range(pair.x.shape[1]):
            out[0] += (100 * i + j) * pair.x[i, j]
    out[1] = address


def test_what_is_read_is_what_was_packed(rng, monkeypatch):
    """Numbers of all kinds, arrays in tuples, arrays at places in scratch, and holes in their order."""
    x, out, memory = rng.random((3, 4)), np.zeros(2), np.array([0.0, 5.0])
    monkeypatch.setattr("numbattn.cpu.scratch.take", lambda nbytes: memory)
    scratch = Record((At(8, (1,), np.float64),))
    seed, scale = np.uint64(2**64 - 5), 0.25
    want = 5 + 10 * 3 + scale + (2**64 - 5) % 7 + ((100 * np.arange(3)[:, None] + np.arange(4)) * x).sum()
    whole = Record(out, Pair(x, (2, 3)), seed, scale, data_address(x))
    holes = Record(Later((2,), float), Pair(Later((3, 4), float), (2, 3)), seed, scale, HOLE).filled(out, x, x)
    entries = []
    for record in (whole, holes):
        out[:] = 0
        launch(add_up.given(scratch, record), 1, 0, memory.nbytes)
        entries.append(len(add_up.entries))
        assert out.tolist() == [pytest.approx(want), x.ctypes.data]
    assert entries == [1, 1]  # what comes later is of the same type


@Kernel
def add_grouped(first, end, stop, scratch, out, pair: Pair, scale):
    out[0] = scale * (pair.x[0] + pair.number)


def test_a_named_tuple_takes_arguments_of_several_records():
    """As many as it has fields, and those after them are the next arguments'."""
    out = np.zeros(1)
    launch(add_grouped.given(Record(()), Record(out, np.full(1, 3.0)), Record(4, 0.5)), 1, 0, 0)
    assert out[0] == 0.5 * (3 + 4)


@Kernel
def add_if_given(first, end, stop, scratch, out, pair: Pair, scale):
    out[0] = scale
    if pair is not None:
        out[0] += pair.x[0] + pair.number


def test_a_kernel_is_compiled_apart_for_none():
    """In place of a named tuple: what only that has is not compiled."""
    out = np.zeros(1)
    launch(add_if_given.given(Record(()), Record(out), Record(None), Record(0.5)), 1, 0, 0)
    assert out[0] == 0.5
    launch(add_if_given.given(Record(()), Record(out), Record(np.full(1, 3.0), 4), Record(0.5)), 1, 0, 0)
    assert out[0] == 0.5 + 3 + 4
    assert len(add_if_given.entries) == 2
    with pytest.raises(TypingError, match="too many positional arguments"):
        add_grouped.given(Record(()), Record(out, np.full(1, 3.0)), Record(4, 0.5, 1))


def test_other_types_have_code_of_their_own():
    forms = [Record(x).form for x in (np.zeros(2), np.zeros((2, 1)), np.zeros(2, np.float32), (np.zeros(2),), 2, 2.0,
                                      np.uint64(2), Pair(2, 2), (2, 2), ((2,), 2))]  # fmt: skip
    assert len(set(forms)) == len(forms)
    assert Record(np.zeros((2, 3))).form == Record(np.zeros((5, 0))).form == Record(Later((1, 1), np.float64)).form


def test_kernels_take_contiguous_arrays():
    with pytest.raises(ValueError, match="contiguous arrays"):
        Record(np.zeros((3, 4))[:, ::2])


def test_all_holes_are_filled():
    with pytest.raises(ValueError, match="zip"):
        Record(Later((2,), float), HOLE).filled(np.zeros(2))


def test_arrays_live_as_long():
    record, x, y = Record(HOLE), np.zeros(3), np.zeros(3)
    filled, alive = record.filled(x, held=[y]), [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert all(each() is not None for each in alive)
    del filled
    gc.collect()
    assert not any(each() is not None for each in alive)


class Named(np.ndarray):
    """A subclass with attributes."""


@pytest.mark.parametrize("x", [np.zeros((3, 4)), np.zeros((3, 4))[1:, ::-1], np.zeros(()), np.zeros(4).view(Named)],
                         ids=["whole", "view", "no axes", "subclass"])  # fmt: skip
def test_data_address(x):
    assert data_address(x) == x.ctypes.data


# ------------------------------------------------------------------------------------------------------------- calls
def test_arrays_of_masks_and_scores_are_read_anew(rng):
    """What is kept of a call are layouts, not elements: the user may edit in place, or pass others alike."""
    q, k, v, do = rng.standard_normal((4, 2, 30, 8))
    arrays = {"bias": rng.standard_normal((2, 30, 30)), "slopes": rng.random(2), "table": rng.standard_normal((2, 5)),
              "sinks": rng.standard_normal(2), "offset": np.array([0, 3]), "visible": rng.random((2, 30, 30)) < 0.5,
              "lengths": np.array([30, 20]), "segments": np.array([0, 13, 30])}  # fmt: skip

    def results(x):
        score = [na.Bias(x["bias"]), na.Alibi(x["slopes"], offset=x["offset"]), na.RelativeBias(x["table"]),
                 na.Sink(x["sinks"])]  # fmt: skip
        mask = na.Segments(x["segments"]) & na.Lengths(x["lengths"]) & na.Dense(x["visible"])
        o, backprop = na.attention_vjp(q, k, v, mask=mask, score=score)
        grads = backprop(do)
        return o, *grads, *grads.score

    before = results(arrays)
    for x in arrays.values():
        x[...] = rng.permutation(x.ravel()).reshape(x.shape) if x.dtype != int else x - (x > 10)
    arrays["segments"][:] = 0, 17, 30
    after = results(arrays)
    for got, want, old in zip(after, results({name: x.copy() for name, x in arrays.items()}), before):
        np.testing.assert_array_equal(got, want)
        assert not np.array_equal(got, old)


def test_what_is_kept_keeps_no_array_of_a_mask(rng):
    """Nor does a new mask of this kind, where there are no segments, take long."""
    q, visible = rng.standard_normal((2, 30, 8)), rng.random((2, 30, 30)) < 0.5
    alive = weakref.ref(visible)
    _, backprop = na.attention_vjp(q, q, q, mask=na.Dense(visible), score=na.Bias(np.zeros((30, 30))))
    backprop(q)
    del visible, backprop
    gc.collect()
    assert alive() is None


def test_a_call_like_another_packs_nothing_again(rng, monkeypatch):
    """But for the addresses of its own arrays."""
    q, k, v, bias = rng.standard_normal((4, 2, 20, 20))

    def call():
        o, backprop = na.attention_vjp(q, k, v, causal=True, score=na.Bias(bias))
        return o, *backprop(o)

    want, compiled = call(), len(forward_kernel.entries)
    monkeypatch.setattr(Record, "__init__", lambda self, *arguments: pytest.fail("packs a record"))
    for got, x in zip(call(), want):
        np.testing.assert_array_equal(got, x)
    assert len(forward_kernel.entries) == compiled


FAULTS = {
    (
        "test_what_is_read_is_what_was_packed",
        "test_other_types_have_code_of_their_own",
        "test_kernels_take_contiguous_arrays",
        "test_all_holes_are_filled",
        "test_arrays_live_as_long",
    ): {
        "numbers += address, *x.shape, *x.strides": "numbers += address, *x.strides, *x.shape",
        "elif x.flags.c_contiguous:": "else:",
        "itertools.chain(args[1:], itertools.repeat(INT64(0)))": "itertools.repeat(args[1])",
        "builder.bitcast(word, ir.DoubleType()) if kind == types.float64 else word": "word",
        "zip(self.holes, arrays, strict=True)": "zip(self.holes, arrays)",
        "(arrays, held)": "held",
        "self.holes = holes": "self.holes = holes[::-1]",
        "form.append(x.dtype.char + codes[-1])": "form.append(codes[-1])",
    },
    "cpu/compile.py": {
        "cpu/test_record.py::test_a_named_tuple_takes_arguments_of_several_records": {
            "return *found, *kinds": "return tuple(found)",
        },
    },
}
