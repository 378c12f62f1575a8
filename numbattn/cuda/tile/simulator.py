"""Run a kernel in Python, one simulated GPU thread at a time: in a debugger, or to find what a GPU would not show.

`simulate(kernel, grid, threads, shared_bytes, *arguments)` takes the same function as the compiler, NumPy arrays and
scalars. A thread runs until it must wait, then another one does, so a run is deterministic, or shuffled by a seed.
When no thread can go on, the error says who waits for what. `races` checks accesses to shared memory.
"""

import random
import threading
from collections import deque

import numpy as np

from .fibers import Fiber, current
from .layout import WARP
from .races import NOTHING, WORKERS, RaceError, WatchedMemory


class DeadlockError(RuntimeError):
    """No thread can go on.

    >>> try:
    ...     run(lambda: sync_warpgroup())  # 32 threads are not a warpgroup
    ... except DeadlockError as error:
    ...     print(error)
    deadlock in block (0, 0, 0): threads 0-31 wait for sync_warpgroup() of warpgroup 0; 0 threads have ended
    """


_running = threading.local()  # .thread: the simulated thread
ALIGNMENT = 1024  # of the shared memory of a cluster's blocks


class Stopped(BaseException):
    """Raised in a thread to end it after another one has failed."""


# ------------------------------------------------------------------------------------------- what primitives call
def thread_index():
    """The number of this thread in its block, or cluster."""
    return _running.thread.number


def index_in_block():
    """The number of this thread in its own block."""
    return thread_index() % block().threads_of_block


def rank():
    """The number of this thread's block in its cluster."""
    return _running.thread.rank


def thread():
    return _running.thread


def block():
    """The block of this thread."""
    return _running.thread.block


def exchange(value, mask):
    """The `value` of the lane whose number differs in the bits of `mask`. All lanes of a warp have to call this."""
    return _meet_in_warp(value)[thread_index() ^ mask]


def gather_lanes(value):
    """The values of all lanes of the warp: {lane: value}."""
    return {number % WARP: posted for number, posted in _meet_in_warp(value).items()}


def _meet_in_warp(value):
    thread = _running.thread
    return thread.block.warp_of(thread).meet(value)


def sync_lanes():
    _meet_in_warp(None)


def of_block(name):
    """The name of something that each block has."""
    return f"{name}, in block {rank()} of its cluster" if rank() else name


def shared_memory():
    """The block's shared memory; that of a cluster's blocks is one, too."""
    return _running.thread.block.shared


def barrier(what, count, kind=None):
    """The block's barrier with this name, for `count` arrivals."""
    barriers, key = _running.thread.block.barriers, (what, rank())
    if key not in barriers:
        barriers[key] = (kind or Barrier)(what, count)
    return barriers[key]


# ------------------------------------------------------------------------------------------------ threads, barriers
class Meeting:
    """A barrier for the threads in `members`: a block's threads, or a warp's lanes. Each may bring a value for all."""

    def __init__(self, what, members):
        self.what, self.members, self.posts, self.waiting = what, set(members), {}, []

    def meet(self, value=None):
        thread = _running.thread
        self.posts[thread.number] = value
        if len(self.posts) < len(self.members):
            self.waiting.append(thread)
            thread.block.wait(self)
        else:
            self.open(thread)
        return thread.received

    def open(self, last=None):
        together = [*self.waiting, last] if last else self.waiting
        block = together[0].block
        block.shared.merge([thread.number for thread in together])
        for thread in together:
            thread.received = self.posts
        self.posts = {}
        block.ready.extend(self.waiting)
        self.waiting = []

    def leave(self, thread):
        """A thread has ended: do not wait for it."""
        self.members.discard(thread.number)
        if self.waiting and len(self.posts) == len(self.members):
            self.open()


