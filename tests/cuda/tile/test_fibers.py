"""Fibers, of which the tests of the simulator need little: by greenlet, if it is installed, and by threads."""

import subprocess
import sys
import threading
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from numbattn.cuda.tile import fibers
from tests.tools.launch import simulated_only

pytestmark = simulated_only


@pytest.fixture(params=["as installed", "threads"])
def module(request, monkeypatch):
    if request.param == "threads":
        monkeypatch.setitem(sys.modules, "greenlet", None)
    spec = spec_from_file_location("fibers_here", fibers.__file__)
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_they_run_in_turn(module):
    said, home = [], module.current()

    def run(name, other):
        for number in range(2):
            said.append((name, number))
            assert module.current() is crew[name]
            crew[other].switch()

    crew = {name: module.Fiber(lambda name=name, other=other: run(name, other)) for name, other in ("ab", "ba")}
    assert all(fiber.parent is home for fiber in crew.values())
    assert not said
    for fiber in crew.values():                                 # the second one is to end, too
        fiber.switch()
    assert said == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert module.current() is home


def test_one_that_has_ended_leaves_nothing(module):
    threads = threading.active_count()
    crew = [module.Fiber(lambda: home.switch()) for _ in range(3)]
    home = module.current()
    for fiber in crew * 2:
        fiber.switch()
    assert threading.active_count() == threads


def test_simulated_kernels_do_not_need_greenlet():
    script = """if True:
        import sys
        sys.modules["greenlet"] = None
        import numpy as np
        from numbattn.cuda.tile import simulate, sync_threads, thread_index
        def kernel(y):
            for i in range(3):
                sync_threads()
                y[thread_index()] += i
        y = np.zeros(64)
        simulate(kernel, (2, 1, 1), 64, 0, y)
        print(y.sum())
    """
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == f"{64 * 2 * 3}.0"


FAULTS = {
    "me.baton.acquire()": "pass",
}
