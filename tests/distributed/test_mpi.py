"""Two processes."""

import subprocess
import sys
import time
from pathlib import Path
from shutil import which

import numpy as np
import pytest

from numbattn import distributed as nad

MPIEXEC = which("mpiexec", path=Path(sys.executable).parent)  # that of the wheel
with_mpi = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec beside Python: pip install mpi4py mpich")


def run(name):
    command = [MPIEXEC, "-n", "2", sys.executable, "-m", "tests.distributed.mpi_program", name]
    return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)


@with_mpi
@pytest.mark.parametrize("name", ["same", "differs", "gone"])
def test_two_processes(name):
    found = run(name)
    assert found.returncode == 0, found.stderr
    assert name == "gone" or sorted(found.stdout.split("\n")) == ["", "done 0", "done 1"]


@with_mpi
def test_when_one_is_killed_the_others_end():
    start = time.monotonic()
    found = run("killed")
    assert found.returncode != 0
    assert "done" not in found.stdout
    assert time.monotonic() - start < 60


def test_errors():
    with pytest.raises(TypeError, match=r"communicator: got 4, expected an mpi4py.MPI.Comm"):
        nad.Mpi(4)
    with pytest.raises(ValueError, match="order: got 'stripes'"):
        nad.Mpi(4, "stripes")


class Alone:
    """A communicator of one process."""

    Iallgatherv = None

    def Dup(self):
        return self

    def Get_rank(self):
        return 0

    def Get_size(self):
        return 1


class Never:
    """A request."""

    def Test(self):
        return False


def test_waiting_ends():
    ring = nad.Mpi(Alone(), timeout=0.01)
    assert (ring.rank, ring.ranks) == (0, 1)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"rank 0 has waited 0.01 s for arrays of rank 3"):
        ring._finish([Never()], "arrays of rank 3")
    assert time.monotonic() - start < 5


def test_a_process_has_its_own_part():
    ring = nad.Mpi(Alone())
    ring.rank, ring.ranks = 1, 2
    np.testing.assert_array_equal(ring.split(np.arange(128), axis=0), np.arange(32, 96))