class Barrier:
    """A barrier that opens each time `count` threads have arrived. Those that wait for it learn what these knew."""

    def __init__(self, what, count):
        self.what, self.count = what, count
        self.arrived, self.told = 0, NOTHING  # number in this phase; what they and those before them know
        self.met = []  # the numbers of those that arrive and wait in one
        self.ends = []  # what was told by the end of each phase that is over
        self.waiting = []

    @property
    def phases(self):
        """The number of phases that are over."""
        return len(self.ends)

    def arrive(self, known=None):
        """Arrive. known: what others learn from this thread, by default all that it knows."""
        self.told = np.maximum(self.told, shared_memory().tell() if known is None else known)
        self._count()

    def _count(self):
        self.arrived += 1
        if self.arrived == self.count:
            self.arrived = 0
            if self.met:
                self.meet(shared_memory())
            self.met = []
            self.ends.append(self.told)
            _running.thread.block.ready.extend(self.waiting)
            self.waiting = []

    def wait(self, phase):
        """Wait until a phase is over, by its number; phase -1 is over from the start.

        On a GPU a phase is known by its parity alone, so a wait for the phase after the next one would end at once.
        """
        thread = _running.thread
        if phase > self.phases:
            self._say_who_cannot_know([thread.number], phase)
        if phase > 0:
            self._demand_knowledge(thread.block.shared, [thread.number], phase)
        self._pass(thread, phase)
        if self.ends:
            thread.block.shared.learn(self.ends[-1])

    def _pass(self, thread, phase):
        while self.phases % 2 == phase % 2:
            self.waiting.append(thread)
            thread.block.wait(self)

    def sync(self):
        """Arrive and wait."""
        phase, thread = self.phases, _running.thread
        self.met.append(thread.number)
        self._count()
        self._pass(thread, phase)

    def meet(self, shared):
        """What `wait` does, for all at once that arrive and wait in one."""
        if self.ends:
            self._demand_knowledge(shared, self.met, self.phases)
        self.told = shared.merge(self.met, self.told)

    def _demand_knowledge(self, shared, threads, phase):
        """Check that these threads know that the phase before this one is over."""
        late = shared.who_does_not_know(self.ends[phase - 1], threads)
        if late:
            self._say_who_cannot_know(late, phase)

    def _say_who_cannot_know(self, threads, phase):
        raise RaceError(f"thread {threads[0]} waits for phase {phase} of {self.what} and cannot know that phase "
                        f"{phase - 1} is over: phase {phase - 2} has the same parity")


class Thread:
    """One GPU thread of each block, or cluster, in turn."""

    def __init__(self, number, rank):
        self.number, self.rank, self.block, self.received, self.gate = number, rank, None, None, None
        self.fiber = Fiber(self.run)
        self.fiber.switch()  # started by another thread, it would count the calls of that one as its own

    def run(self):
        self.fiber.parent.switch()
        with np.errstate(all="ignore"):  # a GPU does not warn
            while self.block:
                self.run_block()

    def run_block(self):
        block, _running.thread = self.block, self
        try:
            if not block.failure:
                block.body()
        except Stopped:
            pass
        except BaseException as error:
            block.fail(error, f"in thread {self.number} of block {block.place}")
        block.leave(self)

    def dismiss(self):
        """End: there are no more blocks."""
        self.block = None
        self.fiber.switch()


