import os
import signal
import threading
import time
from contextvars import ContextVar
from pathlib import Path

import numpy as np
import pytest
from numba.core.compiler_lock import global_compiler_lock

import numbattn as na
from numbattn import distributed as nad
from numbattn import points
from numbattn.base import interrupts
from numbattn.base.interrupts import uninterrupted
from tests.tools.anywhere import instructions, stopped
from tests.tools.process import printed

PROGRAM = """
import os, signal, sys, time
from numbattn.base.interrupts import uninterrupted

class Stop(BaseException):
    pass

def handler(*args):
    raise Stop

signal.signal(signal.SIGALRM, handler)
"""
SMALL_STACK = """
import json, threading
threading.stack_size(64 << 10)
deep = uninterrupted(lambda: len(json.loads("[" * 900 + "]" * 900)))
thread = threading.Thread(target=lambda: print(deep(), threading.stack_size()))
thread.start()
thread.join()
"""
FORKING = """
def handler(*args):
    global child
    child = os.fork()

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.1)
parent = os.getpid()
assert uninterrupted(lambda: (time.sleep(0.5), 3)[1])() == 3
if os.getpid() != parent:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
ENDING = """
@uninterrupted
def work():
    time.sleep(0.5)
    print("done")

signal.setitimer(signal.ITIMER_REAL, 0.1)
try:
    work()
except Stop:
    print("stopped")
"""
# of threads that start and of those that wait: any of the functions of a call, at any of its instructions
ANYWHERE = """
import random
ended, draw = [], random.Random(0)

@uninterrupted
def work(n):
    ended.append(n)
    return n

stopped = 0
for n in range({calls}):
    try:
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 3e-4))
        while work(n) == n:
            pass
    except Stop:
        stopped += 1
    assert work(-n) == -n
print(stopped)
"""
signals = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no such signals on this system")
context = ContextVar("context", default=0)


here = uninterrupted(threading.current_thread)


def test_another_thread_works():
    assert here() is not threading.current_thread()
    assert here() not in threading.enumerate()


def test_work_within_work_has_no_other_thread():
    assert uninterrupted(lambda: here() is threading.current_thread())()


def test_a_thread_with_a_small_stack():
    """It is too small for a compiler. Other threads have what the user wants."""
    assert printed(PROGRAM + SMALL_STACK) == ["1 65536"]


def test_who_holds_the_compilers_lock_works_alone():
    """As in a user's code that calls numbattn while it is compiled: another thread would wait for ever."""
    with global_compiler_lock:
        assert here() is threading.current_thread()


def test_values_errors_and_the_context():
    def fail():
        raise KeyError(context.get())

    context.set(5)
    with pytest.raises(KeyError, match="5") as caught:
        uninterrupted(fail)()
    assert caught.traceback[-1].name == "fail"
    assert uninterrupted(lambda x, y: (x, y, context.get()))(1, y=2) == (1, 2, 5)


@pytest.mark.parametrize("where", ["interrupts.start_new_thread", "threading._start_new_thread"])
def test_without_threads_the_caller_works(where, monkeypatch):
    def none(*args):
        raise RuntimeError("can't start new thread")

    module, name = where.split(".")
    if module == "threading" and not hasattr(threading, name):
        pytest.skip("another name in this Python")
    monkeypatch.setattr({"interrupts": interrupts, "threading": threading}[module], name, none)
    assert uninterrupted(lambda: 3)() == 3


@signals
def test_a_handlers_exception_ends_the_call_at_once():
    ended, start = threading.Event(), time.perf_counter()

    def handler(*args):
        raise ZeroDivisionError

    def work():
        time.sleep(0.5)
        ended.set()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(ZeroDivisionError):
            uninterrupted(work)()
        assert time.perf_counter() - start < 0.25
        assert not ended.is_set()
        assert ended.wait(10), "it goes on"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@signals
def test_the_end_of_a_process_waits():
    assert printed(PROGRAM + ENDING) == ["stopped", "done"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork")
def test_a_handler_that_forks():
    """The other thread is not in the child."""
    assert printed(PROGRAM + FORKING) == ["7"]


@signals
def test_signals_at_any_moment():
    assert printed(PROGRAM + ANYWHERE.format(calls=300)) == ["300"]


def calls():
    """What a user does again and again, in many ways; the results."""
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 2, 24, 8)).astype(np.float32)
    options = {"mask": na.Window(9, 9) & (np.arange(24) < 20), "score": [na.Alibi([0.5, 0.25]), na.Softcap(3.0)]}
    o, backprop = na.attention_vjp(q, k, v, dropout=na.Dropout(0.1, seed=1), **options)
    y, back = points.product_vjp(q, k, v, points.Gaussian(0.7))
    cache = na.KVCache.zeros(1, 2, 30, 8, like=q, page_size=8)
    cache.append(k[None], v[None])
    ring = nad.Simulated(2)
    parts = nad.attention(ring, *map(ring.split, (q, k, v)), causal=True)
    weights = na.attention_weights(q, k, **options)
    return o, *backprop(do)[:3], y, *back(do)[:3], na.attention(q[None], cache), ring.join(parts), weights


@pytest.mark.parametrize("times", [5, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_handler_may_raise_anywhere(times):
    """The next calls are as ever."""
    want, path, rng = calls(), str(Path(na.__file__).parent), np.random.default_rng(times)
    last = instructions(calls, path)
    for at in rng.integers(last, size=times):
        stopped(calls, at, path)
        for x, y in zip(calls(), want, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=f"after instruction {at}")


FAULTS = {
    'hasattr(_here, "works") or ': "",
    "or any(_holds(*lock) for lock in LOCKS)": "",
    "copy_context()": "__import__('contextvars').Context()",
    "if os.getpid() != process:": "if False:",
    "daemon=False": "daemon=True",
    "usual = stack_size()": "usual = 0",
    "            stack_size(usual)": "            pass",
}
