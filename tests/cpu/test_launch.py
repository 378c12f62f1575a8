"""Threads, signals, forks, the end of a process: what a user notices only when it fails."""

import ctypes
import os
import signal
import threading
import time

import numba
import numpy as np
import pytest

import numbattn as na
from numbattn.cpu import launch
from numbattn.cpu.compile import Kernel
from numbattn.cpu.record import At, Record
from numbattn.cpu.tile import address_of, call_at
from tests.tools.process import printed

MUCH = 10 * launch.SHORT


@Kernel
def callback(first, end, stop, scratch, function):
    call_at(function, (first, end, address_of(stop), address_of(scratch)))


def launched(function, blocks, work, nbytes=0):
    """Launch a kernel that calls function(first, last, stop, address of scratch); stop() tells whether it is to end."""

    def called(first, last, stop, scratch):
        function(first, last, lambda: ctypes.c_int64.from_address(stop).value, scratch)

    entry = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(called)
    call = callback.given(Record(At(0, (1,), np.uint8)), Record(ctypes.cast(entry, ctypes.c_void_p).value, held=entry))
    launch.launch(call, blocks, work, nbytes)


# ------------------------------------------------------------------------------------------------------------- threads
@pytest.mark.parametrize("work", [0, 2 * launch.SERIAL, MUCH])
@pytest.mark.parametrize("blocks", [0, 1, 2, 7, 1000])
def test_every_block_runs_once(blocks, work):
    done = []
    launched(lambda first, last, stop, scratch: done.extend(range(first, last)), blocks, work)
    assert sorted(done) == list(range(blocks))


class Failing:
    """Threads of others that cannot be asked."""

    def size(self, threads, limit, here):
        return threads

    def run(self, function, data, size):
        raise MemoryError


@pytest.mark.parametrize("work", [2 * launch.SERIAL, MUCH])
def test_an_error_in_a_thread_reaches_the_caller(work, monkeypatch):
    monkeypatch.setattr(launch, "_threads", lambda: 2)
    monkeypatch.setattr(launch.teams, "team", Failing)
    with pytest.raises(MemoryError):
        launched(None, 100, work)


@pytest.mark.parametrize("work", [0, MUCH])
def test_arrays_are_as_many_as_a_call_lacks(work):
    call = callback.given(Record(At(0, (1,), np.uint8)), Record(0))
    with pytest.raises(ValueError, match="arrays: got 2, expected 1"):
        launch.launch(call, 0, work, 0, (np.zeros(1),))


@pytest.mark.parametrize("work", [2 * launch.SERIAL, MUCH])
def test_without_threads_the_caller_does_it_all(work, monkeypatch):
    def none(*args):
        raise RuntimeError("can't start new thread")

    done = []
    monkeypatch.setattr(launch, "start_new_thread", none)
    launched(lambda first, last, stop, scratch: done.extend(range(first, last)), 20, work)
    assert sorted(done) == list(range(20))


@pytest.mark.parametrize(("work", "started"), [(0, 0), (2 * launch.SERIAL, 1), (MUCH, 3)])
def test_no_more_threads_than_pay(work, started, monkeypatch):
    """The caller is one of them, unless they have much to do."""
    start, starts = launch.start_new_thread, []
    monkeypatch.setattr(launch, "_threads", lambda: 3)
    monkeypatch.setattr(launch.teams, "team", lambda: None)
    monkeypatch.setattr(launch, "start_new_thread", lambda *args: starts.append(start(*args)))
    launched(lambda first, last, stop, scratch: None, 20, work)
    assert len(starts) == started


@pytest.mark.parametrize(("work", "patience"), [(2 * launch.SERIAL, None), (MUCH, None), (MUCH, 0.001)])
def test_a_call_ends_after_its_last_block(work, patience, monkeypatch):
    """Also where it looks now and then whether it does."""
    monkeypatch.setattr(launch, "PATIENCE", patience)
    done = []

    def slow(first, last, stop, scratch):
        time.sleep(0.02)
        done.extend(range(first, last))

    launched(slow, 8, work)
    assert sorted(done) == list(range(8))


def test_each_thread_has_its_own_scratch():
    used = {}

    def note(first, last, stop, scratch):
        used.setdefault(threading.get_ident(), set()).add(scratch)
        time.sleep(0.01)

    launched(note, 50, MUCH, 64)
    assert all(len(mine) == 1 for mine in used.values())
    assert len(set.union(*used.values())) == len(used)