class SimulatedBlock:
    """A block, or the blocks of a cluster: then `place` is that of the first one, and the others' threads and bytes of
    shared memory come after its own."""

    def __init__(self, body, place, grid, crew, shared_bytes, order, cluster=1):
        self.body, self.place, self.grid, self.threads, self.order = body, place, grid, crew, order
        threads = self.alive = len(crew)
        self.shared_bytes = -(-shared_bytes // ALIGNMENT) * ALIGNMENT if cluster > 1 else shared_bytes
        self.shared = WatchedMemory(self.shared_bytes * cluster, threads, thread_index, WORKERS * cluster)
        self.ready, self.barriers = deque(crew), {}
        of_block = self.threads_of_block = threads // cluster
        self.blocks = [
            Meeting("sync_threads()", range(first, first + of_block)) for first in range(0, threads, of_block)
        ]
        self.cluster = Meeting("sync_cluster()", range(threads))
        self.warps = [
            Meeting(f"a warp operation of warp {first // WARP}", range(first, min(first + WARP, threads)))
            for first in range(0, threads, WARP)
        ]
        self.failure, self.caller = None, current()

    def everyone_of(self, thread):
        return self.blocks[thread.rank]

    def warp_of(self, thread):
        return self.warps[thread.number // WARP]

    def run(self):
        """Run the block; returns an error, if there was one."""
        for thread in self.threads:
            thread.block = self
        self.pass_on()
        return self.failure

    def pass_on(self):
        """Let a thread run that is ready, until it is this one's turn again."""
        if not self.alive:
            self.caller.switch()
            return
        if not self.ready:
            self.fail(DeadlockError(self.who_waits()))
        if self.order:
            self.ready.rotate(self.order.randrange(len(self.ready)))
        self.ready.popleft().fiber.switch()

    def wait(self, gate):
        """Called by a thread: wait until somebody has made it ready and its turn has come."""
        thread = _running.thread
        thread.gate = gate
        self.pass_on()
        thread.gate, _running.thread = None, thread
        if self.failure:
            raise Stopped

    def fail(self, error, note=None):
        if self.failure is None:
            if note and hasattr(error, "add_note"):
                error.add_note(note)
            self.failure = error
            self.ready.extend(t for t in self.threads if t.gate is not None and t not in self.ready)

    def leave(self, thread):
        self.alive -= 1
        if not self.failure:
            self.everyone_of(thread).leave(thread)
            self.cluster.leave(thread)
            self.warp_of(thread).leave(thread)
        self.pass_on()

    def who_waits(self):
        waiting = {}
        for thread in self.threads:
            if thread.gate:
                waiting.setdefault(thread.gate.what, []).append(thread.number)
        ended = len(self.threads) - sum(map(len, waiting.values()))
        waits = "; ".join(f"threads {spans(numbers)} wait for {what}" for what, numbers in waiting.items())
        return f"deadlock in block {self.place}: {waits}; {ended} threads have ended"


def spans(numbers):
    """[0, 1, 2, 5] -> "0-2, 5"."""
    found = []
    for n in numbers:
        if found and found[-1][1] == n - 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in found)


# -------------------------------------------------------------------------------------------------------- kernels
def simulate(kernel, grid, threads, shared_bytes, *arguments, seed=None, cluster=1):
    """Run a kernel thread by thread.

    Parameters
    ----------
    kernel : function
    grid : tuple of three ints, in blocks
    threads : int, in a block
    shared_bytes : int
        Dynamic shared memory of a block.
    arguments : NumPy arrays and scalars
        bfloat16 arrays as they are, or seen as uint16.
    seed : int, optional
        Shuffles the order in which the threads run.
    cluster : int, optional
        How many blocks next to each other are a cluster: see `cluster`.

    >>> y = np.zeros(4)
    >>> def kernel(y):
    ...     if thread_index() == 0:
    ...         y[block_index()] = grid_size()
    >>> simulate(kernel, (4, 1, 1), 32, 0, y)
    >>> y
    array([4., 4., 4., 4.])
    """
    order, failure = None if seed is None else random.Random(seed), None
    crew = [Thread(number, number // threads) for number in range(threads * cluster)]
    for *above, first in np.ndindex(*grid[:0:-1], grid[0] // cluster):
        place = first * cluster, *above[::-1]
        failure = SimulatedBlock(lambda: kernel(*arguments), place, grid, crew, shared_bytes, order, cluster).run()
        if failure:
            break
    for thread in crew:
        thread.dismiss()
    if failure:
        raise failure
