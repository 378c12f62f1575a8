"""Errors that are numbattn's own say so; all others reach the caller as they are."""

import pickle

import numpy as np
import pytest

import numbattn as na
from numbattn import cpu
from numbattn.base import faults
from numbattn.base.checks import UserTypeError, UserValueError
from numbattn.call.problem import describe
from tests.tools.device import HOPPER, on
from tests.tools.launch import world_of

X = np.zeros((2, 5, 8), np.float32)


def failing(monkeypatch, error, module="numbattn.cpu.forward"):
    """Let the backend raise an error from this module."""
    names = {"__name__": module, "error": error}
    exec("def fail(*args, **options): raise error", names)
    monkeypatch.setattr(cpu, "forward", names["fail"])
    monkeypatch.setattr(cpu, "run", names["fail"])


@pytest.mark.parametrize("error", [
    TypeError("a row of mma 64x32\nis not held by one warp"), KeyError("x"), AttributeError(),
    RuntimeError("CUDA_ERROR"), ValueError("q: whatever it says"),
], ids=repr)  # fmt: skip
def test_a_fault_is_told_with_all_that_repeats_it(monkeypatch, error):
    _, saved = na.attention_forward(X, X, X, causal=True, score=na.Alibi(np.ones(2)), dropout=na.Dropout(0.1, 1))
    failing(monkeypatch, error)
    with pytest.raises(faults.Fault) as raised:
        na.attention_backward(X, saved)
    what, line = str(raised.value).splitlines()
    assert what.startswith(f"this is a fault of numbattn, {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    for part in ("Please report it", na.__version__, "float32", "q (2, 5, 8) (160, 32, 4)", "mask Causal",
                 "score Alibi float64", "dropout"):  # fmt: skip
        assert part in line
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [
    UserTypeError("score: Numba cannot compile f"), UserValueError("table: got an array of device 1"), MemoryError(),
    NotImplementedError("x"), OSError("x"), UserWarning("x"), KeyboardInterrupt(),
], ids=repr)  # fmt: skip
def test_other_errors_are_what_they_are(monkeypatch, error):
    failing(monkeypatch, error)
    with pytest.raises(type(error)) as raised:
        na.attention(X, X, X)
    assert raised.value is error


def test_what_a_plan_refuses():
    q = np.zeros((5, 300), np.float32)
    with world_of("simulated"), on(HOPPER), pytest.raises(UserValueError, match="head_dim: got 300, at most 256"):
        na.attention_jvp(q, q, q, q, None, None)


@pytest.mark.parametrize(("kind", "plain"), [(UserTypeError, TypeError), (UserValueError, ValueError)])
def test_errors_of_users_are_plain_ones_and_can_be_pickled(kind, plain):
    error = pickle.loads(pickle.dumps(kind("q: got 3")))
    assert type(error) is kind
    assert isinstance(error, plain)
    assert str(error) == "q: got 3"


@pytest.mark.parametrize("module", ["__main__", "numba_user", "tests"])
def test_what_a_signal_handler_raises_is_no_fault(monkeypatch, module):
    error = RuntimeError("time is over")
    failing(monkeypatch, error, module)
    with pytest.raises(RuntimeError) as raised:
        na.attention(X, X, X)
    assert raised.value is error


def test_a_gpu_is_named():
    class Backend:
        @staticmethod
        def current():
            return type("GPU", (), {"device": type("Device", (), {"cc": (9, 0)})})

    problem, _ = describe(X, X, X)
    assert "compute capability (9, 0)" in faults.line_of(problem, Backend())


FAULTS = {
    "not isinstance(error, STATED) and ": "",
    "STATED = UserError, ": "STATED = ",
}
