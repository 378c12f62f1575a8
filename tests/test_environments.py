"""The same few calls in a process of its own for each environment that might harm them."""

import os
from dataclasses import dataclass, field

import pytest

from .tools.process import printed

# `calls` compares a handful of results with the reference; what a row does in between may change none of them
PROGRAM = """
import os, random, signal, threading, time
import numpy as np
import numbattn as na
from numbattn import distributed as nad, reference

rng = np.random.default_rng(0)
q, k, v, do = rng.standard_normal((4, 1, 4, 40, 8)).astype(np.float16)
k, v = k[:, :2], v[:, :2]
with np.errstate(all="ignore"):
    o_exact, _ = reference.attention_forward(q, k, v, mask=na.Causal())
    grads_exact = reference.attention_backward(do, q, k, v, mask=na.Causal())

def check(found, exact):
    with np.errstate(all="ignore"):
        error = np.abs(found.astype(np.float64) - exact).max() / np.abs(exact).max()
    if not error < 4e-3:
        raise SystemExit(f"an error of {error}")

cache = na.KVCache.zeros(1, 2, 40, 8, like=q, page_size=8)

def append():
    n = cache.lengths[0]
    cache.append(k[:, :, n:n + 7], v[:, :, n:n + 7]) if n < 40 else cache.truncate(0)

def calls():
    o, backprop = na.attention_vjp(q, k, v, causal=True)
    check(o, o_exact)
    for found, exact in zip(backprop(do), grads_exact):
        check(found, exact)
    n = cache.lengths[0]
    if n:
        check(na.attention(q[:, :, n - 1 : n], cache, causal=True), o_exact[:, :, n - 1 : n])
    append()
    ring = nad.Simulated(2)
    check(ring.join(nad.attention(ring, *map(ring.split, (q, k, v)), causal=True)), o_exact)

"""
ALARMS = """
class Alarm(Exception):
    pass

def raise_alarm(*args):
    raise Alarm

signal.signal(signal.SIGALRM, raise_alarm)
calls()
begin = time.perf_counter()
calls()
taken, draw, raised = time.perf_counter() - begin, random.Random(0), 0
while raised < 25:
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, taken))
            calls()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Alarm:
        raised += 1
        calls()
"""
FORK = """
compiles = threading.Thread(target=na.attention, args=[np.ones((20, 8))] * 3)
compiles.start()
time.sleep(0.3)
child = os.fork()
signal.alarm(0 if child else 120)
calls()
compiles.join() if child else os._exit(0)
_, status = os.waitpid(child, 0)
if status:
    raise SystemExit(f"the child ends with {status}")
"""
WITHOUT_POSIX = """
import os, platform, sys
import ml_dtypes, numba, numpy, platformdirs
from concurrent.futures import ProcessPoolExecutor

for name in ("fork", "register_at_fork", "geteuid", "getuid", "getloadavg", "sched_getaffinity", "sysconf", "mkfifo",
             "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "RTLD_NOLOAD"):
    vars(os).pop(name, None)
for name in ("fcntl", "grp", "pwd", "resource", "syslog", "termios", "_multiprocessing"):
    sys.modules[name] = None
machine, platform.machine = platform.machine(), lambda: "ARM64"  # so it is for a process of x86 on Windows on Arm
"""
ON_ANOTHER_SYSTEM = """
from numbattn.base import teams
from numbattn.cpu import launch, subnormals

launch.PATIENCE = 0.001
calls()
q = rng.standard_normal((3, 1, 4, 1100, 16), np.float32)
na.attention(*q)                                                # by several threads
assert teams.team() is None
assert machine not in ("x86_64", "AMD64") or subnormals.CONTROL is subnormals.Mxcsr
from numbattn import __main__ as command
assert command._load() == 0
"""
OPTIMISED = """
calls()
from numbattn.__main__ import main
main(["plan", "--devices", "2"])
"""


@dataclass
class Row:
    variables: dict = field(default_factory=dict)
    options: tuple = ()  # of the interpreter
    first: str = ""
    does: str = "calls()"
    says: str = ""  # on stderr; nothing, if it is empty


QUICK = {
    "optimised": Row(options=("-OO",), does=OPTIMISED),
    "warnings are errors": Row(options=("-W", "error")),
    "seterr": Row(does="np.seterr(all='raise'); calls()"),
    "alarms": Row(does=ALARMS),
    "nothing of POSIX alone": Row(first=WITHOUT_POSIX, does=ON_ANOTHER_SYSTEM),
}
COMPILING = {
    "fork while a thread compiles": Row(does=FORK),
    "no home": Row({"HOME": "/dev/null", "NUMBATTN_CACHE_DIR": ""}, says="compiled code is not kept"),
    "bounds checked": Row({"NUMBA_BOUNDSCHECK": "1"}),
    "debugging": Row({"NUMBA_DEBUGINFO": "1"}),
    "generic CPU": Row({"NUMBA_CPU_NAME": "generic"}),
    "features of an old CPU": Row({"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse2"}),
    "no AVX": Row({"NUMBA_ENABLE_AVX": "0"}),
    "one thread": Row({"NUMBA_NUM_THREADS": "1", "NUMBA_THREADING_LAYER": "workqueue"}),
    "simulator of CUDA": Row({"NUMBA_ENABLE_CUDASIM": "1"}),
    "no JIT": Row({"NUMBA_DISABLE_JIT": "1"}, does="""
try:
    calls()
except ImportError as error:
    print(error, file=__import__("sys").stderr)
""", says="NUMBA_DISABLE_JIT is set"),
}  # fmt: skip


def run(row, **variables):
    """The process of a row ends well, and says what it is to say."""
    variables |= {"XDG_CACHE_HOME": "", **row.variables}
    printed(row.first + PROGRAM + row.does, options=row.options, says=row.says, **variables)


@pytest.mark.parametrize("name", QUICK)
def test_from_the_cache_in_use(name):
    run(QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILING)
def test_from_an_empty_cache(name, tmp_path):
    run(COMPILING[name], NUMBATTN_CACHE_DIR=str(tmp_path))


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache with all that the program compiles. (Not with NUMBA_OPT=0: then addresses remain in the code.)"""
    place = tmp_path_factory.mktemp("cache")
    run(Row(), NUMBATTN_CACHE_DIR=str(place))
    return place


def read_only(file):
    file.chmod(0o444)
    file.parent.chmod(0o555)


def of_others(file):
    file.chmod(0o666)
    file.parent.chmod(0o777)


def damaged(file):
    file.write_bytes(file.read_bytes()[:-100])


def fifo(file):
    file.unlink()
    os.mkfifo(file)


@pytest.mark.slow
@pytest.mark.parametrize("change", [read_only, of_others, damaged, fifo])
def test_what_became_of_the_cache(change, filled):
    folder = next(filled.rglob("cpu"))
    kept = {file: (file.read_bytes(), file.stat().st_mode) for file in folder.iterdir()}
    try:
        for file in kept:
            change(file)
        says = "compiled code is not kept" if change in (of_others, fifo) else ""
        run(Row(says=says), NUMBATTN_CACHE_DIR=str(filled))
    finally:
        folder.chmod(0o755)
        for file, (content, mode) in kept.items():
            file.unlink(missing_ok=True)
            file.write_bytes(content)
            file.chmod(mode)
