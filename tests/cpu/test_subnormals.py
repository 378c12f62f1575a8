"""Subnormal numbers are 0 in the kernels of the backward pass, and nowhere else."""

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from llvmlite import ir

import numbattn as na
from numbattn.cpu import subnormals
from numbattn.cpu.backward import run
from numbattn.cpu.subnormals import flush_subnormals, restore
from tests.accuracy import check
from tests.tools.blocks import run_blocks

TINY = np.finfo(np.float32).tiny
can_flush = pytest.mark.skipif(subnormals.CONTROL is subnormals.Unknown, reason="no CPU whose setting is known")


def kept(dtype):
    """Whether NumPy keeps a subnormal number as a result, and as an operand."""
    tiny = np.full(8, np.finfo(dtype).tiny)
    return bool((tiny * dtype(0.5)).all()), bool((np.full(8, np.finfo(dtype).smallest_subnormal) * dtype(2**60)).all())


@numba.njit
def flush():
    return flush_subnormals()


@numba.njit
def put_back(before):
    restore(before)


@pytest.fixture
def problem(rng):
    q, k, v, do = rng.standard_normal((4, 1, 2, 50, 8), dtype=np.float32)
    o, saved = na.attention_forward(q, k, v, score=na.Alibi(np.float32([0.1, 0.2])))
    return do, saved


@can_flush
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_flush_and_restore(dtype):
    before = flush()
    inside = kept(dtype)
    put_back(before)
    assert (inside, kept(dtype)) == ((False, False), (True, True))


@can_flush
def test_kernels_flush(problem):
    do, saved = problem
    assert np.abs(na.attention_backward(do, saved).score[0]).all()
    grads = na.attention_backward(do * (TINY / 64), saved)
    assert not any(dx.any() for dx in (*grads, *grads.score))


@can_flush
def test_the_setting_outside_stays(problem):
    """Whatever it is, also where a kernel is told to stop."""
    do, saved = problem
    na.attention_backward(do, saved)
    assert kept(np.float32) == (True, True)
    before = flush()
    na.attention_backward(do, saved)
    inside = kept(np.float32)
    put_back(before)
    assert inside == (False, False)


@can_flush
def test_a_kernel_that_is_told_to_stop_puts_it_back(rng, monkeypatch):
    q, k, v, do = rng.standard_normal((4, 1, 4000, 64))  # takes a second
    _, saved = na.attention_forward(q, k, v)
    dv = na.attention_backward(do, saved).dv
    monkeypatch.setitem(
        run.__globals__, "launch", lambda call, blocks, work, *more: run_blocks(call, 0, blocks, *more, stop_after=0.05)
    )
    assert not np.array_equal(na.attention_backward(do, saved).dv, dv)
    assert kept(np.float32) == (True, True)


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
def test_scales_of_v(rng, scale):
    q, k, v = rng.standard_normal((3, 2, 70, 16), dtype=np.float32)
    check(8 * q, k, v * np.float32(scale), rng, causal=True)


def test_on_arm():
    """Compiled for it, wherever the test runs."""
    module = ir.Module()
    builder = ir.IRBuilder(ir.Function(module, ir.FunctionType(ir.VoidType(), []), "f").append_basic_block())
    before = subnormals.Fpcr.read(builder)
    subnormals.Fpcr.write(builder, builder.or_(before, before.type(subnormals.Fpcr.flush)))
    builder.ret_void()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple("aarch64-linux-gnu").create_target_machine()
    code = machine.emit_assembly(llvm.parse_assembly(str(module)))
    read, changed, written = (code.index(text) for text in ("mrs\tx8, FPCR", "#0x1000000", "msr\tFPCR, x8"))
    assert read < changed < written


FAULTS = {
    "1 << 15 | 1 << 6": "1 << 15",
    "FZ = 1 << 24": "FZ = 1 << 25",
    "builder.or_(before, ": "builder.and_(before, ",
    "test_environments.py::test_from_the_cache_in_use": {
        'TRIPLE.split("-")[0]': '__import__("platform").machine().lower()',
    },
}
