"""Kernels on the threads of NumPy's products and of torch's loops: results, limits, forks, many callers."""

import os

import pytest

from tests.tools.process import printed

PRELUDE = """
    import os, sys
    os.environ.pop("OPENBLAS_NUM_THREADS", None)                # of the worker, see conftest.py
    import numpy as np, numbattn as na
    from numbattn.base import teams

    asked = []
    for kind in teams.OpenBlas, teams.OpenMP:
        def run(self, *args, kind=kind, run=kind.run):
            asked.append(kind.__name__)
            run(self, *args)
        kind.run = run
    if not teams.of_numpy():
        print("no team")
        sys.exit()
    if os.cpu_count() < 2:
        print("no second core")
        sys.exit()
    rng = np.random.default_rng(0)
    q, k, v, do = rng.standard_normal((4, 2, 4, 600, 32), dtype=np.float32)

    def passes():
        o, back = na.attention_vjp(q, k, v, causal=True)
        return o, *back(do)

    def same(one, other):
        return all(map(np.array_equal, one, other))
"""


def said(code):
    lines = printed(PRELUDE + code)
    if lines[0].startswith("no "):
        pytest.skip(lines[0])
    return lines


def test_threads_of_products():
    """Calls of all sizes, from other threads, beside products, within the user's limits, and where OpenBLAS has been
    given other threads."""
    assert said("""
    from threading import Thread
    from threadpoolctl import threadpool_limits
    with threadpool_limits(1, "blas"):
        alone = passes()
    print(asked)
    print(same(passes(), alone), set(asked))
    long = rng.standard_normal((16, 4096, 64), dtype=np.float32)
    o = na.attention(long, long, long)
    with threadpool_limits(1, "blas"):
        print(np.array_equal(na.attention(long, long, long), o))
    a, wrong = np.ones((500, 500), np.float32), []

    def call():
        for _ in range(20):
            wrong.append(not same(passes(), alone) or (a @ a != 500).any())

    threads = [Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(len(wrong), any(wrong))
    teams.of_numpy()._callback.value = 1
    asked.clear()
    print(same(passes(), alone), asked)
""") == ["[]", "True {'OpenBlas'}", "True", "80 False", "True []"]


def test_threads_of_torch():
    """Of calls with tensors alone; not those of a parent."""
    pytest.importorskip("torch")
    assert said("""
    import torch
    from numbattn.interop.torch import attention
    if not teams.of_torch():
        print("no OpenMP")
        sys.exit()
    alone = passes()
    asked.clear()

    def with_torch():
        x = [torch.from_numpy(y).requires_grad_() for y in (q, k, v)]
        o = attention(*x, causal=True)
        o.backward(torch.from_numpy(do))
        return o.detach().numpy(), *[y.grad.numpy() for y in x]

    print(same(with_torch(), alone), set(asked))
    asked.clear()
    print(same(passes(), alone), set(asked))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    asked.clear()
    print(same(with_torch(), alone), asked)
    torch.set_num_threads(threads)
    child = os.fork() if hasattr(os, "fork") else 0
    if not child:
        with teams.OnThreadsOf(teams.of_torch):
            right = same(passes(), alone)
        os._exit(not right) if hasattr(os, "fork") else None
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 0)
""") == ["True {'OpenMP'}", "True {'OpenBlas'}", "True []", "0"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork")
def test_a_child_and_its_parent():
    """OpenBLAS starts its threads again in both."""
    assert said("""
    want = passes()
    child = os.fork()
    if not child:
        os._exit(not same(passes(), want))
    print(same(passes(), want), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""") == ["True 0"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork")
def test_forks_beside_calls():
    """A fork ends OpenBLAS' threads, whatever they do: it waits for those that compute for us."""
    assert said("""
    import faulthandler, time
    from threading import Thread
    faulthandler.dump_traceback_later(60, exit=True)
    want, wrong, ends = passes(), [], time.perf_counter() + 1.5

    def call():
        while time.perf_counter() < ends:
            wrong.append(not same(passes(), want))

    thread = Thread(target=call)
    thread.start()
    forks = 0
    while thread.is_alive():
        time.sleep(0.003 * rng.random())
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        forks += 1
    print(any(wrong), len(wrong) > 1, forks > 1)
""") == ["False True True"]


FAULTS = {
    "while self._words[0]:": "while False:",
    "0 if self._count() < threads or self._callback else threads": "threads",
    "return count if threads <= count <= limit else 0": "return threads",
    "jobs[:, ARGUMENT] = function, data": "jobs[:1, ARGUMENT] = function, data",
    "self._count() if here and not _forked else 0": "self._count() if here else 0",
    "        _here.team = of_numpy\n": "        pass\n",
}