def test_calls_from_many_threads(rng):
    q, k, v = rng.standard_normal((3, 3, 4, 300, 16))
    want, wrong = na.attention(q, k, v, causal=True), []

    def call():
        for _ in range(5):
            wrong.append(not np.array_equal(na.attention(q, k, v, causal=True), want))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [False] * 20


def test_results_do_not_depend_on_the_number_of_threads(rng):
    q, k, v, do = rng.standard_normal((4, 1, 1, 1100, 16)).astype(np.float32)

    def results():
        o, saved = na.attention_forward(q, k, v, causal=True)
        return o, saved.lse, *na.attention_backward(do, saved)

    many, before = results(), numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        one = results()
    finally:
        numba.set_num_threads(before)
    for a, b in zip(many, one):
        np.testing.assert_array_equal(a, b)


def test_as_many_threads_as_numba_may_use(monkeypatch):
    monkeypatch.setattr(launch.parallel, "_is_initialized", False)
    assert launch._threads() == numba.config.NUMBA_NUM_THREADS
    monkeypatch.setattr(launch.parallel, "_is_initialized", True)
    monkeypatch.setattr(numba, "get_num_threads", lambda: 77)
    assert launch._threads() == 77


def test_the_users_blas_keeps_its_threads():
    """A call leaves NumPy's and SciPy's BLAS alone, in it and after it, from any thread."""
    out = printed("""
        import os
        os.environ.pop("OPENBLAS_NUM_THREADS", None)            # of the worker, see conftest.py
        import threading, numpy as np, scipy.linalg.cython_blas, numbattn as na
        from threadpoolctl import threadpool_info, threadpool_limits

        def threads():
            return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

        x = np.random.default_rng(0).standard_normal((3, 4, 1000, 64))
        before, seen = threads(), []
        calls = [threading.Thread(target=na.attention, args=x) for _ in range(3)]
        for call in calls:
            call.start()
        while any(call.is_alive() for call in calls):
            seen.append(threads())
        assert all(found == before for found in seen + [threads()]), (before, seen)
        with threadpool_limits(1):
            assert set(threads()) == {1}
            na.attention(*x)
            assert set(threads()) == {1}
        assert threads() == before
        print(len(seen) > 0)
    """)
    assert out == ["True"]


# ------------------------------------------------------------------------------------------------------------- signals
INTERRUPTED = """
    import os, signal, threading, time
    import numpy as np, numbattn as na

    class Timeout(Exception):
        pass

    def handler(number, frame):
        raise {raised}

    signal.signal(signal.SIGINT, handler)
    q, k, v = np.random.default_rng(0).standard_normal((3, 8, 16384, 64)).astype(np.float16)
    small = [x[:, :2000] for x in (q, k, v)]
    want, back = na.attention_vjp(*small)           # compiles
    back(want)
    _, saved = na.attention_forward(q[:, :100], k, v)
    saved = na.Saved.of(q, k, v, q, np.zeros((8, 16384), np.float32))
    sent = []

    def send():
        time.sleep(0.5)
        sent.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send).start()
    try:
        {call}
    except {raised} as error:
        late = time.perf_counter() - sent[0]
        del error
    running = [name for name in os.listdir("/proc/self/task")] if os.path.exists("/proc/self/task") else []
    del q, k, v, saved
    start = time.perf_counter()
    assert np.array_equal(na.attention(*small), want)
    print(late < 0.2)
"""


