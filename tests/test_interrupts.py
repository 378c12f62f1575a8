import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextvars import ContextVar

import pytest
from numba.core.compiler_lock import global_compiler_lock

from numbattn import interrupts
from numbattn.interrupts import uninterrupted

PROGRAM = """
import os, signal, sys, time
from numbattn.interrupts import uninterrupted

class Stop(BaseException):
    pass

def handler(*args):
    raise Stop

signal.signal(signal.SIGALRM, handler)
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


def run(code):
    """What a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", PROGRAM + textwrap.dedent(code)], capture_output=True, text=True,
                          timeout=60)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def in_a_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


here = uninterrupted(threading.current_thread)


def test_the_main_thread_lets_another_one_work():
    assert here() is not threading.current_thread()
    assert here() not in threading.enumerate()


def test_others_work_themselves():
    """A thread in which no handlers run, and work within work."""
    assert in_a_thread(lambda: here() is threading.current_thread())
    assert uninterrupted(lambda: here() is threading.current_thread())()


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
    assert run(ENDING) == ["stopped", "done"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork")
def test_a_handler_that_forks():
    """The other thread is not in the child."""
    assert run(FORKING) == ["7"]


@signals
def test_signals_at_any_moment():
    assert run(ANYWHERE.format(calls=300)) == ["300"]


FAULTS = {
    "get_ident() != main_thread().ident or ": "",
    "or any(_holds(*lock) for lock in LOCKS)": "",
    "copy_context()": "__import__('contextvars').Context()",
    "if os.getpid() != process:": "if False:",
    "daemon=False": "daemon=True",
    "start_new_thread(self._start, ())": "self._start()",
}
