import os

import pytest

from tests.tools.process import printed

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork")
IMPORT = """
import os, signal, sys, threading, time
from numbattn.base import forks

forks.PACKAGES += "slow",
thread = threading.Thread(target=__import__, args=("slow",))
thread.start()
while "slow" not in sys.modules:
    time.sleep(0.01)
child = os.fork()
if not child:
    signal.alarm(10)
    import slow
    os._exit(slow.last)
assert os.waitpid(child, 0)[1] == 0
"""
NESTED = """
import os, signal
from threading import RLock, Thread
from types import SimpleNamespace
import sys
from numbattn.base import forks

lock, forked = RLock(), []
sys.modules["locks"] = SimpleNamespace(lock=lock)
forks.LOCKS = ("locks", "lock"),

def fork(*_):
    child = os.fork()
    if not child:
        os._exit(0)
    forked.append(os.waitpid(child, 0)[1])

signal.signal(signal.SIGALRM, fork)
signal.setitimer(signal.ITIMER_REAL, 0.1)
holder = Thread(target=lambda: (lock.acquire(), __import__("time").sleep(0.5), lock.release()))
holder.start()
fork()
assert forked == [0, 0]
thread = Thread(target=lambda: forked.append(lock.acquire(timeout=5)))  # it is free again
thread.start()
thread.join()
assert forked[-1] is True
"""
PROPERTY = """
import os, signal, time
from threading import Event, Thread
from numbattn.base.forks import cached_property

started, parent = Event(), os.getpid()

class Slow:
    @cached_property
    def value(self):
        started.set()
        time.sleep(0.5 * (os.getpid() == parent))
        return 3

thread = Thread(target=lambda: Slow().value)
thread.start()
started.wait()
child = os.fork()
if not child:
    signal.alarm(10)
    os._exit(Slow().value - 3)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("code", [IMPORT, NESTED, PROPERTY], ids=["import", "nested", "property"])
def test_a_fork_while_another_thread(tmp_path, code):
    """Imports, holds a lock while a signal handler forks, too, or computes what is kept."""
    (tmp_path / "slow.py").write_text("import time; time.sleep(0.5); last = 0")
    printed(code, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


FAULTS = {
    ("cpu/test_compile.py::test_a_child_that_is_forked_while_a_thread_compiles", "base/test_forks.py"): {
        "before=_forks.before, after_in_parent=_forks.after, after_in_child=_forks.after": "before=list",
        "held.enter_context(attrgetter(lock)(sys.modules[module]))": "pass",
        "self.held.pop().close()": "pass",
        "import_module(name)": "pass",
    },
    "found = instance.__dict__[self.attrname] = self.func(instance)": "found = super().__get__(instance, owner)",
}