@pytest.mark.skipif(os.name == "nt", reason="os.kill ends the process there")
@pytest.mark.parametrize(("call", "raised"), [
    ("na.attention(q, k, v)", "KeyboardInterrupt"),
    pytest.param("na.attention_backward(q, saved)", "Timeout", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_signal_handler_may_raise(call, raised):
    """Long calls end at once, nothing that a thread still reads is freed, and the next call is as ever."""
    assert printed(INTERRUPTED.format(call=call, raised=raised)) == ["True"]


ANYWHERE = """
    import time
    from numbattn.cpu import launch
    from tests.cpu.test_launch import launched
    from tests.tools.anywhere import stopped

    def kernel(first, last, stop, scratch):
        inside.append(first)
        time.sleep(2e-4)
        inside.remove(first)

    launch._threads = lambda: 3
    for work in 2 * launch.SERIAL, 3 * launch.SHORT:
        at, inside = 0, []
        while stopped(lambda: launched(kernel, 4, work), at, launch.__file__):
            assert not inside, f"after instruction {at} a thread is in the kernel"
            at += 1
        print(at > 100)
"""


def test_a_handler_may_raise_anywhere():
    """Whether the calling thread takes part or waits."""
    assert printed(ANYWHERE) == ["True", "True"]


ALARMS = """
    import random, signal
    import numpy as np, numbattn as na

    class Alarm(RuntimeError):
        pass

    def handler(*args):
        raise Alarm

    signal.signal(signal.SIGALRM, handler)
    q, draw = np.random.default_rng(0).standard_normal((8, 350, 64), dtype=np.float32), random.Random(0)
    want = na.attention(q, q, q)
    for _ in range({times}):
        try:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 6e-3))
            while True:
                na.attention(q, q, q)
        except Alarm:
            pass
        assert np.array_equal(na.attention(q, q, q), want)
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no such signals on this system")
@pytest.mark.parametrize("times", [50, pytest.param(2000, marks=pytest.mark.slow)])
def test_alarms_in_short_calls(times):
    assert printed(ALARMS.format(times=times)) == []


def test_an_interrupted_call_leaves_no_thread_behind():
    """However often it is interrupted while it waits for its threads."""
    inside, left = threading.Semaphore(0), []

    def wait(first, last, stop, scratch):
        inside.release()
        while not stop():
            time.sleep(0.001)
        time.sleep(0.1)  # a tile takes its time
        left.append(first)

    main = threading.get_ident()

    def interrupt():
        inside.acquire()
        for _ in range(3):
            signal.pthread_kill(main, signal.SIGUSR1)
            time.sleep(0.02)

    def handler(number, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(TimeoutError):
            launched(wait, 10, MUCH)
        assert left, "a thread is still in the kernel"
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


# ------------------------------------------------------------------------------------------------------------- the end
def test_calls_while_a_process_ends():
    """From a thread that outlives the main thread, and from atexit; small ones and large ones."""
    out = printed("""
        import atexit, threading, time
        import numpy as np, numbattn as na
        x = np.random.default_rng(0).standard_normal((3, 4, 2000, 64), dtype=np.float32)
        want = na.attention(*x)

        def call():
            assert np.array_equal(na.attention(*x), want)
            na.attention(*x[:, :, :3])
            print("called", flush=True)

        def late():
            threading.main_thread().join()
            time.sleep(0.2)
            call()

        atexit.register(call)
        threading.Thread(target=late).start()
    """)
    assert out == ["called", "called"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_can_call():
    """Its parent's threads are not there."""
    out = printed("""
        import os
        import numpy as np, numbattn as na
        x = np.random.default_rng(0).standard_normal((3, 2, 4, 1000, 8))
        want = na.attention(*x)
        child = os.fork()
        if child == 0:
            os._exit(not np.array_equal(na.attention(*x), want))
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    assert out == []


FAULTS = {
    "test_arrays_are_as_many_as_a_call_lacks": {"if len(arrays) != words[OBJECTS]:": "if False:"},
    (
        "test_every_block_runs_once",
        "test_an_error_in_a_thread_reaches_the_caller",
        "test_without_threads_the_caller_does_it_all",
        "test_each_thread_has_its_own_scratch",
        "test_no_more_threads_than_pay",
        "test_a_call_ends_after_its_last_block",
        "test_an_interrupted_call_leaves_no_thread_behind",
    ): {
        "range(threads - takes_part)": "range(threads)",
        "self.error, self.words[STOP] = error, 1": "self.words[STOP] = 1",
        "self.words[STOP] = 1\n                return": "return",
        "(size or threads) * nbytes": "nbytes",
        "while self.has_blocks() or self": "while self",
        "or self.left.qsize() < self.entered.qsize()": "",
        "with suppress(Empty):": "if True:",
    },
    "test_a_handler_may_raise_anywhere": {
        "return self.finish()": "return None",
    },
    "tools/test_threads.py::test_calls_of_threads_at_once": {
        "words = call.words[:]": "words = call.words",
    },
}
