"""Two or three processes."""

import copy
import pickle
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from shutil import which

import numpy as np
import pytest

from numbattn import distributed as nad
from numbattn.distributed import mpi

MPIEXEC = which("mpiexec", path=Path(sys.executable).parent)  # that of the wheel
with_mpi = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec beside Python: pip install mpi4py mpich")


def run(name, ranks=2):
    command = [MPIEXEC, "-n", str(ranks), sys.executable, "-m", "tests.distributed.mpi_program", name]
    return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)


@with_mpi
@pytest.mark.parametrize(("name", "ranks"), [("same", 2), ("interrupted", 3)])
def test_processes(name, ranks):
    found = run(name, ranks)
    assert found.returncode == 0, found.stderr
    assert sorted(found.stdout.split("\n")) == ["", *(f"done {rank}" for rank in range(ranks))]


@with_mpi
def test_when_one_is_killed_the_others_end():
    start = time.monotonic()
    found = run("killed")
    assert found.returncode != 0
    assert "done" not in found.stdout
    assert time.monotonic() - start < 60


def test_errors():
    with pytest.raises(TypeError, match=r"communicator: got 4, expected an mpi4py.MPI.Intracomm"):
        nad.Mpi(4)
    for kind, got in ((Nobody, "COMM_NULL"), (Inter, "an Intercomm")):
        with pytest.raises(ValueError, match=f"communicator: got {got}, expected an .* that this process is in"):
            nad.Mpi(kind())
    with pytest.raises(ValueError, match="order: got 'stripes'"):
        nad.Mpi(4, "stripes")
    for timeout in (0, -1.0, np.nan):
        with pytest.raises(ValueError, match=r"timeout: got (0|-1|nan), allowed are seconds above 0"):
            nad.Mpi(Alone(), timeout=timeout)


class Request:
    """That ends when it is told so, or called back."""

    done = False

    def Test(self):
        return self.done

    def Cancel(self):
        assert not self.done
        self.done = True


class Alone:
    """A communicator of the first of two processes, which never hears of the other one."""

    Improbe = None

    def Dup(self):
        return self

    def Get_rank(self):
        return 0

    def Get_size(self):
        return 2

    def Iprobe(self, tag):
        return False

    def Irecv(self, memory, rank, tag):
        return Request()

    Isend = Irecv

    def Is_inter(self):
        return False


class Nobody(Alone):
    """What processes get that are not in a communicator."""

    def __bool__(self):
        return False


class Inter(Alone):
    def Is_inter(self):
        return True


def test_memory_of_requests_is_kept_until_they_are_done():
    """Also that of a ring which nobody has any more. What a rank was to receive is called back, what it sends cannot
    be."""
    ring = nad.Mpi(Alone(), timeout=0.01)
    with pytest.raises(TimeoutError, match=r"rank 0 has waited 0.01 s for all others"):
        ring.join(np.zeros((5, 3)))
    received, sent = mpi.UNFINISHED[-2:]
    assert (len(received), len(sent)) == (0, 2)  # of the call, and that it has ended
    del ring
    sent[0].done = True
    assert mpi.UNFINISHED[-1] is sent
    mpi._sweep(sent)
    assert len(sent) == 1
    sent.clear()


def test_what_arrives_while_requests_are_cancelled_fits():
    """Messages meet the first request that is left."""

    class Posted(Request):
        def __init__(self, size):
            self.size = size

        def Test(self):
            first = next(request for request in posted if not request.done)
            assert self.done or first.size == 100, "message truncated"
            return self.done

    ring = nad.Mpi(Alone())
    posted = ring._received[:] = [Posted(100), Posted(8)]
    posted = [*posted, Posted(100)]  # where what is called back is not in the way
    ring._abandon()
    assert not ring._received
    ring._sent.clear()


def test_waiting_ends():
    ring = nad.Mpi(Alone(), timeout=0.01)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"rank 0 has waited 0.01 s for arrays of rank 3"):
        ring._finish([Request()], "arrays of rank 3")
    assert time.monotonic() - start < 5


def test_one_process_and_one_thread_at_a_time():
    """Messages of others would mix."""
    ring, x = nad.Mpi(Alone(), timeout=0.01), np.zeros((5, 3))
    for copied in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="ring: Mpi can be neither pickled nor copied; make one in each"):
            copied(ring)
    calls = partial(ring.join, x), ring.reset

    def handler(tag):
        """Of a signal; for another thread it is the same."""
        for call in calls:
            with pytest.raises(RuntimeError, match="ring: a call of it has not ended"):
                call()

    ring.communicator.Iprobe = handler
    for call in calls:
        with pytest.raises(TimeoutError):
            call()
    ring._process += 1
    for call in calls:
        with pytest.raises(RuntimeError, match=f"ring: made in process {ring._process}, of which this is a fork"):
            call()


def test_a_process_has_its_own_part():
    ring = nad.Mpi(Alone())
    ring.rank, ring.ranks = 1, 2
    np.testing.assert_array_equal(ring.split(np.arange(128), axis=0), np.arange(32, 96))


FAULTS = {
    "test_one_process_and_one_thread_at_a_time": {
        "with self._in_a_call:": "if True:",
        "distributed/driver.py": {
            "with self._in_a_call, closing(running)": "with closing(running)",
            "if os.getpid() != self._process:": "if False:",
        },
    },
    "test_what_arrives_while_requests_are_cancelled_fits": {
        "reversed(self._received)": "self._received",
    },
    "test_waiting_ends": {
        "if time.monotonic() > end": "if time.monotonic() > end + 6",
    },
    "test_memory_of_requests_is_kept_until_they_are_done": {
        "request.Cancel()": "pass",
        "self._send(repeat(np.empty(0)), self._others, END)": "pass",
        "UNFINISHED.extend([self._received, self._sent])": "pass",
        "if not request.Test()]": "if False]",
    },
    "test_processes[interrupted-3]": {
        "            self._listen()\n            if time": "            if time",
        "            except Interrupted:": "            except ZeroDivisionError:",
        "self._received.extend(map(message.Irecv, [np": "([np",
    },
}
